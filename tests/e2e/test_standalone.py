"""The DAG in a complete Airflow (API server, scheduler, DAG processor, triggerer), via REST."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import doors
import pytest
import yaml

from trainwright.infra import local
from trainwright.infra.airflow import airflow_address, password_file, stop_airflow
from trainwright.tasks.leases.ledger import Ledger
from trainwright.tasks.runs.run import list_runs
from trainwright.tasks.store import verify

DAGS = Path(__file__).parents[2] / "dags"
TASKS = {
    "validate",
    "recommend",
    "extract",
    "estimate",
    "allocate",
    "search_lr",
    "train",
    "release",
    "store",
    "analyze",
    "export",
    "approve",
    "promote",
}


@pytest.fixture
def api(stack: Path) -> Iterator[Any]:
    """Calls the REST API of a running Airflow, logged in as its admin."""
    local.up(stack, DAGS)
    base = airflow_address(stack)

    def call(
        method: str, path: str, body: dict[str, Any] | None = None, token: str | None = None
    ) -> Any:
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {token}"} if token else {}
        )
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(base + path, data=data, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    password = json.loads(password_file(stack).read_text())["admin"]
    token = call("POST", "/auth/token", {"username": "admin", "password": password})["access_token"]
    yield lambda method, path, body=None: call(method, path, body, token)
    stop_airflow(stack)  # not the S3 server, which the whole session shares


@pytest.mark.slow
def test_the_dag_triggered_through_rest_succeeds(api: Any, tmp_path: Path) -> None:
    job = {
        "name": "by-rest",
        "pool": str(DAGS / "pools" / "two-cpus.yaml"),
        "data": {"uri": "builtin:digits"},
        "model": {"source": str(DAGS / "jobs" / "cnn.py"), "config": {"width": 16}},
        "train": {"epochs": 2, "global_batch_size": 96},
        "objective": {"minimize": "time"},
        "devices": {"min_count": 2},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    deadline = time.monotonic() + 400
    while not any(dag["dag_id"] == "retrain" for dag in api("GET", "/api/v2/dags")["dags"]):
        assert time.monotonic() < deadline, "the DAG file was not read"
        time.sleep(1)
    api("PATCH", "/api/v2/dags/retrain", {"is_paused": False})
    run = api(
        "POST", "/api/v2/dags/retrain/dagRuns", {"conf": {"job": str(path)}, "logical_date": None}
    )
    where = f"/api/v2/dags/retrain/dagRuns/{run['dag_run_id']}"
    while (state := api("GET", where)["state"]) not in ("success", "failed"):
        assert time.monotonic() < deadline, f"still {state}"
        time.sleep(2)
    instances = api("GET", f"{where}/taskInstances")["task_instances"]
    assert {one["task_id"]: one["state"] for one in instances} == dict.fromkeys(TASKS, "success")
    assert all(one["operator_name"].endswith("Operator") for one in instances)
    assert {one["operator_name"] for one in instances} >= {
        "ValidateOperator",
        "TrainOperator",
        "ReleaseOperator",
    }
    (finished,) = list_runs(doors.settings().store, doors.settings(), "by-rest")
    assert verify(finished).files
    assert finished.status().state == "success"
    assert Ledger(doors.settings().ledger_url).held() == []
