"""The job and the request of a training that only measures this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainwright.estimator.curves import Interval
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.plan import Plan, PlannedDevice
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import load_pool
from trainwright.tasks.train.request import TrainRequest


def measured_job(
    rows: Path, source: Path, config: dict[str, Any], batch_size: int, epochs: int = 1
) -> Job:
    """The job that trains a model's source on a table with the target `label`."""
    return Job.model_validate(
        {
            "name": "measured",
            "data": {
                "uri": str(rows),
                "target": "label",
                "task": "tabular-classification",
                "validation_fraction": 0.1,
            },
            "model": {"source": str(source), "config": config},
            "train": {
                "global_batch_size": batch_size,
                "epochs": epochs,
                "learning_rate": 1e-3,
                "adaptive_split": False,
            },
        }
    )


def measured_request(
    job: Job,
    schema: DataSchema,
    work: Path,
    devices: Sequence[dict[str, Any]] = ({},),
    **planned: Any,
) -> TrainRequest:
    """Train the job in the folder `work`.

    Each of `devices` has the fields in which it differs from this machine's first device, and
    `planned` are further fields of the plan. The job states the global batch.
    """
    assert job.model is not None
    source, none = Path(job.model.source), Interval(median=0.0, low=0.0, high=0.0)
    device, batch = load_pool(None).devices()[0], int(job.train.global_batch_size)
    plan = Plan(
        feasible=True,
        objective="time",
        devices=[
            PlannedDevice(
                **device.model_copy(update=fields).model_dump(),
                batch_size=batch,
                step_time_s=none,
                peak_memory_bytes=0.0,
            )
            for fields in devices
        ],
        global_batch_size=batch,
        steps_per_epoch=1,
        epochs=1,
        strategy={},
        predicted=None,
        deadline_s=None,
        solve_time_s=0.0,
        **planned,
    )
    return TrainRequest(
        job=job,
        plan=plan,
        learning_rate=1e-3,
        schema=schema,
        source_folder=str(source.parent),
        entry=source.name,
        run_uri=None,
        work_folder=str(work),
        resume=False,
    )
