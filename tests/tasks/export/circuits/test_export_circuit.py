"""`export RUN --to rtl` on finished runs of digits: the sealed folder, its report and page."""

from __future__ import annotations

from pathlib import Path

import pytest
from stored_run import stored_run

from trainwright.tasks.errors import BadInput
from trainwright.tasks.export.export_run import export_run
from trainwright.tasks.runs.exports import sealed_exports

DENSE = """
def build_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.ReLU(), nn.Linear(3, 10))
"""
SWISH = """
def build_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.SiLU(), nn.Linear(8, 10))
"""
_DIGITS = {"uri": "builtin:digits", "target": "label"}
pytestmark = pytest.mark.slow  # needs Icarus Verilog, which `make setup-system` installs


@pytest.mark.timeout(1800)
def test_a_finished_runs_model_becomes_a_sealed_folder_of_circuits(tmp_path: Path) -> None:
    run = stored_run(tmp_path, DENSE, _DIGITS)
    report = export_run(run, "rtl", out=tmp_path / "out", tolerance=0.1)
    assert report.mismatches == 0
    assert report.metrics.exported >= report.metrics.trained - 0.1
    [sealed] = sealed_exports(run)
    assert sealed.cells == report.cells
    assert {"README.md", "report.html", "model.npz", "sequential.v"} <= set(report.files)
    page = (tmp_path / "out/report.html").read_text()
    assert "<svg" in page
    assert "lookup tables" in page
    assert "the validation rows of these figures are also those by which" in page


def test_a_module_that_no_circuit_can_have_is_named(tmp_path: Path) -> None:
    run = stored_run(tmp_path, SWISH, _DIGITS)
    with pytest.raises(BadInput, match=r"module '2' has .*silu.*allowed for --to rtl"):
        export_run(run, "rtl")
