"""The step `export`: what it makes of a job's `export`, and what it leaves as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import doors
import pytest
from finished_run import sealed_run, write_export

from trainwright.tasks.errors import BadInput
from trainwright.tasks.export import step
from trainwright.tasks.runs.artefacts.export_report import Exports
from trainwright.tasks.runs.run import Run


def with_export(folder: Path, export: Any) -> Run:
    return sealed_run(f"file://{folder}/store", 1, 0.9, export=export)


def test_a_job_without_export_has_nothing_to_export(tmp_path: Path) -> None:
    run = with_export(tmp_path, [])
    reference = doors.do(run, "export")
    assert reference["kinds"] == []
    assert step.summary(reference) == "nothing to export"
    assert run.read(Exports).kinds == []


def test_an_export_that_is_sealed_is_not_made_again(tmp_path: Path) -> None:
    run = with_export(tmp_path, {"to": ["onnx", "onnx"]})
    write_export(run)
    reference = doors.do(run, "export")
    assert run.objects.get("export/onnx/model.onnx") == b"a model"
    assert step.summary(reference) == "exported as onnx"


def test_an_export_that_fails_leaves_the_step_undone(tmp_path: Path) -> None:
    run = with_export(tmp_path, ["onnx"])  # the stored rows are not those of its data
    with pytest.raises(BadInput, match=r"data\.uri: builtin:digits has changed since the run"):
        doors.do(run, "export")
    assert run.find(Exports) is None
    assert run.finished()
