"""Weekly: compare each job's newest finished run with all earlier ones."""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, Param, task

from trainwright.dags.chain import RETRIES
from trainwright.operators import AnalyzeOperator
from trainwright.operators.failures import airflow_errors


@task
@airflow_errors()
def newest_runs(params: dict[str, Any] | None = None) -> list[str]:
    """The newest finished run of every job, or of the job in `params`."""
    from trainwright.operators.base import given
    from trainwright.operators.hooks import connection_ids, settings_of
    from trainwright.tasks.progress import log_line
    from trainwright.tasks.runs.run import newest_finished

    job = given((params or {}).get("job"))
    runs = [run.uri for run in newest_finished(settings_of(connection_ids()), job)]
    log_line(f"runs to analyse: {', '.join(runs) or 'none is finished'}")
    return runs


with DAG(
    "analyze_history",
    description="Compare each job's newest run with all earlier ones.",
    schedule="0 5 * * 0",
    # Neither catchup nor a start date: the first run is the next one due, not a missed one.
    catchup=False,
    max_active_runs=1,
    is_paused_upon_creation=False,
    default_args=RETRIES,
    tags=["trainwright"],
    doc_md=__doc__,
    params={
        "job": Param(
            None,
            type=["null", "string"],
            title="Job",
            description="a job's name; empty: every job",
        )
    },
) as analyze_history:
    AnalyzeOperator.partial(task_id="analyze", map_index_template="{{ task.run }}").expand(
        run=newest_runs()
    )
