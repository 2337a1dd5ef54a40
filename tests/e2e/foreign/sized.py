"""A user's DAG: a stock operator gets a model's estimate and devices, which are released after."""

import json
import os
from datetime import UTC, datetime

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

from trainwright.operators import AllocateOperator, EstimateOperator, ReleaseOperator

with DAG("sized", schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC)) as sized:
    estimate = EstimateOperator(task_id="estimate", job=json.loads(os.environ["FOREIGN_JOB"]))
    allocate = AllocateOperator(task_id="allocate", run=estimate.output)
    use = BashOperator(
        task_id="use",
        bash_command="echo '{{ ti.xcom_pull(task_ids=\"allocate\").devices | tojson }}' > $OUT",
        env={"OUT": os.environ["FOREIGN_OUT"]},
        append_env=True,
    )
    release = ReleaseOperator(task_id="release", run=estimate.output)
    estimate >> allocate >> use >> release.as_teardown(setups=allocate)
