"""A job that averages, by the command line, on two emulated devices of unlike speeds."""

from __future__ import annotations

import json
from pathlib import Path

import doors
import pytest
import yaml
from command_line import run

from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.run import list_runs

MODEL = Path(__file__).parents[2] / "dags" / "jobs" / "cnn.py"


def job(folder: Path, name: str, layout: str) -> str:
    """A job file beside its pool, of two devices with speeds 2:1."""
    devices = [{"type": "emulated", "speed": speed} for speed in (2.0, 1.0)]
    pool = {"name": "unlike", "hosts": [{"name": "here", "devices": devices}]}
    (folder / "pool.yaml").write_text(yaml.safe_dump(pool))
    what = {
        "name": name,
        "pool": "pool.yaml",
        "data": {"uri": "builtin:digits"},
        "model": {"source": str(MODEL), "config": {"width": 16}},
        "train": {"epochs": 4, "global_batch_size": 48, "layout": layout},
        "objective": {"minimize": "time"},
        "devices": {"min_count": 2},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(what))
    return str(path)


@pytest.mark.slow
def test_a_job_searches_a_rate_trains_and_averages(tmp_path: Path) -> None:
    name = "averaging"
    given = job(tmp_path, name, name)
    planned = run("plan", given, "--json")
    assert planned.returncode == 0, planned.stderr
    found = json.loads(planned.stdout)["layout"]
    assert found["name"] == name
    batches = [sum(one["micro_batches"]) for one in found["pipelines"]]
    assert batches == [32, 16]
    # The faster device does two steps of the same size for each of the slower one.
    assert [one["micro_batches"] for one in found["pipelines"]] == [[16, 16], [16]]
    trained = run("train", given, "--json")
    assert trained.returncode == 0, trained.stderr
    document = json.loads(trained.stdout)
    assert document["state"] == "success"
    settings = doors.settings()
    (run_of_it,) = list_runs(settings.store, settings, name)
    layout_used = run_of_it.read(Plan).layout
    assert layout_used is not None
    assert layout_used.average_every == found["average_every"]
    assert document["metrics"]["accuracy"] > 0.9
