"""The kind `rtl`: a finished run's model as Verilog, simulated on all its validation rows.

    1. in the sandbox: read the layers, search bit widths, choose integers (`circuit_process`)
    2. write the circuits (`pipelined`, `sequential`) and their test benches
    3. simulate; every output must be the integer model's (`simulate`)
    4. cells and clock on two families of FPGA (`synthesize`), beside what was predicted

Nothing that a user wrote gets into Verilog or a command: both are made of numbers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainwright.tasks import progress
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.export.exportable import Exportable, ExportOptions
from trainwright.tasks.export.model_sandbox import model_request, run_in_sandbox
from trainwright.tasks.runs.artefacts.export_report import CircuitCells, ExportReport, MetricPair

if TYPE_CHECKING:
    from trainwright.tasks.export.circuits.integer_model import IntegerModel
    from trainwright.tasks.export.circuits.pipelined import PipelinedCircuit
    from trainwright.tasks.export.circuits.sequential import SequentialCircuit
    from trainwright.tasks.export.circuits.simulate import Simulated
    from trainwright.tasks.export.circuits.synthesize import Synthesised

    Circuit = PipelinedCircuit | SequentialCircuit

PROCESS = "trainwright.tasks.export.circuits.circuit_process:answer"
CircuitStyle = Literal["pipelined", "sequential"]
_MODEL = "model.npz"
_SEARCH_S = 60.0
_MOST_CYCLES = 50_000_000
"""of all validation rows in the simulation of a sequential circuit"""
_MOST_GROWTH = 4
"""of a pipelined circuit's cells while its widths are searched, over the first estimate"""


def to_circuit(model: Exportable, folder: Path, options: ExportOptions) -> ExportReport:
    """Write Verilog, test benches, the integer model, a picture and a README into a folder.

    Raises BadInput for a model that no circuit can hold, whose metric falls too far or whose code
    spoils what is read of it,
    NotInstalled without Icarus Verilog, TrainwrightError if an output differs.
    """
    from trainwright.tasks.export.circuits import circuit_page
    from trainwright.tasks.export.circuits.simulate import require_simulator

    require_simulator()
    phases: dict[str, float] = {}
    with _phase(phases, "train for few bits"):
        found = _integers(model, folder / _MODEL, options)
    integers = _loaded(folder / _MODEL, found["styles"], found["rows"])
    circuits: dict[CircuitStyle, Circuit] = {}
    simulated: dict[CircuitStyle, list[Simulated]] = {}
    for style in found["styles"]:
        with _phase(phases, f"write the {style} circuit"):
            circuits[style] = _written(style, integers, folder)
        with _phase(phases, f"simulate the {style} circuit"):
            simulated[style] = _proven(style, circuits[style], integers, model, folder, options)
    report = ExportReport(
        kind="rtl",
        run=model.run_uri,
        data_sha256=model.data_sha256,
        files=[],
        metric=model.metric,
        metrics=MetricPair(trained=found["trained"], exported=found["exported"]),
        agreement=found["agreement"],
        differences=found.get("differences"),
        max_error=found["max_error"],
        rows=found["rows"],
        tolerance=options.tolerance,
        notes=_notes(found, options),
        vectors=sum(one.vectors for tools in simulated.values() for one in tools[:1]),
        mismatches=sum(one.mismatches for tools in simulated.values() for one in tools),
        latency_cycles={style: tools[0].latency_cycles for style, tools in simulated.items()},
    )
    with _phase(phases, "synthesise, place and route"):
        report = _with_cells(report, circuits, integers, folder, options)
    simulators = {one.tool: one.version for tools in simulated.values() for one in tools}
    tools = simulators | report.tools
    report = report.model_copy(update={"tools": tools, "phases_s": phases})
    circuit_page.write(report, integers, circuits.values(), folder)
    names = sorted(path.name for path in folder.iterdir())
    return report.model_copy(update={"files": names})


@contextlib.contextmanager
def _phase(phases: dict[str, float], doing: str) -> Iterator[None]:
    """Report a part of the work when it begins, and its seconds when it is done."""
    progress.emit("export", kind="rtl", doing=doing)
    began = time.perf_counter()
    yield
    phases[doing] = round(time.perf_counter() - began, 1)
    progress.emit("export", kind="rtl", doing=doing, took_s=phases[doing])


def _integers(model: Exportable, path: Path, options: ExportOptions) -> dict[str, Any]:
    """What the sandboxed process says; the integer model is written to `path`."""
    from trainwright.tasks.export.circuits.synthesize import FPGAS

    largest = FPGAS[-1]
    styles = ["pipelined", "sequential"] if options.style == "both" else [options.style]
    request = model_request(model) | {
        "tolerance": options.tolerance,
        "search_s": min(_SEARCH_S, options.limits.timeout_s / 4),
        "styles": styles,
        "capacity": {
            "cells": largest.cells,
            "weights": largest.memory_bits // 8,
            "cycles": _MOST_CYCLES,
        },
    }
    found = run_in_sandbox(PROCESS, request, model, options.limits, path)
    found["styles"] = [style for style in styles if style in found["styles"]]
    return found


def _loaded(path: Path, styles: list[CircuitStyle], rows: int) -> IntegerModel:
    """The model that the sandbox wrote. Raises BadInput unless it is sound, and small enough."""
    from trainwright.tasks.export.circuits.integer_model import load
    from trainwright.tasks.export.circuits.predict_cells import adder_bits, cells_of_adders
    from trainwright.tasks.export.circuits.synthesize import FPGAS

    try:
        model = load(path)
    except ValueError as error:
        raise _spoiled(error) from error
    products = sum(one.shape.count * one.shape.terms for one in model.layers)
    weights = sum(one.weights.size for one in model.layers)
    too_large = {
        "pipelined": lambda: (
            cells_of_adders(sum(adder_bits(model)), "ecp5") > _MOST_GROWTH * FPGAS[-1].cells
        ),
        "sequential": lambda: (
            products * rows > _MOST_CYCLES or weights > FPGAS[-1].memory_bits // 8
        ),
    }
    for style in styles:
        if too_large[style]():
            raise _spoiled(ValueError(f"model.npz has {weights:,} weights, {products:,} products"))
    return model


def _spoiled(error: ValueError) -> BadInput:
    return BadInput(
        f"model: {error}; allowed for --to rtl: layers whose weights and biases are of similar "
        "size, and code that changes nothing of trainwright"
    )


def _written(style: CircuitStyle, integers: IntegerModel, folder: Path) -> Circuit:
    from trainwright.tasks.export.circuits.pipelined import write_pipelined
    from trainwright.tasks.export.circuits.sequential import write_sequential

    return (write_pipelined if style == "pipelined" else write_sequential)(integers, folder)


def _proven(
    style: CircuitStyle,
    circuit: Circuit,
    integers: IntegerModel,
    model: Exportable,
    folder: Path,
    options: ExportOptions,
) -> list[Simulated]:
    """The simulation of all validation rows. Raises TrainwrightError if an output differs."""
    import numpy as np

    from trainwright.tasks.export.circuits.simulate import simulate, write_bench

    rows = {name: np.load(path) for name, path in model.rows.validation.items()}
    try:
        inputs = integers.prepare(rows)
    except ValueError as error:
        raise _spoiled(error) from error
    bench = write_bench(circuit, inputs, integers.run(inputs), folder)
    found = simulate([*circuit.files, bench], folder, options.limits.timeout_s)
    for one in found:
        if one.mismatches:
            raise TrainwrightError(
                f"export: the {style} circuit is wrong: {one.tool} found {one.mismatches} of "
                f"{one.outputs} outputs that are not the integer model's"
            )
    return found


def _notes(found: dict[str, Any], options: ExportOptions) -> list[str]:
    widths = found["widths"]
    notes = [
        f"bits: input {widths['inputs']}; weights by layer {_list(widths['weights'])}; outputs by "
        f"layer {_list(widths['outputs'])} (0: none, or as they come)"
    ]
    wanted = ["pipelined", "sequential"] if options.style == "both" else [options.style]
    notes += [
        f"no {style} circuit: it would be too large"
        for style in wanted
        if style not in found["styles"]
    ]
    return notes


def _list(bits: list[int]) -> str:
    return ", ".join(map(str, bits))


def _with_cells(
    report: ExportReport,
    circuits: dict[CircuitStyle, Circuit],
    integers: IntegerModel,
    folder: Path,
    options: ExportOptions,
) -> ExportReport:
    """The report with cells, clocks and energy. What was too large or late has a note."""
    from trainwright.tasks.export.circuits import synthesize
    from trainwright.tasks.export.circuits.circuit_energy import SOURCE, energy_j

    cells: list[CircuitCells] = []
    clocks: dict[str, float] = {}
    timeout_s = options.limits.timeout_s
    for style, circuit in circuits.items():
        (folder / f"{style}_harness.v").write_text(_harness(circuit))
    wanted = [(style, family) for style in circuits for family in synthesize.FAMILIES]
    predicted = {one: _predicted(circuits[one[0]], integers, one[1]) for one in wanted}

    def made_of(one: tuple[CircuitStyle, str]) -> Synthesised:
        style, family = one
        work = Path(name, f"{style}-{family}")
        shutil.copytree(folder, work)
        names = [*(path.name for path in circuits[style].files), f"{style}_harness.v"]
        top = circuits[style].top
        return synthesize.synthesise(family, predicted[one], names, top, work, timeout_s)

    with (
        tempfile.TemporaryDirectory(prefix="trainwright-circuit-") as name,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        for one, made in zip(wanted, pool.map(made_of, wanted), strict=True):
            style, family = one
            progress.emit("export", kind="rtl", doing=_said(style, made))
            cells.append(
                CircuitCells(
                    family=family,
                    style=style,
                    device=made.fpga.name,
                    predicted=round(predicted[one]),
                    lookup_tables=made.luts,
                    cells=dict(made.kinds),
                    fmax_mhz=made.fmax_mhz,
                    latency_cycles=report.latency_cycles[style],
                    energy_j=energy_j(circuits[style], made.luts),
                    note=made.note,
                )
            )
            if made.fmax_mhz is not None and style == next(iter(circuits)):
                clocks[family] = made.fmax_mhz
        versions = synthesize.tool_versions(Path(name), timeout_s)
    return _replaced(
        report,
        cells=cells,
        fmax_mhz=clocks,
        energy_j=min(one.energy_j for one in cells if one.energy_j is not None),
        energy_source=SOURCE,
        tools=versions,
    )


def _said(style: CircuitStyle, made: Synthesised) -> str:
    clock = made.note if made.fmax_mhz is None else f"{made.fmax_mhz:g} MHz"
    return f"{style} on {made.fpga.name}: {made.luts:,} lookup tables, {clock}"


def _replaced(report: ExportReport, **fields: Any) -> ExportReport:
    """A report with other values of some fields, checked."""
    return ExportReport.model_validate({**report.model_dump(), **fields})


def _harness(circuit: Circuit) -> str:
    from trainwright.tasks.export.circuits import synthesize
    from trainwright.tasks.export.circuits.pipelined import PipelinedCircuit

    if isinstance(circuit, PipelinedCircuit):
        inputs, outputs = circuit.inputs, circuit.outputs
        return synthesize.pipelined_harness(inputs[0] * inputs[1], outputs[0] * outputs[1])
    return synthesize.sequential_harness(circuit.input_bits, circuit.sum_bits)


def _predicted(circuit: Circuit, integers: IntegerModel, family: str) -> float:
    from trainwright.tasks.export.circuits import predict_cells
    from trainwright.tasks.export.circuits.pipelined import PipelinedCircuit

    if isinstance(circuit, PipelinedCircuit):
        return predict_cells.pipelined_cells(circuit, family)
    return predict_cells.sequential_cells(circuit, len(integers.layers), family)
