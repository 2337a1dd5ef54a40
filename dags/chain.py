"""What the DAGs share: the steps of a run in their order, and how failures are tried again."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import Asset

from trainwright.operators import (
    AllocateOperator,
    AnalyzeOperator,
    ApprovePromotionOperator,
    EstimateOperator,
    ExtractOperator,
    PromoteOperator,
    ReleaseOperator,
    SearchLearningRateOperator,
    StoreOperator,
    TrainOperator,
    ValidateOperator,
)
from trainwright.operators.assets import MODELS, PROMOTED

RETRIES: dict[str, Any] = {
    "retries": 3,
    "retry_delay": timedelta(seconds=20),
    "retry_exponential_backoff": 2.0,
    "max_retry_delay": timedelta(minutes=10),
}
"""for what a retry can mend (a service out of reach, a process that was killed); bad input fails at once (`operators.base`)"""
APPROVAL_TIMEOUT = timedelta(days=1)


def chain(
    job: Any,
    pool: str | None = None,
    new: str = "false",
    replay: str | None = None,
    run: str | None = None,
    models: Asset | None = None,
) -> StoreOperator:
    """Wire the steps of one run, within a DAG, to the sealed model and its report; the step that stores it."""
    validate = ValidateOperator(
        task_id="validate", run=run, job=job, device_pool=pool, new=new, replay=replay
    )
    reference = validate.output
    extract = ExtractOperator(task_id="extract", run=reference)
    estimate = EstimateOperator(task_id="estimate", run=reference)
    allocate = AllocateOperator(task_id="allocate", run=reference, replay=replay)
    search_lr = SearchLearningRateOperator(task_id="search_lr", run=reference, replay=replay)
    train = TrainOperator(task_id="train", run=reference, replay=replay)
    release = ReleaseOperator(task_id="release", run=reference)
    store = StoreOperator(task_id="store", run=reference, outlets=[models or MODELS])
    analyze = AnalyzeOperator(task_id="analyze", run=reference)
    validate >> extract >> estimate >> allocate >> search_lr >> train >> store >> analyze
    train >> release.as_teardown(setups=allocate)
    return store


def promotion(store: StoreOperator) -> None:
    """After it, let the job's alias name the model: where that is better, and where a person agrees if one must."""
    approve = ApprovePromotionOperator(
        task_id="approve", run=store.output, response_timeout=APPROVAL_TIMEOUT, defaults="Reject"
    )
    promote = PromoteOperator(
        task_id="promote", run=store.output, approved=approve.output, outlets=[PROMOTED]
    )
    store >> approve >> promote
