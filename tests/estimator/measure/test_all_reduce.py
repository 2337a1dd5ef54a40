"""Measuring the link between two ranks of this machine: real processes, short."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from trainwright.estimator.errors import BadInput, BusyMachine
from trainwright.estimator.interfaces import interface_of
from trainwright.estimator.measure.all_reduce import measure_link
from trainwright.estimator.predict.communication import Link, all_reduce

COMMAND = [sys.executable, "-m", "trainwright.estimator.measure.all_reduce"]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=60)


def test_a_measured_link_is_written_and_predicts_its_own_samples(tmp_path: Path) -> None:
    out = tmp_path / "new" / "link.json"
    done = run("--out", str(out), "--budget", "0.3")
    assert (done.returncode, done.stderr) == (0, "")
    link = Link.model_validate_json(out.read_text())
    # A wide range of plausible bandwidths.
    assert 1e6 < link.bandwidth_bytes_per_s < 1e12
    assert link.latency_s < 0.1
    assert 0 <= link.after_sum_s < 1
    assert all_reduce(link, 32 << 20, 2).median > all_reduce(link, 1 << 10, 2).median
    assert [one.name for one in out.parent.iterdir()] == ["link.json"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ("--address", "192.0.2.1"),
            "--address: got '192.0.2.1'; not an address of this machine, which has ",
        ),
        (
            ("--address", "no-such-host.invalid"),
            "--address: got 'no-such-host.invalid'; no such address or host name",
        ),
        (("--budget", "0"), "--budget: got 0; allowed: 0.2 to 60 s"),
        (("--budget", "nan"), "--budget: got nan; allowed: 0.2 to 60 s"),
    ],
)
def test_bad_input_gives_one_line_and_writes_nothing(
    options: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    done = run("--out", str(tmp_path / "link.json"), *options)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(says)
    assert not list(tmp_path.iterdir())


def test_an_unwritable_file_is_reported_before_the_measurement_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("--out", str(tmp_path / "file" / "link.json"), "--budget", "60")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"link: {tmp_path}/file/link.json: can't be written")


def test_the_interface_of_an_address_is_found_and_budgets_are_bounded() -> None:
    loopback = interface_of("127.0.0.1")
    assert any(
        one.family == socket.AF_INET and one.address == "127.0.0.1"
        for one in psutil.net_if_addrs()[loopback]
    )
    with pytest.raises(BadInput, match="--budget: got 1e"):
        measure_link(budget_s=1e6)


def test_ranks_that_do_not_connect_in_time_are_reported_as_a_busy_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "trainwright.estimator.measure.all_reduce._MEET_S", 0.1
    )  # not enough time to load torch
    with pytest.raises(BusyMachine, match="no result after 0 s over"):
        measure_link(budget_s=0.2)


def start(tmp_path: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A long measurement, and its two ranks, which have begun to meet."""
    measuring = subprocess.Popen(
        [*COMMAND, "--out", str(tmp_path / "link.json"), "--budget", "30"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ranks = psutil.Process(measuring.pid).children()
        if len(ranks) == 2 and any(tmp_path.glob("*/meeting")):
            return measuring, ranks
        time.sleep(0.02)
    measuring.kill()
    raise AssertionError("the ranks did not start")


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGTERM, signal.SIGINT)),
    ],
)
def test_the_ranks_end_with_the_process_that_started_them(
    number: signal.Signals, tmp_path: Path
) -> None:
    measuring, ranks = start(tmp_path)
    measuring.send_signal(number)
    _, said = measuring.communicate(timeout=30)
    assert psutil.wait_procs(ranks, timeout=30)[1] == []
    assert "Traceback" not in said
    assert not (tmp_path / "link.json").exists()


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_rank_gives_one_line_and_ends_the_other(killed: int, tmp_path: Path) -> None:
    measuring, ranks = start(tmp_path)
    ranks[killed].kill()
    _, said = measuring.communicate(timeout=30)
    assert measuring.returncode == 1
    [line] = said.splitlines()
    assert line.startswith("link: rank ")
    assert psutil.wait_procs(ranks, timeout=30)[1] == []
    assert not (tmp_path / "link.json").exists()
