"""A whole Airflow for tests: its REST API, the retrain DAG, jobs to run in it."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from trainwright.infra import local
from trainwright.infra.airflow import airflow_address, password_file
from trainwright.tasks.run import Run, list_runs
from trainwright.tasks.settings import settings

DAGS = Path(__file__).parents[2] / "dags"
POOL = DAGS / "pools" / "two-cpus.yaml"


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


def only_retrain(home: Path) -> Path:
    """A folder of DAG files without those that run by themselves, and would measure the machine meanwhile."""
    folder = home / "only-retrain"
    folder.mkdir(exist_ok=True)
    if not (folder / "retrain.py").exists():
        (folder / "retrain.py").symlink_to(DAGS / "retrain.py")
    return folder


@contextmanager
def whole_airflow(home: Path) -> Iterator[Airflow]:
    """A running Airflow that knows the retrain DAG."""
    local.up(home, only_retrain(home))
    try:
        api = Airflow(home)
        until("the DAG is read", lambda: any(one["dag_id"] == "retrain" for one in api("GET", "/api/v2/dags")["dags"]))
        api("PATCH", "/api/v2/dags/retrain", {"is_paused": False})
        yield api
    finally:
        local.down(home)


def write_job(folder: Path, name: str, epochs: int, **fields: Any) -> Path:
    """A small job on both devices of the pool, a checkpoint every ten steps."""
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
    """The newest run of a job."""
    return next(iter(list_runs(settings().store, name)), None)
