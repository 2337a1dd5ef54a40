"""The whole chain, from data to stored and analysed model: `retrain` for any job, and one DAG per job file.

A job's `deadline` runs from the lease to the end of training, and training is planned to meet it. Airflow's alert can only count
a whole DAG run, from when it is queued to its end. So it comes after `deadline` + `queue_timeout`, and the day that a person has
to approve where the job asks for that. The steps before the lease and after training count in it too: where they take longer than
waiting left over, the alert comes though training was in time; where nothing was waited for, it comes late.
"""

from __future__ import annotations

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
from airflow.sdk.exceptions import AirflowFailException

from trainwright.dags.chain import APPROVAL_TIMEOUT, RETRIES, chain, promotion
from trainwright.operators.assets import data_asset, model_asset
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
                f"{path}: name: got '{job.name}'; {first} has that name already, give each job its own"
            )
        JOBS[str(path)] = job
    except (
        BadInput
    ) as error:  # one bad file must not take the other DAGs away; its own DAG says what is wrong
        logging.getLogger(__name__).warning("%s", error)
        JOBS[str(path)] = str(error)
FORM = Form(next((job for job in JOBS.values() if isinstance(job, Job)), None))


def job_of(params: Mapping[str, Any]) -> str:
    """The job that a trigger means, as a template's text: a file's path, or the filled-in form as JSON."""
    try:
        return FORM.job_text(params)
    except BadInput as error:
        raise AirflowFailException(f"{error.kind}: {error}") from error


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
# After the tasks: a task would have a copy of all that its DAG has by then, and is given the DAG's own anyway.
retrain.params = ParamsDict(
    {
        "job": Param(
            None,
            type=["null", "string", "object"],
            title="Job file",
            description="path of a job file on the workers; left empty: the job is what the fields below say",
            examples=[str(path) for path in JOB_FILES],
        ),
        "pool": Param(
            None, type=["null", "string"], title="Pool file", description="overrides the job's pool"
        ),
        "new": Param(
            False,
            type="boolean",
            title="Start afresh",
            description="do not continue an unfinished run",
        ),
        "replay": Param(
            None,
            type=["null", "string"],
            title="Replay",
            description="URI of a run whose plan and learning rate to use",
        ),
        "run": Param(
            None, type=["null", "string"], title="Run", description="URI of a run to continue"
        ),
        **{
            one.name: Param(one.default, description=one.description, schema=one.schema)
            for one in FORM.fields
        },
    }
)


def schedule_of(job: Job) -> Any:
    """When the job runs by itself: by the clock, whenever its data is updated, or both."""
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
    """An alert where the DAG run is not over by the job's deadline and what may pass before and after it (above)."""
    if job.objective.deadline is None:
        return None
    within = timedelta(seconds=job.objective.deadline + job.queue_timeout)
    if job.needs_approval:
        within += APPROVAL_TIMEOUT
    told = {
        "job": job.name,
        "deadline_s": job.objective.deadline,
        "within_s": within.total_seconds(),
    }
    return DeadlineAlert(
        reference=DeadlineReference.DAGRUN_QUEUED_AT,
        interval=within,
        callback=AsyncCallback("trainwright.operators.deadline.missed", kwargs=told),
    )


for path in JOB_FILES:
    job = JOBS[str(path)]
    problem = job if isinstance(job, str) else None
    name = job.name if isinstance(job, Job) else re.sub(r"[^a-z0-9-]+", "-", path.stem.lower())
    if problem is not None and (name in NAMED or f"retrain_{name}" in globals()):
        name += f"-{path.suffix[1:]}"
    with (
        DAG(
            f"retrain_{name}",
            description=f"Retrain {name}." if problem is None else escape(problem, quote=False),
            schedule=schedule_of(job) if isinstance(job, Job) else None,
            deadline=deadline_of(job) if isinstance(job, Job) else None,
            catchup=False,  # nor is there a start date: the first run is the next one due, not one that was missed
            max_active_runs=1,
            is_paused_upon_creation=False,
            default_args=RETRIES,
            tags=["trainwright", "job file is wrong"] if problem else ["trainwright"],
            doc_md=escape(f"{path}: {problem or 'the whole chain for this job'}", quote=False),
        ) as scheduled
    ):
        promotion(
            chain(
                job=str(path),
                # What is due trains anew, on the data of its day: an unfinished run may have begun with other data.
                new="{{ dag_run.run_type != 'manual' }}",
                models=model_asset(name) if problem is None else None,
            )
        )
    globals()[scheduled.dag_id] = scheduled
