"""`trainwright run` for a job without a model: from a table to the report, through Airflow."""

from __future__ import annotations

import json
from pathlib import Path

import doors
import pytest
from command_line import process
from small_jobs import table_job

from trainwright.tasks.runs.artefacts.recommendation import Recommendation
from trainwright.tasks.store import verify


@pytest.mark.slow
def test_a_table_alone_becomes_a_stored_model_with_its_recommendation(
    stack: Path, tmp_path: Path
) -> None:
    job = table_job(tmp_path)
    path = tmp_path / "job.json"
    values = {"name": "table-alone", "pool": job.pool, "data": {"uri": job.data.uri}}
    path.write_text(json.dumps(values | {"train": {"epochs": 10}, "export": ["onnx"]}))
    ended = process("run", str(path), "--json", TRAINWRIGHT_STORE=(tmp_path / "store").as_uri())
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert document["state"] == "success"
    assert document["metrics"]["accuracy"] > 0.6
    assert list(document["steps"])[:3] == ["validate", "recommend", "extract"]
    run = doors.run_at(document["run"])
    assert {"recommendation.json", "source/model.py"} <= set(verify(run).files)
    found = run.read(Recommendation)
    assert document["recommended"]["name"] == found.chosen
    # The job states its epochs itself.
    used = {field: value for field, value in found.recipe.items() if field != "train.epochs"}
    assert document["recommended"]["recipe"] == used
    page = run.objects.get("report/report.html").decode()
    assert "Recommended model" in page
    [exported] = document["exports"]
    assert exported["max_error"] <= 1e-5
    assert exported["metrics"]["exported"] == document["metrics"][exported["metric"]]
    assert {one["name"] for one in exported["inputs"]} == {
        column.name for column in run.data().columns
    }
