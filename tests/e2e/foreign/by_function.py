"""A user's TaskFlow DAG: functions return the data to check, and jobs on another task's data."""

import json
import os
from datetime import UTC, datetime
from typing import Any

from airflow.sdk import dag, task
from made_data import make_data


@dag(schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC))
def by_function() -> None:
    """Data, a gate, two trainings, a comparison."""

    @task.trainwright_validate
    def check(table: str) -> dict[str, Any]:
        """The data, as in a job file."""
        return {"uri": table, "target": "label"}

    @task.trainwright_train(device_pool=os.environ["FOREIGN_POOL"])
    def train(table: str, width: int, run_id: str | None = None) -> dict[str, Any]:
        """The job of this DAG run."""
        job: dict[str, Any] = json.loads(os.environ["FOREIGN_JOB"])
        name = f"by-function-{width}{'' if run_id else '-without-context'}"
        return job | {
            "name": name,
            "data": {"uri": table},
            "model": job["model"] | {"config": {"width": width}},
        }

    @task
    def compare(trained: list[dict[str, Any]]) -> str:
        """The run with the best accuracy."""
        best: str = max(trained, key=lambda one: one["metrics"]["accuracy"])["run"]
        return best

    table = make_data()
    trained = train.partial(table=table).expand(width=[2, 4])
    check(table) >> trained
    compare(trained)


by_function()
