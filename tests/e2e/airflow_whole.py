"""The embedded Airflow for tests, with the retrain DAG, and jobs to run in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import doors
import yaml
from airflow_client import AirflowClient, until

from trainwright.infra import local
from trainwright.infra.airflow import stop_airflow
from trainwright.tasks.runs.run import Run, list_runs

DAGS = Path(__file__).parents[2] / "dags"
STEPS_AN_EPOCH = 15
"""steps per epoch of `write_job`'s jobs; each takes 0.25 s, however busy the machine is"""


def only_retrain(home: Path) -> Path:
    """A folder with only `retrain.py`: the other DAGs have a schedule, and would calibrate."""
    folder = home / "only-retrain"
    folder.mkdir(exist_ok=True)
    if not (folder / "retrain.py").exists():
        (folder / "retrain.py").symlink_to(DAGS / "retrain.py")
    return folder


@contextmanager
def whole_airflow(home: Path) -> Iterator[AirflowClient]:
    """A running Airflow that knows the retrain DAG."""
    local.up(home, only_retrain(home))
    try:
        api = AirflowClient(home)
        until("the DAG is read", api.has_dag)
        api("PATCH", "/api/v2/dags/retrain", {"is_paused": False})
        yield api
    finally:
        stop_airflow(home)  # not the S3 server, which the whole session shares


def write_pool(folder: Path) -> Path:
    """Write the pool file beside job files: two emulated devices, which need no measurement."""
    devices = [{"type": "emulated", "speed": speed} for speed in (0.25, 0.125)]
    path = folder / "pools" / "pair.yaml"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            yaml.safe_dump(
                {
                    "name": "pair",
                    "hosts": [{"name": "here", "address": "localhost", "devices": devices}],
                }
            )
        )
    return path


def write_job(folder: Path, name: str, epochs: int, **fields: Any) -> Path:
    """A small job on both devices of the pool, a checkpoint every ten steps."""
    job = {
        "name": name,
        "pool": str(write_pool(folder)),
        "data": {"uri": "builtin:digits"},
        "model": {"source": str(DAGS / "jobs" / "cnn.py"), "config": {"width": 16}},
        "train": {
            "epochs": epochs,
            "global_batch_size": 96,
            "learning_rate": 0.003,
            "checkpoint": {"every_steps": 10},
        },
        "objective": {"minimize": "time"},
        "devices": {"min_count": 2},
        **fields,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def run_of(name: str) -> Run | None:
    """The newest run of a job."""
    return next(iter(list_runs(doors.settings().store, doors.settings(), name)), None)
