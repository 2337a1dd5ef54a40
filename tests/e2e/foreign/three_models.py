"""A user's TaskFlow DAG: one task makes data, three models train on it, the best is chosen."""

import json
import os
from datetime import UTC, datetime
from typing import Any

from airflow.sdk import dag, task
from made_data import make_data

from trainwright.operators import TrainOperator


@dag(schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC))
def three_models() -> None:
    """Data, three trainings, a comparison."""

    @task
    def jobs(data: str) -> list[dict[str, Any]]:
        """One job per model."""
        job = json.loads(os.environ["FOREIGN_JOB"])
        return [
            job
            | {
                "name": f"width-{width}",
                "data": {"uri": data},
                "model": job["model"] | {"config": {"width": width}},
            }
            for width in (2, 4, 8)
        ]

    @task
    def compare(trained: list[dict[str, Any]]) -> dict[str, Any]:
        """The run with the best accuracy."""
        best = max(trained, key=lambda one: one["metrics"]["accuracy"])
        return {"run": best["run"], "of": len(trained)}

    train = TrainOperator.partial(task_id="train", map_index_template="{{ task.job.name }}").expand(
        job=jobs(make_data())
    )
    compare(train.output)


three_models()
