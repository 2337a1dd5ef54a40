"""Train several candidate jobs, each as its own run, and point an alias at the best model.

A job without a model stands for the best candidates that `recommend` finds for its data.

If the best one's job requires approval, a person approves first.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from airflow.sdk import DAG, Param, task, task_group

from trainwright.dags.chain import APPROVAL_TIMEOUT, RETRIES, chain
from trainwright.operators import ApprovePromotionOperator, PromoteOperator
from trainwright.operators.assets import PROMOTED
from trainwright.operators.failures import airflow_errors


@task
@airflow_errors()
def candidate_jobs(params: dict[str, Any] | None = None) -> list[Any]:
    """The candidates: paths of job files, or jobs as mappings."""
    from trainwright.operators.hooks import connection_ids, settings_of
    from trainwright.tasks.progress import log_line
    from trainwright.tasks.recommend.step import candidate_jobs as with_recommended

    given = params or {}
    found = with_recommended(given["jobs"], int(given["top"]), settings_of(connection_ids()))
    names = [job if isinstance(job, str) else job["name"] for job in found]
    log_line(f"candidates: {', '.join(names)}")
    return found


@task_group
def candidate(job: Any) -> None:
    """One candidate, from data to report."""
    chain(job=job, new="true")


@task(trigger_rule="all_done_min_one_success")
@airflow_errors()
def best(stored: Any) -> dict[str, Any]:
    """The best of the candidates that succeeded, and how the others compare."""
    from trainwright.operators.hooks import connection_ids, settings_of
    from trainwright.tasks.progress import log_line
    from trainwright.tasks.promote import best_of
    from trainwright.tasks.units import metric

    runs = (one["run"] for one in stored if one)
    found = best_of(runs, settings_of(connection_ids()))
    for place in found["ranking"]:
        log_line(f"{found['metric']} {metric(place['value'])}: {place['run']}")
    return found


with DAG(
    "candidates",
    description="Train several candidate jobs, keep the best model.",
    schedule=None,
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    is_paused_upon_creation=False,
    default_args=RETRIES,
    tags=["trainwright"],
    doc_md=__doc__,
    params={
        "jobs": Param(
            [],
            type="array",
            items={"type": ["string", "object"]},
            title="Jobs",
            description='job files on the workers, as in ["/jobs/a.yaml", "/jobs/b.yaml"], or jobs '
            "as mappings; each has its own name, all have the same metric to compare",
        ),
        "top": Param(
            3,
            type="integer",
            minimum=1,
            maximum=20,
            title="Recommended",
            description="models to train for each job without a model: the best so many",
        ),
        "name": Param(
            "candidates",
            type="string",
            pattern="^[a-z0-9-]+$",
            title="Name",
            description="the name under which the alias is kept",
        ),
        "alias": Param(
            "best",
            type="string",
            pattern="^[a-z0-9-]+$",
            title="Alias",
            description="the alias of the best model",
        ),
    },
) as candidates:
    runs = candidate.expand(job=candidate_jobs())
    winner = best(candidates.task_dict["candidate.store"].output)
    approve = ApprovePromotionOperator(
        task_id="approve",
        run=winner,
        name="{{ params.name }}",
        alias="{{ params.alias }}",
        response_timeout=APPROVAL_TIMEOUT,
        defaults="Reject",
    )
    PromoteOperator(
        task_id="promote",
        run=winner,
        name="{{ params.name }}",
        alias="{{ params.alias }}",
        approved=approve.output,
        outlets=[PROMOTED],
    )
