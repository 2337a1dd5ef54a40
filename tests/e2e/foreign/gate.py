"""A user's DAG: a task that runs only if the data meets its expectations."""

import os
from datetime import UTC, datetime

from airflow.sdk import DAG, task

from trainwright.operators import ValidateOperator

for name in ("good", "bad"):
    with DAG(f"gate_{name}", schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC)) as dag:

        @task
        def publish() -> str:
            """The task behind the gate."""
            return "published"

        data = {
            "uri": os.environ["FOREIGN_DATA"],
            "target": "label",
            "expectations": os.environ[f"FOREIGN_{name.upper()}"],
        }
        ValidateOperator(task_id="check", data=data) >> publish()
    globals()[dag.dag_id] = dag
