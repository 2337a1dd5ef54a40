"""Shared by all DAGs: the chain of a run's steps, and the retry policy."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import Any

from airflow.sdk import Asset

from trainwright.operators import ApprovePromotionOperator, PromoteOperator, ReleaseOperator
from trainwright.operators.assets import MODELS, PROMOTED
from trainwright.operators.base import operator_of
from trainwright.tasks.chain import steps

RETRIES: dict[str, Any] = {
    "retries": 3,
    "retry_delay": timedelta(seconds=20),
    "retry_exponential_backoff": 2.0,
    "max_retry_delay": timedelta(minutes=10),
}
"""For failures that a retry can fix (an unreachable service, a killed process).

Bad input fails without a retry (see `operators.base`).
"""
APPROVAL_TIMEOUT = timedelta(days=1)


def chain(
    job: Any,
    pool: str | None = None,
    new: str = "false",
    replay: str | None = None,
    run: str | None = None,
    models: Asset | None = None,
) -> Any:
    """Wire all steps of one run within a DAG. Returns the task that stores the model.

    The first step opens the run; the others get its reference.
    """
    first, *others = steps()
    tasks = {
        first.name: operator_of(first)(
            task_id=first.name, run=run, job=job, device_pool=pool, new=new, replay=replay
        )
    }
    reference = tasks[first.name].output
    for step in others:
        more = {"outlets": [models or MODELS]} if step.name == "store" else {}
        tasks[step.name] = operator_of(step)(
            task_id=step.name, run=reference, replay=replay, **more
        )
    for before, after in pairwise(tasks.values()):
        before >> after
    release = ReleaseOperator(task_id="release", run=reference)
    tasks["train"] >> release.as_teardown(setups=tasks["allocate"])
    return tasks["store"]


def promotion(store: Any) -> None:
    """After `store`: ask for approval if the job requires it, then promote a better model."""
    approve = ApprovePromotionOperator(
        task_id="approve", run=store.output, response_timeout=APPROVAL_TIMEOUT, defaults="Reject"
    )
    promote = PromoteOperator(
        task_id="promote", run=store.output, approved=approve.output, outlets=[PROMOTED]
    )
    store >> approve >> promote
