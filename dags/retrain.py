"""The whole chain, from data to analysed model: `retrain` for any job, and one DAG per job file.

A job's `deadline` runs from the lease to the end of training, and the plan meets it. Airflow's
deadline alert can only measure a whole DAG run, from its queueing to its end. The alert therefore
comes after `deadline` + `queue_timeout` (+ one day if the job requires approval). It is
approximate: slow steps before the lease or after training can raise it although training was in
time; if the run did not wait in the queue, it comes late.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from html import escape
from pathlib import Path
from typing import Any

from airflow.sdk import (
    DAG,
    AssetOrTimeSchedule,
    AsyncCallback,
    CronTriggerTimetable,
    DeadlineAlert,
    DeadlineReference,
    Param,
    ParamsDict,
)

from trainwright.dags.chain import APPROVAL_TIMEOUT, RETRIES, chain, promotion
from trainwright.operators.assets import data_asset, model_asset
from trainwright.operators.base import REFUSED
from trainwright.operators.hooks import configured
from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.form import Form
from trainwright.tasks.spec.job import Job, load_job

JOB_FILES = sorted(
    path for path in configured().jobs.glob("*") if path.suffix in (".yaml", ".yml", ".json")
)
JOBS: dict[str, Job | str] = {}
NAMED: dict[str, Path] = {}
for path in JOB_FILES:
    try:
        job = load_job(path)
        if (first := NAMED.setdefault(job.name, path)) != path:
            raise BadInput(
                f"{path}: name: got '{job.name}'; {first} already has this name; "
                "give each job its own"
            )
        JOBS[str(path)] = job
    except BadInput as error:
        # A bad file must not hide the other DAGs; its own DAG shows the error.
        logging.getLogger(__name__).warning("%s", error)
        JOBS[str(path)] = str(error)
FORM = Form(next((job for job in JOBS.values() if isinstance(job, Job)), None))


def job_of(params: Mapping[str, Any]) -> str:
    """The job of a trigger, as text for a template: a file's path, or the form's fields as JSON."""
    try:
        return FORM.job_text(params)
    except BadInput as error:
        return json.dumps({REFUSED: str(error)})  # the task says it: a template's error is hidden


with DAG(
    "retrain",
    description="From data to stored and analysed model, for any job: a job file, or the form.",
    schedule=None,
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    is_paused_upon_creation=False,
    default_args=RETRIES,
    tags=["trainwright"],
    doc_md=__doc__,
    user_defined_macros={"job_of": job_of},
) as retrain:
    promotion(
        chain(
            job="{{ job_of(params) }}",
            pool="{{ params.pool }}",
            new="{{ params.new }}",
            replay="{{ params.replay }}",
            run="{{ params.run }}",
        )
    )
FIELDS = {
    one.name: Param(one.default, description=one.description, schema=one.schema)
    for one in sorted(FORM.fields, key=lambda one: "section" in one.schema)
}
# Set after the tasks are made: each task would otherwise be serialised with a copy of all of them.
# At run time a task gets its DAG's params anyway.
retrain.params = ParamsDict(
    {
        **FIELDS,  # those without a section are shown first
        "job": Param(
            None,
            type=["null", "string", "object"],
            title="Job file",
            description="path of a job file on the workers; empty: the other fields define the job",
            examples=[str(path) for path in JOB_FILES],
        ),
        "pool": Param(
            None, type=["null", "string"], title="Pool file", description="overrides the job's pool"
        ),
        "new": Param(
            False,
            type="boolean",
            title="Start afresh",
            description="start a new run instead of continuing an unfinished one",
        ),
        "replay": Param(
            None,
            type=["null", "string"],
            title="Replay",
            description="URI of a run whose plan, learning rate and split events to use again",
        ),
        "run": Param(
            None, type=["null", "string"], title="Run", description="URI of a run to continue"
        ),
    }
)


def schedule_of(job: Job) -> Any:
    """When the job runs by itself: by cron, when its data is updated, or both."""
    if job.schedule is None:
        return None
    if not job.schedule.on_new_data:
        return job.schedule.cron
    data = [data_asset(job.data.uri)]
    if job.schedule.cron is None:
        return data
    return AssetOrTimeSchedule(
        timetable=CronTriggerTimetable(job.schedule.cron, timezone="UTC"), assets=data
    )


def deadline_of(job: Job) -> DeadlineAlert | None:
    """The alert for a DAG run that is not over in time (see above); None without a deadline."""
    if job.objective.deadline is None:
        return None
    within = timedelta(seconds=job.objective.deadline + job.queue_timeout)
    if job.needs_approval:
        within += APPROVAL_TIMEOUT
    details = {
        "job": job.name,
        "deadline_s": job.objective.deadline,
        "within_s": within.total_seconds(),
    }
    return DeadlineAlert(
        reference=DeadlineReference.DAGRUN_QUEUED_AT,
        interval=within,
        callback=AsyncCallback("trainwright.operators.deadline.missed", kwargs=details),
    )


for path in JOB_FILES:
    job = JOBS[str(path)]
    problem = job if isinstance(job, str) else None
    name = job.name if isinstance(job, Job) else re.sub(r"[^a-z0-9-]+", "-", path.stem.lower())
    if problem is not None and (name in NAMED or f"retrain_{name}" in globals()):
        name += f"-{path.suffix[1:]}"
    with DAG(
        f"retrain_{name}",
        description=f"Retrain {name}." if problem is None else escape(problem, quote=False),
        schedule=schedule_of(job) if isinstance(job, Job) else None,
        deadline=deadline_of(job) if isinstance(job, Job) else None,
        # Neither catchup nor a start date: the first run is the next one due, not a missed one.
        catchup=False,
        max_active_runs=1,
        is_paused_upon_creation=False,
        default_args=RETRIES,
        tags=["trainwright", "job file is wrong"] if problem else ["trainwright"],
        doc_md=escape(f"{path}: {problem or 'the whole chain for this job'}", quote=False),
    ) as scheduled:
        promotion(
            chain(
                job=str(path),
                # A scheduled DAG run starts a new run: an unfinished one may have begun with older
                # data.
                new="{{ dag_run.run_type != 'manual' }}",
                models=model_asset(name) if problem is None else None,
            )
        )
    globals()[scheduled.dag_id] = scheduled
