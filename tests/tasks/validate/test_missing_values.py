"""Missing values that a job keeps: permitted by the suite, within limits; codes kept by the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import doors
import pytest

from trainwright.tasks import progress
from trainwright.tasks.data.prepared import prepared
from trainwright.tasks.errors import DataRejected
from trainwright.tasks.runs.artefacts.data_schema import Vocabulary
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.runs.run import Run
from trainwright.tasks.spec.job import load_job

MODEL = "def build_model():\n    raise NotImplementedError\n"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_STORE", (tmp_path / "store").as_uri())


def table(folder: Path, missing: int, rows: int = 60) -> None:
    """A table whose column `age` lacks every so-many-th value, and one column without any."""
    lines = (f"{'' if n % missing == 0 else n},{'ab'[n % 2]},,{n % 4 // 2}\n" for n in range(rows))
    (folder / "data.csv").write_text("age,kind,none,label\n" + "".join(lines))


def validated_run(folder: Path, model: bool = False) -> Run:
    """A new run of the job `x`, with a model if asked for, that did the step `validate`."""
    job: dict[str, Any] = {"name": "x", "data": {"uri": str(folder / "data.csv")}}
    if model:
        (folder / "model.py").write_text(MODEL)
        job["model"] = {"source": str(folder / "model.py")}
    return doors.validated(load_job(job))


def test_missing_values_are_kept_without_a_model_and_their_share_is_expected(
    tmp_path: Path, home: Path
) -> None:
    heard: list[dict[str, Any]] = []
    table(tmp_path, missing=5)
    with progress.listening(heard.append):
        done = validated_run(tmp_path)
    schema = done.read(Validation).data
    assert schema is not None
    assert {one.name: one.missing for one in schema.columns} == {"age": 12, "kind": 0}
    assert schema.dropped == ["none"]
    said = [event["message"] for event in heard if event["event"] == "notice"]
    assert "data: column 'none' has no values; it is left out" in said
    names = done.read(Vocabulary).names
    assert names == {"kind": ["a", "b"], "label": ["0", "1"]}
    job = done.job()
    assert prepared(job.data, home, job.train.seed).names() == names

    table(tmp_path, missing=2)  # half of the values instead of a fifth: the kept suite rejects it
    with pytest.raises(DataRejected, match=r"not_be_null\(age\): 30 rows"):
        validated_run(tmp_path)


def test_missing_values_are_refused_for_a_model_but_an_empty_column_is_left_out(
    tmp_path: Path,
) -> None:
    table(tmp_path, missing=5)
    with pytest.raises(
        DataRejected, match=r"'age': 12 of 60 values are missing.*not_be_null\(age\)"
    ):
        validated_run(tmp_path, model=True)
    table(tmp_path, missing=1000)
    (tmp_path / "data.csv").write_text((tmp_path / "data.csv").read_text().replace("\n,a", "\n7,a"))
    schema = validated_run(tmp_path, model=True).read(Validation).data
    assert schema is not None
    assert schema.dropped == ["none"]
