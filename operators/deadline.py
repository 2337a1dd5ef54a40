"""The callback of the deadline alert that `dags.retrain` sets."""

from __future__ import annotations

import logging
from typing import Any


async def missed(job: str, deadline_s: float, within_s: float, **context: Any) -> None:
    """Log it in the triggerer; Airflow's UI shows the missed deadline on the DAG run."""
    dag_run = (context.get("context") or {}).get("dag_run") or {}
    run_id = (
        dag_run.get("dag_run_id") or dag_run.get("run_id") if isinstance(dag_run, dict) else dag_run
    )
    logging.getLogger(__name__).warning(
        "job %s: missed its deadline of %g s: not done %g s after it was queued (%s)",
        job,
        deadline_s,
        within_s,
        run_id,
    )
