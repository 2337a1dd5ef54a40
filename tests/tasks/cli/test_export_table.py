"""The lines that `trainwright export` prints of a report."""

from __future__ import annotations

import pytest

from trainwright.tasks.cli.screens.export_table import export_facts, progress_line
from trainwright.tasks.export.export_page import page
from trainwright.tasks.runs.artefacts.export_report import (
    CircuitCells,
    ExportReport,
    MetricPair,
    SizePair,
)


def test_a_circuit_has_lines_for_its_simulation_its_cells_and_its_clock() -> None:
    cells = CircuitCells(family="ice40", style="pipelined", device="iCE40 UP5K", cells={})
    report = ExportReport(
        kind="rtl",
        run="file:///store/runs/net/1",
        data_sha256="0" * 64,
        files=[],
        metric="f1",
        metrics=MetricPair(trained=0.97, exported=0.96),
        agreement=0.99,
        max_error=0.1,
        rows=360,
        notes=["bits: input 4", "no sequential circuit"],
        vectors=720,
        mismatches=0,
        cells=[
            cells.model_copy(
                update={
                    "lookup_tables": 4400,
                    "predicted": 4300,
                    "fmax_mhz": 26.5,
                    "latency_cycles": 7,
                    "energy_j": 2.3e-10,
                }
            ),
            cells.model_copy(
                update={
                    "style": "sequential",
                    "lookup_tables": 9000,
                    "predicted": 8000,
                    "note": "too large for it",
                    "latency_cycles": 900,
                    "energy_j": 4.1e-9,
                }
            ),
        ],
        latency_cycles={"pipelined": 7, "sequential": 900},
        energy_j=2.3e-10,
    )
    lines = [f"{name}: {value}" for name, value in export_facts(report.model_dump(), "out")]
    assert "simulated: 720 vectors, 0 mismatches" in lines
    line = "pipelined: iCE40 UP5K: 4,400 lookup tables (predicted 4,300), 26.5 MHz, 7 cycles"
    assert f"{line}, 2.3e-10 J an inference" in lines
    line = "sequential: iCE40 UP5K: 9,000 lookup tables (predicted 8,000), too large for it, 900"
    assert f"{line} cycles, 4.1e-09 J an inference" in lines
    by = "by the pipelined circuit on iCE40 UP5K"
    assert f"least energy: 2.3e-10 J an inference, estimated, {by}" in lines
    shown = page(report, "")
    assert f"one inference {by}, estimated" in shown
    assert "4.1e-09 J" in shown
    assert lines[-3:-1] == ["note: bits: input 4", "note: no sequential circuit"]


@pytest.mark.parametrize(
    ("exported", "shown"), [(1024, "1 KiB, float 4 KiB (4.00 × smaller)"), (4096, "4 KiB")]
)
def test_an_int8_model_has_its_size_and_that_of_the_float_model(exported: int, shown: str) -> None:
    report = ExportReport(
        kind="onnx-int8",
        run="file:///store/runs/net/1",
        data_sha256="0" * 64,
        files=[],
        metric="f1",
        metrics=MetricPair(trained=0.97, exported=0.96),
        agreement=0.99,
        max_error=0.1,
        rows=360,
        size_bytes=SizePair(float=4096, exported=exported),
    )
    assert ("size", shown) in export_facts(report.model_dump(), None)


def test_a_tool_has_a_line_when_it_begins_and_when_it_ends() -> None:
    tool = {"event": "export", "kind": "rtl", "doing": "yosys, ECP5-25", "tool": "yosys"}
    begins, ends = progress_line(tool), progress_line({**tool, "took_s": 12.34})
    assert begins is not None
    assert ends is not None
    assert begins.split() == ["yosys,", "ECP5-25", "begins"]
    assert ends.split() == ["yosys,", "ECP5-25", "12.3", "s"]
    assert progress_line({"event": "export", "kind": "onnx", "doing": "converts"}) is None
