"""Weekly: measure each device type of a pool that this machine has.

Estimates then use fresh figures and need not measure first.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Param, task

from trainwright.estimator.machine import MOST_DRIFT
from trainwright.operators import CalibrateOperator
from trainwright.operators.failures import airflow_errors

POOL_FILES = sorted(str(path) for path in (Path(__file__).parent / "pools").glob("*.yaml"))


@task
@airflow_errors()
def device_types(pool: str) -> list[dict[str, Any]]:
    """Every device type of the pool; CPUs once for each number of threads."""
    from trainwright.tasks.spec.pool import load_pool

    return load_pool(pool).kinds()


with DAG(
    "calibrate_pool",
    description="Measure every device type of a pool.",
    schedule="0 4 * * 0",
    # Neither catchup nor a start date: the first run is the next one due, not a missed one.
    catchup=False,
    max_active_runs=1,
    is_paused_upon_creation=False,
    tags=["trainwright"],
    doc_md=__doc__,
    params={
        "pool": Param(
            POOL_FILES[0], type="string", minLength=1, title="Pool file", examples=POOL_FILES
        ),
        "budget_s": Param(
            90,
            type="number",
            minimum=1,
            title="Seconds",
            description="how long to measure each device type",
        ),
        "most_drift": Param(
            MOST_DRIFT,
            type="number",
            minimum=0,
            title="Most drift",
            description="highest allowed drift of the machine's speed; above it, retry later",
        ),
        "store": Param(
            None, type=["null", "string"], title="Store", description="empty: as configured"
        ),
    },
) as calibrate_pool:
    CalibrateOperator.partial(
        task_id="calibrate",
        budget_s="{{ params.budget_s }}",
        most_drift="{{ params.most_drift }}",
        store="{{ params.store }}",
        map_index_template="{{ task.device_type }}, {{ task.threads }} thread(s)",
        max_active_tis_per_dagrun=1,  # measurements at the same time would disturb each other
        retries=3,
        retry_delay=timedelta(minutes=15),
    ).expand_kwargs(device_types("{{ params.pool }}"))
