"""Reports of exports in a run's folder: read back as they were written, unless damaged."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from finished_run import begin_run, write_export

from trainwright.tasks.errors import CorruptArtefact
from trainwright.tasks.runs.artefacts.export_report import MetricPair, RowDifferences
from trainwright.tasks.runs.exports import exported_file, sealed_exports
from trainwright.tasks.runs.run import Run
from trainwright.tasks.store import seal_folder

REPORT = "export/onnx/report.json"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return begin_run(f"file://{tmp_path}/store", "small", 1)


def test_figures_that_are_not_finite_are_read_back(run: Run) -> None:
    changes = {
        "metrics": MetricPair(trained=math.inf, exported=-math.inf),
        "differences": RowDifferences(median=0.5, largest=math.inf),
        "max_error": math.inf,
    }
    report = write_export(run).model_copy(update=changes)
    run.objects.put(REPORT, report.model_dump_json().encode())
    seal_folder(run, "export/onnx/")
    assert sealed_exports(run) == [report]
    nan = report.model_copy(update={"max_error": math.nan})
    run.objects.put(REPORT, nan.model_dump_json().encode())
    seal_folder(run, "export/onnx/")
    [found] = sealed_exports(run)
    assert math.isnan(found.max_error)


def test_an_export_without_its_seal_does_not_count(run: Run) -> None:
    write_export(run)
    run.objects.delete("export/onnx/manifest.json")
    assert sealed_exports(run) == []


def test_a_report_that_changed_after_it_was_sealed_is_damaged(run: Run) -> None:
    changed = write_export(run).model_copy(update={"agreement": 0.5})
    run.objects.put(REPORT, changed.model_dump_json().encode())
    with pytest.raises(CorruptArtefact, match=r"report\.json: changed since it was sealed"):
        sealed_exports(run)


@pytest.mark.parametrize("content", [b"{", b"{}", None], ids=["cut", "empty", "missing"])
def test_a_damaged_report_is_one_line_that_says_what_to_do(run: Run, content: bytes | None) -> None:
    write_export(run)
    if content is None:
        run.objects.delete(REPORT)
    else:
        run.objects.put(REPORT, content)
    with pytest.raises(CorruptArtefact, match=r"report\.json: .*`trainwright export` makes it"):
        sealed_exports(run)


def test_a_file_is_the_sealed_one_or_damaged(run: Run) -> None:
    write_export(run)
    assert exported_file(run, "onnx", "model.onnx") == b"a model"
    for kind, name in (("rtl", "model.onnx"), ("onnx", "other"), ("../export/onnx", "report.json")):
        with pytest.raises(FileNotFoundError, match="has no export"):
            exported_file(run, kind, name)
    run.objects.put("export/onnx/model.onnx", b"another model")
    with pytest.raises(CorruptArtefact, match=r"model\.onnx: changed .*; `trainwright export`"):
        exported_file(run, "onnx", "model.onnx")
    run.objects.delete("export/onnx/model.onnx")
    with pytest.raises(CorruptArtefact, match=r"model\.onnx: missing; `trainwright export`"):
        exported_file(run, "onnx", "model.onnx")
