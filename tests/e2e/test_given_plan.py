"""`train JOB --plan FILE`: a run keeps its plan unless the given one is trained."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from command_line import run
from outside import folder_of, plan, pool, read

DAGS = Path(__file__).parents[2] / "dags"
CPU = {"type": "cpu", "cores": 1}


def test_only_a_plan_that_is_trained_becomes_the_runs(stack: Path, tmp_path: Path) -> None:
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(pool(CPU)))
    job = {
        "name": "given",
        "pool": "pool.yaml",
        "data": {"uri": "builtin:digits"},
        "model": {"source": str(DAGS / "jobs" / "cnn.py"), "config": {"width": 4}},
        "train": {"epochs": 1, "global_batch_size": 96, "learning_rate": 0.01},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    train = (
        "train",
        str(tmp_path / "job.yaml"),
        "--json",
        "--store",
        (tmp_path / "store").as_uri(),
    )
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(plan([CPU], [96]))
    bad.write_text(good.read_text().replace("data-parallel", "nonsense"))

    refused = json.loads(run(*train, "--plan", str(bad)).stdout)
    assert "plan.strategy: got 'nonsense'" in refused["error"]["message"]
    assert refused["state"] == "failed"
    assert not (folder_of(refused["run"]) / "plan.json").exists()

    trained = json.loads(run(*train).stdout)
    assert (trained["run"], trained["state"]) == (refused["run"], "success")
    kept = read(folder_of(trained["run"]) / "plan.json")

    wanted = ("--set", "train.layout=late-multiply", "--set", "name=given-other")
    other = run(*train, *wanted, "--plan", str(good))
    assert other.returncode == 0
    assert "train.layout asks for another layout than data-parallel; the plan's is used" in (
        other.stderr
    )

    late = run(*train, "--plan", str(good))
    assert late.returncode == 2
    assert "is trained already, by another plan; allowed:" in late.stderr
    assert read(folder_of(trained["run"]) / "plan.json") == kept
    assert json.loads(run(*train).stdout)["state"] == "success"
