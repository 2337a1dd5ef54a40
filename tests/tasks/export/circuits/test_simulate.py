"""Circuits are right bit for bit in a simulator, and a wrong one is noticed."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import circuit_nets
import numpy as np
import pytest
import torch

from trainwright.tasks.errors import NotInstalled, TrainwrightError
from trainwright.tasks.export.circuits.integer_model import IntegerModel
from trainwright.tasks.export.circuits.pipelined import write_pipelined
from trainwright.tasks.export.circuits.sequential import write_sequential
from trainwright.tasks.export.circuits.simulate import (
    Simulated,
    require_simulator,
    run_tool,
    simulate,
    write_bench,
)

_TIMEOUT_S = 300


def simulated(
    write: Any, model: IntegerModel, inputs: np.ndarray, outputs: np.ndarray, folder: Path
) -> list[Simulated]:
    circuit = write(model, folder)
    bench = write_bench(circuit, inputs, outputs, folder)
    return simulate([*circuit.files, bench], folder, _TIMEOUT_S)


@pytest.mark.slow  # needs Icarus Verilog, which `make setup-system` installs
@pytest.mark.parametrize("write", [write_pipelined, write_sequential])
@pytest.mark.parametrize("make", [circuit_nets.dense, circuit_nets.convolutional])
@pytest.mark.parametrize("bits", [2, 5])
def test_every_output_is_the_integer_models(
    write: Any, make: Any, bits: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net, shape = make()
    rows = circuit_nets.rows(shape, 30, signed=bits == 5)
    model = circuit_nets.integers_of(net, rows, bits)
    inputs = model.prepare({"inputs": rows})
    for one in simulated(write, model, inputs, model.run(inputs), tmp_path):
        assert (one.vectors, one.outputs, one.mismatches) == (30, 90, 0)


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_pipelined, write_sequential])
def test_a_wrong_output_is_a_mismatch(write: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, shape = circuit_nets.dense()
    rows = circuit_nets.rows(shape, 10)
    model = circuit_nets.integers_of(net, rows, 5)
    inputs = model.prepare({"inputs": rows})
    expected = model.run(inputs)
    expected[4, 1] ^= 1 << 4
    found = simulated(write, model, inputs, expected, tmp_path)
    assert {one.mismatches for one in found} == {1}


@pytest.mark.parametrize("write", [write_pipelined, write_sequential])
def test_an_output_that_the_circuits_port_would_cut_off_is_refused(
    write: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net, shape = circuit_nets.dense()
    rows = circuit_nets.rows(shape, 10)
    model = circuit_nets.integers_of(net, rows, 5)
    inputs, circuit = model.prepare({"inputs": rows}), write(model, tmp_path)
    expected = model.run(inputs)
    write_bench(circuit, inputs, expected, tmp_path)
    expected[4, 1] += 1 << 40
    with pytest.raises(TrainwrightError, match=r"output 1 needs \d+ bits, the circuit has \d+"):
        write_bench(circuit, inputs, expected, tmp_path)


def test_without_a_simulator_the_error_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotInstalled, match="make setup-system"):
        require_simulator()


def test_a_tool_that_fails_or_is_late_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TrainwrightError, match=r"ls failed: .*nowhere"):
        run_tool(["ls", "nowhere"], tmp_path, 60)
    with pytest.raises(
        TrainwrightError, match=r"sleep did not end within 0\.1 s; TRAINWRIGHT_EXPORT_T"
    ):
        run_tool(["sleep", "60"], tmp_path, 0.1)


STARTS_ANOTHER = ["sh", "-c", "sleep 300 & echo $! > started; mv started pid; wait"]


def runs(pid: int) -> bool:
    """Whether a process runs; one that has ended may not have been waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    until = time.monotonic() + 60
    while runs(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not runs(pid)


def test_a_late_tool_leaves_no_process_that_it_started(tmp_path: Path) -> None:
    with pytest.raises(TrainwrightError, match="sh did not end within 3 s"):
        run_tool(STARTS_ANOTHER, tmp_path, 3, own_group=True)
    assert ends(int((tmp_path / "pid").read_text()))


def test_an_interrupted_tool_leaves_no_process_that_it_started(tmp_path: Path) -> None:
    def interrupt() -> None:
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_tool(STARTS_ANOTHER, tmp_path, 60, own_group=True)
    thread.join()
    assert ends(int((tmp_path / "pid").read_text()))
