"""The whole chain, from data to stored and analysed model: `retrain` for any job, and one scheduled DAG per job file."""

from __future__ import annotations

import logging
import re
from datetime import UTC, datetime

from airflow.sdk import DAG, Param

from trainwright.operators import (
    AllocateOperator,
    AnalyzeOperator,
    EstimateOperator,
    ExtractOperator,
    ReleaseOperator,
    SearchLearningRateOperator,
    StoreOperator,
    TrainOperator,
    ValidateOperator,
)
from trainwright.tasks.errors import BadInput
from trainwright.tasks.job import load_job
from trainwright.tasks.settings import settings

JOB_FILES = sorted(path for path in settings().jobs.glob("*") if path.suffix in (".yaml", ".yml", ".json"))


def chain(job: str, pool: str | None, new: str, replay: str | None, run: str | None) -> None:
    """Wire the steps of one run, within a DAG."""
    validate = ValidateOperator(task_id="validate", run=run, job=job, device_pool=pool, new=new, replay=replay)
    reference = validate.output
    extract = ExtractOperator(task_id="extract", run=reference)
    estimate = EstimateOperator(task_id="estimate", run=reference)
    allocate = AllocateOperator(task_id="allocate", run=reference, replay=replay)
    search_lr = SearchLearningRateOperator(task_id="search_lr", run=reference, replay=replay)
    train = TrainOperator(task_id="train", run=reference, replay=replay)
    release = ReleaseOperator(task_id="release", run=reference)
    store = StoreOperator(task_id="store", run=reference)
    analyze = AnalyzeOperator(task_id="analyze", run=reference)
    validate >> extract >> estimate >> allocate >> search_lr >> train >> store >> analyze
    train >> release.as_teardown(setups=allocate)


with DAG(
    "retrain",
    description="From data to stored and analysed model, for any job file.",
    schedule=None,
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    is_paused_upon_creation=False,
    tags=["trainwright"],
    doc_md=__doc__,
    params={
        "job": Param(
            str(JOB_FILES[0]) if JOB_FILES else "",
            type="string",
            minLength=1,
            title="Job file",
            description="path of a job file on the workers",
            examples=[str(path) for path in JOB_FILES],
        ),
        "pool": Param(None, type=["null", "string"], title="Pool file", description="overrides the job's pool"),
        "new": Param(False, type="boolean", title="Start afresh", description="do not continue an unfinished run"),
        "replay": Param(
            None,
            type=["null", "string"],
            title="Replay",
            description="URI of a run whose plan and learning rate to use",
        ),
        "run": Param(None, type=["null", "string"], title="Run", description="URI of a run to continue"),
    },
) as retrain:
    chain(
        job="{{ params.job }}",
        pool="{{ params.pool }}",
        new="{{ params.new }}",
        replay="{{ params.replay }}",
        run="{{ params.run }}",
    )

for path in JOB_FILES:
    try:
        job = load_job(path)
        name, problem, cron = job.name, None, job.schedule.cron if job.schedule else None
    except BadInput as error:  # one bad file must not take the other DAGs away; its own DAG says what is wrong
        logging.getLogger(__name__).warning("%s", error)
        name, problem, cron = re.sub(r"[^a-z0-9-]+", "-", path.stem.lower()), str(error), None
    with DAG(
        f"retrain_{name}",
        description=problem or f"Retrain {name}.",
        schedule=cron,
        start_date=datetime(2026, 1, 1, tzinfo=UTC),
        catchup=False,
        max_active_runs=1,
        is_paused_upon_creation=False,
        tags=["trainwright", "job file is wrong"] if problem else ["trainwright"],
        doc_md=f"`{path}`: {problem or 'the whole chain for this job'}",
    ) as scheduled:
        chain(job=str(path), pool=None, new="false", replay=None, run=None)
    globals()[scheduled.dag_id] = scheduled
