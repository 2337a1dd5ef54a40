"""The whole chain by the command line, with Airflow, Horovod, S3, Great Expectations and Dask."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import doors
import psutil
import pyarrow.parquet as pq
import pytest
import yaml

from trainwright.tasks.leases.ledger import Ledger
from trainwright.tasks.runs.artefacts.learning_rate_search import LearningRateSearch
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.run import Run, list_runs
from trainwright.tasks.store import verify
from trainwright.tasks.summary import summary

JOBS = Path(__file__).parents[2] / "dags" / "jobs"
TRAINWRIGHT = [sys.executable, "-m", "trainwright.tasks.cli.main"]


@dataclass
class Ended:
    """The result of a command."""

    code: int
    out: str
    err: str

    def document(self) -> dict[str, Any]:
        parsed = json.loads(self.out)
        assert isinstance(parsed, dict)
        return parsed


def trainwright(*args: str, **environment: str) -> Ended:
    done = subprocess.run(
        [*TRAINWRIGHT, *args],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=500,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Path]:
    """Write a job with some fields changed: digits, a small CNN, two different CPU devices."""

    def write(name: str, **changes: Any) -> Path:
        values: dict[str, Any] = {
            "name": name,
            "pool": str(JOBS.parent / "pools" / "two-cpus.yaml"),
            "data": {"uri": "builtin:digits"},
            "model": {"source": str(JOBS / "cnn.py"), "config": {"width": 16}},
            "train": {
                "epochs": 3,
                "global_batch_size": 96,
                "learning_rate": 0.003,
                "checkpoint": {"every_steps": 10},
            },
            "objective": {"minimize": "time"},
            "devices": {"min_count": 2},
        }
        for field, change in changes.items():
            values[field] = (
                values[field] | change if isinstance(change, dict) and field in values else change
            )
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return write


def leases() -> list[str]:
    return [lease.resource for lease in Ledger(doors.settings().ledger_url).held()]


def ours_left() -> list[str]:
    """Training and Airflow processes of this test session (the S3 server stays)."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        words = " ".join(process.info["cmdline"] or [])
        if (process.info["environ"] or {}).get("TRAINWRIGHT_HOME") == str(
            doors.settings().home
        ) and ("trainwright.tasks.train" in words or "trainwright.dags" in words):
            found.append(words)
    return found


def losses(run: Run) -> list[tuple[int, float]]:
    """Step and global loss, as recorded by rank 0."""
    rows = []
    for item in run.objects.list("metrics/steps-rank0-"):
        local = run.work_folder() / "read.parquet"
        run.objects.get_file(item.key, local)
        table = pq.read_table(local).to_pydict()
        rows += list(zip(table["step"], table["loss"], strict=True))
    return sorted(rows)


def test_a_job_becomes_a_sealed_analysed_model_and_a_replay_has_the_same_losses(
    stack: Path, job: Callable[..., Path]
) -> None:
    path = job(
        "whole",
        train={
            "learning_rate": "auto",
            "epochs": 4,
            "target": {"metric": "accuracy", "value": 0.5},
        },
    )
    ended = trainwright("run", str(path), "--json")
    assert ended.code == 0, ended.err
    document = ended.document()
    assert document["state"] == "success"
    assert document["metrics"]["accuracy"] > 0.5
    assert set(document["steps"]) == {
        "validate",
        "recommend",
        "extract",
        "estimate",
        "allocate",
        "search_lr",
        "train",
        "store",
        "analyze",
        "export",
    }
    batches = [device["batch_size"] for device in document["devices"]]
    assert sum(batches) == 96
    assert batches[0] > batches[1]
    assert {"median", "low", "high"} <= set(document["predicted"]["duration_s"])
    assert document["measured"]["duration_s"] > 0
    assert leases() == []
    assert ours_left() == []

    run = doors.run_at(document["run"])
    keys = set(verify(run).files)
    for expected in (
        "job.json",
        "validation.json",
        "recommendation.json",
        "structure.json",
        "estimate.json",
        "plan.json",
        "lr_search.json",
    ):
        assert expected in keys
    for folder in ("source/", "metrics/", "events/", "checkpoints/step-", "logs/", "model/"):
        assert any(key.startswith(folder) for key in keys), folder
    assert b"<html" in run.objects.get("report/report.html")[:2000].lower()

    again = trainwright("run", str(path), "--new", "--replay", run.uri, "--json")
    assert again.code == 0, again.err
    replay = doors.run_at(again.document()["run"])
    assert replay.uri != run.uri
    assert losses(replay) == losses(run)
    assert replay.read(LearningRateSearch).source == "replayed"
    assert replay.read(Plan).devices == run.read(Plan).devices
    assert again.document()["learned_from"] >= 1
    for finished in (run, replay):
        assert finished.root().get(f"calibrations/cpu/runs/{finished.id}.json")
    listed = trainwright("runs", "whole", "--json").document()["runs"]
    assert [one["id"] for one in listed] == [replay.id, run.id]
    assert trainwright("show", run.id, "--json").document()["metrics"] == document["metrics"]


@pytest.mark.slow
def test_an_interrupted_run_resumes_from_its_checkpoint_and_a_second_runner_is_refused(
    stack: Path, job: Callable[..., Path]
) -> None:
    path = job("stopped", train={"epochs": 60, "checkpoint": {"every_steps": 30}})
    first = subprocess.Popen(
        [*TRAINWRIGHT, "run", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        run = wait_for_checkpoint("stopped", first)
        second = trainwright("run", str(path), "--json")
        assert second.code == 1
        assert f"pid {first.pid}" in second.document()["error"]["message"]
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=60)
    finally:
        first.kill()
        first.wait()
    assert first.returncode == 130
    assert ours_left() == []
    assert leases() == []
    assert run.status().state == "interrupted"
    kept = {item.key for item in run.objects.list("checkpoints/")}
    assert kept

    short = trainwright("run", str(path), "--json")
    assert short.code == 0, short.err
    assert short.document()["run"] == run.uri
    steps = [step for step, _ in losses(run)]
    assert steps == sorted(set(steps))
    assert len(steps) == 60 * 15


def wait_for_checkpoint(name: str, process: subprocess.Popen[str]) -> Run:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        for run in list_runs(doors.settings().store, doors.settings(), name):
            if any(item.key.endswith("state.json") for item in run.objects.list("checkpoints/")):
                return run
        time.sleep(0.3)
    raise AssertionError("no checkpoint was written")


def test_rejected_data_stops_the_run_before_the_allocation(
    stack: Path, job: Callable[..., Path], tmp_path: Path
) -> None:
    rows = "\n".join(f"{n},{n % 7},{'' if n == 13 else n % 3},{'ab'[n % 2]}" for n in range(60))
    (tmp_path / "bad.csv").write_text("a,b,c,label\n" + rows + "\n")
    (tmp_path / "mlp.py").write_text(
        "import torch\n\n\ndef build_model():\n    return torch.nn.Linear(3, 2)\n"
    )
    path = job(
        "rejected",
        data={"uri": str(tmp_path / "bad.csv")},
        model={"source": str(tmp_path / "mlp.py"), "config": {}},
    )
    ended = trainwright("run", str(path), "--json")
    assert ended.code == 1
    assert ended.document()["error"]["kind"] == "data_rejected"
    assert "expect_column_values_to_not_be_null(c): 1 row" in ended.document()["error"]["message"]
    (run,) = list_runs(doors.settings().store, doors.settings(), "rejected")
    keys = {item.key for item in run.objects.list()}
    assert "validation.json" in keys
    assert "plan.json" not in keys
    assert summary(run)["state"] == "failed"
    assert leases() == []


@pytest.mark.slow
def test_an_impossible_deadline_exits_with_3_and_leaves_no_lease(
    stack: Path, job: Callable[..., Path]
) -> None:
    ended = trainwright("run", str(job("hurried", objective={"deadline": "1s"})), "--json")
    assert ended.code == 3
    document = ended.document()
    assert document["feasible"] is False
    assert document["error"]["binding"] == "deadline"
    assert document["error"]["nearest_deadline_s"] > 1
    assert leases() == []
    assert ours_left() == []
