"""Waiting for devices in a whole Airflow: deferred, without a slot; on when they are free; revoked without a lost step."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainwright.infra import local
from trainwright.infra.airflow import airflow_address, password_file
from trainwright.tasks import step
from trainwright.tasks.allocate.ledger import Heartbeat, Holder
from trainwright.tasks.allocate.queue import Queue
from trainwright.tasks.artefacts import Result
from trainwright.tasks.pool import load_pool
from trainwright.tasks.run import Run, list_runs
from trainwright.tasks.settings import settings
from trainwright.tasks.train import checkpoint
from trainwright.tasks.train.metrics import read_rows

DAGS = Path(__file__).parents[2] / "dags"
POOL = DAGS / "pools" / "two-cpus.yaml"
pytestmark = pytest.mark.slow


class Airflow:
    """The REST API of a running Airflow, as its admin; the runs of the retrain DAG."""

    def __init__(self, home: Path) -> None:
        self._base, self._token = airflow_address(home), ""
        password = json.loads(password_file(home).read_text())["admin"]
        self._token = self("POST", "/auth/token", {"username": "admin", "password": password})["access_token"]

    def __call__(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self._base + path, data=data, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def start(self, job: Path) -> str:
        """Trigger the DAG for a job; where that DAG run is."""
        run = self("POST", "/api/v2/dags/retrain/dagRuns", {"conf": {"job": str(job)}, "logical_date": None})
        return f"/api/v2/dags/retrain/dagRuns/{run['dag_run_id']}"

    def state(self, where: str, task: str) -> str | None:
        """The state of a task of a DAG run."""
        found: str | None = self("GET", f"{where}/taskInstances/{task}")["state"]
        return found


def until(what: str, test: Callable[[], Any], seconds: float = 500) -> Any:
    """Wait for something; what it was."""
    deadline = time.monotonic() + seconds
    while not (found := test()):
        assert time.monotonic() < deadline, f"not in {seconds:g} s: {what}"
        time.sleep(0.5)
    return found


@pytest.fixture
def airflow(stack: Path) -> Iterator[Airflow]:
    """A running Airflow that knows the retrain DAG."""
    local.up(stack, DAGS)
    try:
        api = Airflow(stack)
        until("the DAG is read", lambda: any(one["dag_id"] == "retrain" for one in api("GET", "/api/v2/dags")["dags"]))
        api("PATCH", "/api/v2/dags/retrain", {"is_paused": False})
        yield api
    finally:
        local.down(stack)


def write_job(folder: Path, name: str, epochs: int, **fields: Any) -> Path:
    job = {
        "name": name, "pool": str(POOL), "data": {"uri": "builtin:digits"},
        "model": {"source": str(DAGS / "jobs" / "cnn.py"), "config": {"width": 16}},
        "train": {
            "epochs": epochs, "global_batch_size": 96, "learning_rate": 0.003, "checkpoint": {"every_steps": 10},
        },
        "objective": {"minimize": "time"}, "devices": {"min_count": 2}, **fields,
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def run_of(name: str) -> Run | None:
    return next(iter(list_runs(settings().store, name)), None)


def test_a_run_waits_deferred_and_goes_on_and_a_revoked_training_loses_no_step(
    airflow: Airflow, tmp_path: Path
) -> None:
    devices = [device.resource for device in load_pool(str(POOL)).devices()]
    queue, me = Queue(step.ledger()), Holder("test", os.getpid())
    token = queue.take("test", me, devices, priority=9)
    assert token is not None

    with Heartbeat(step.ledger(), "test", devices, holder=me.name, token=token):
        low = airflow.start(write_job(tmp_path, "low", 60))
        until("low waits for the devices", lambda: airflow.state(low, "allocate") == "deferred")
        time.sleep(8)  # longer than between two looks
        assert airflow.state(low, "allocate") == "deferred"
        slots = airflow("GET", "/api/v2/pools/default_pool")
        assert (slots["occupied_slots"], slots["running_slots"], slots["queued_slots"]) == (0, 0, 0)
        assert slots["deferred_slots"] == 1
    assert [(one.run, place) for place, (one, _) in enumerate(queue.waiting())] == [(run_of("low").uri, 0)]  # type: ignore[union-attr]
    step.ledger().release("test", devices, token=token)
    low_run = until("low trains", lambda: (found := run_of("low")) and checkpoint.list_states(found.objects) and found)

    # Somebody of a higher priority asks for the devices at once: a second DAG run would get there when low has finished.
    def asked() -> str | None:
        queue.look("rival", me, devices, len(devices), priority=5)
        return airflow.state(low, "train")

    until("low gave way", lambda: asked() == "deferred")
    rival = queue.take("rival", me, devices, priority=5)
    assert rival is not None
    with Heartbeat(step.ledger(), "rival", devices, holder=me.name, token=rival):
        kept = checkpoint.list_states(low_run.objects)[-1].step
        assert 0 < kept < 60 * 15
        assert low_run.status().state == "interrupted"
        time.sleep(8)
        assert airflow.state(low, "train") == "deferred"
    step.ledger().release("rival", devices, token=rival)
    until("low is done", lambda: airflow("GET", low)["state"] in ("success", "failed"))
    assert airflow("GET", low)["state"] == "success"
    assert low_run.read(Result).resumed_from_step == kept
    steps = [row["step"] for row in read_rows(low_run.objects, "steps-rank0")]
    assert steps == list(range(60 * 15))
    assert step.ledger().held() == []
    assert queue.waiting() == []
