"""A user's DAG for tests of Airflow's UI: the trigger passes the job."""

from datetime import UTC, datetime, timedelta

from airflow.sdk import DAG, Param

from trainwright.operators import ExtractOperator, ValidateOperator

with DAG(
    "tabs",
    schedule=None,
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    params={"job": Param({}, type="object")},
    default_args={"retries": 2, "retry_delay": timedelta(seconds=2)},
) as tabs:
    validate = ValidateOperator(task_id="validate", job="{{ params.job | tojson }}")
    validate >> ExtractOperator(task_id="extract", run=validate.output)
