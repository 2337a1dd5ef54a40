"""Single steps without a run and without a store: data or a model in, an answer out.

What `extract`, `estimate`, `validate` and `plan` do at the command line, and what operators do that were given plain values.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainwright.estimator.devices import DEVICE_TYPES
from trainwright.estimator.predict.calibration import Calibration
from trainwright.estimator.predict.correction import FinishedRun, learn
from trainwright.estimator.predict.step_time import estimate_step as step_document
from trainwright.estimator.structure import PRECISIONS, Structure
from trainwright.estimator.trace import source as model_source
from trainwright.estimator.trace.source import BatchSpec
from trainwright.tasks import progress
from trainwright.tasks.allocate.joint_planner import Pending, check, make_joint_plan
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.errors import BadInput, DataRejected, ServiceUnreachable
from trainwright.tasks.estimate import finished_runs
from trainwright.tasks.leases.queue import Queue
from trainwright.tasks.runs.artefacts import (
    DataSchema,
    Estimate,
    HeldDevice,
    JointPlan,
    Plan,
    Validation,
)
from trainwright.tasks.settings import settings
from trainwright.tasks.spec.documents import validated
from trainwright.tasks.spec.eligibility import require_possible, usable
from trainwright.tasks.spec.job import DataSpec, Job, ModelSpec, Optimizer
from trainwright.tasks.spec.pool import Device, Pool, load_pool
from trainwright.tasks.spec.windows import next_change, seconds_left
from trainwright.tasks.step import ledger
from trainwright.tasks.steps import batch_spec, kept_suite
from trainwright.tasks.storage.objects import open_store


def extract_model(
    model: str | dict[str, Any] | ModelSpec,
    *,
    batch_size: int = 32,
    spec: BatchSpec | None = None,
    optimizer: Optimizer | None = None,
    precision: str = "fp32",
    accumulation: int = 1,
) -> Structure:
    """The structure of a model's source. Without `spec`, the source must define `example_batch`."""
    from trainwright.tasks.extract import extract

    if isinstance(model, str):
        model = {"source": model}
    chosen = model if isinstance(model, ModelSpec) else validated(ModelSpec, model, "model")
    _check_batch(batch_size)
    if precision not in PRECISIONS:
        raise BadInput(f"precision: got {precision!r}; allowed: {', '.join(PRECISIONS)}")
    if accumulation < 1:
        raise BadInput(f"accumulation: got {accumulation}; allowed: 1 or more")
    entry, files = model_source.snapshot(chosen.source)
    with tempfile.TemporaryDirectory(prefix="trainwright-source-") as name:
        folder = Path(name)
        for file, data in files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(data)
        return extract(
            folder,
            entry,
            chosen.config,
            batch_size=batch_size,
            batch_spec=spec,
            optimizer=optimizer or Optimizer(),
            precision=precision,
            accumulation=accumulation,
        )


def _check_batch(batch_size: int) -> None:
    if not 1 <= batch_size <= 1_000_000:
        raise BadInput(f"batch size: got {batch_size}; allowed: 1 to 1000000")


def estimate_step(
    structure: Structure,
    *,
    batch_size: int,
    device_type: str | None = None,
    calibration: Calibration | None = None,
    store: str | None = None,
) -> dict[str, Any]:
    """Time, memory and energy of one step on a device type, from a calibration or from the datasheet.

    With `store`, the runs that finished there correct a calibrated prediction.
    """
    from trainwright.estimator.predict.step_time import predict_curve

    _check_batch(batch_size)
    chosen = device_type_of(device_type, calibration)
    curve = predict_curve(
        structure,
        calibration,
        device_type=chosen,
        cores=float(calibration.threads) if calibration is not None and chosen == "cpu" else None,
        speed=1.0 if chosen == "emulated" else None,
        batch_size=batch_size,
    )
    if store is not None:
        curve = learn(curve, finished_runs.read(store, [curve.device_type]))
    return step_document(curve, batch_size)


def device_type_of(device_type: str | None, calibration: Calibration | None) -> str:
    """The device type that is asked for. Raises BadInput where it is unknown, or not the calibration's."""
    chosen = (
        device_type
        if device_type is not None
        else calibration.device_type
        if calibration
        else "cpu"
    )
    if chosen not in DEVICE_TYPES:
        raise BadInput(
            f"device type: got {chosen[:80]!r}; allowed: {', '.join(sorted(DEVICE_TYPES))}"
        )
    if calibration is not None and calibration.device_type != chosen:
        raise BadInput(
            f"device type: got {chosen!r}; the calibration is of {calibration.device_type}"
        )
    return chosen


def validate_job(job: Job) -> Validation:
    """Check a job's data, against the suite that an earlier run of the job inferred where the store has one."""
    from trainwright.tasks.validate.check import validate

    kept = None
    try:
        kept = kept_suite(open_store(settings().store), job)
    except ServiceUnreachable as error:
        progress.emit("notice", message=f"no suite of earlier runs is looked at: {error}")
    return validate(job.data, seed=job.train.seed, kept_suite=kept)


def validate_data(data: dict[str, Any]) -> dict[str, Any]:
    """Check data that is described as in a job file; a summary. Raises DataRejected where it does not pass."""
    from trainwright.tasks.validate.check import failure_line, validate

    validation = validate(validated(DataSpec, data, "data"))
    if not validation.success:
        raise DataRejected(failure_line(validation))
    return {
        "success": True,
        "expectations": len(validation.expectations),
        "rows": validation.checked_rows,
    }


def plan_job(job: Job, calibrations: Sequence[Calibration] = ()) -> Plan:
    """The plan for a job that begins now, on its whole pool, whoever holds the devices: `held` says who. Leases nothing."""
    pool, found, schema = predicted(job, calibrations)
    made = make_plan(job, pool, found, schema, now=datetime.now(UTC))
    return made.model_copy(update={"held": held_devices(usable(pool, job.devices))})


def plan_jobs(jobs: Sequence[Job], calibrations: Sequence[Calibration] = ()) -> JointPlan:
    """One plan for several jobs on one pool, from now, whoever holds the devices: `held` says who. Leases nothing.

    Raises BadInput, Infeasible.
    """
    pools = {job.pool for job in jobs}
    if len(pools) > 1:
        raise BadInput(
            f"pool: got {', '.join(sorted(str(pool) for pool in pools))}; allowed: one pool for all jobs (--pool FILE)"
        )
    check(jobs, load_pool(jobs[0].pool))
    now = datetime.now(UTC)
    pending = [Pending(job, *predicted(job, calibrations)) for job in jobs]
    made = make_joint_plan(pending, now=now)
    devices = {device.id: device for job in jobs for device in usable(pending[0].pool, job.devices)}
    return made.model_copy(update={"held": held_devices(list(devices.values()))})


def predicted(
    job: Job, calibrations: Sequence[Calibration] = ()
) -> tuple[Pool, Estimate, DataSchema]:
    """What a job is planned from: its pool, what a step costs on the devices, and its data."""
    from trainwright.tasks.data import dataset

    if job.model is None:
        raise BadInput("model: missing in the job, and needed by this step")
    pool = load_pool(job.pool)
    devices = usable(
        pool, job.devices
    )  # what is wrong is told before anything is read, and before anything is measured
    require_possible(job, pool, devices)
    schema = dataset.describe(job.data)
    require_possible(job, pool, devices, schema.train_rows)
    structure = extract_model(
        job.model,
        spec=batch_spec(schema),
        optimizer=job.train.optimizer,
        precision=job.train.precision,
    )
    return pool, _estimated(job, pool, structure, calibrations), schema


def plan_structure(
    job: Job,
    pool: Pool,
    schema: DataSchema,
    structure: Structure,
    calibrations: Sequence[Calibration] = (),
) -> Plan:
    """The plan for a job whose model's structure is known already; reads neither its data nor its model's code."""
    return make_plan(
        job, pool, _estimated(job, pool, structure, calibrations), schema, now=datetime.now(UTC)
    )


def _estimated(
    job: Job, pool: Pool, structure: Structure, calibrations: Sequence[Calibration]
) -> Estimate:
    from trainwright.tasks.estimate.pool_estimate import estimate

    devices: list[Device] = usable(pool, job.devices)
    return estimate(
        structure,
        devices,
        calibrations,
        power=pool.power,
        backend=job.train.backend,
        finished=_finished(devices),
    )


def held_devices(devices: Sequence[Device]) -> list[HeldDevice] | None:
    """Those of the devices that runs hold now; None, with a notice, where the ledger can't be asked."""
    try:
        leases = {lease.resource: lease for lease in ledger().held("device ")}
    except (BadInput, ServiceUnreachable) as error:
        progress.emit("notice", message=f"who holds devices now is not known: {error}")
        return None
    return [
        HeldDevice(id=device.id, holder=lease.holder, run=lease.run, until=_time(lease.expires_at))
        for device in devices
        if (lease := leases.get(device.resource)) is not None
    ]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def pool_document(pool: Pool) -> dict[str, Any]:
    """A pool's devices, when they are there, who holds them until when, and who waits: as `trainwright pool --json` prints it."""
    held = {lease.resource: lease for lease in ledger().held("device ")}
    now = datetime.now(UTC)
    windows = {host.name: _window(host.available, now) for host in pool.hosts}
    documents: list[dict[str, Any]] = []
    for device in pool.devices():
        lease = held.get(device.resource)
        until = datetime.fromtimestamp(lease.expires_at, UTC) if lease else None
        documents.append(
            device.model_dump()
            | windows[device.host]
            | {
                "holder": lease.holder if lease else None,
                "run": lease.run if lease else None,
                "until": until.isoformat(timespec="seconds") if until else None,
                "expires_in_s": round((until - now).total_seconds(), 1) if until else None,
                "revoked_by": lease.revoked_by if lease else None,
            }
        )
    names = {device.resource for device in pool.devices()}
    queue: list[dict[str, Any]] = [
        {
            "place": place,
            "run": one.run,
            "holder": one.holder,
            "priority": one.priority,
            "waited_s": round(waited_s, 1),
            "needed": one.needed,
            "wanted": sorted(one.wanted),
        }
        for place, (one, waited_s) in enumerate(Queue(ledger()).waiting(), start=1)
        if one.wanted & names
    ]
    return {"pool": pool.name, "devices": documents, "queue": queue}


def _window(available: str | None, now: datetime) -> dict[str, Any]:
    """A host's daily window (UTC, None: always there), whether it is open, and when that changes."""
    change = next_change(available, now) if available else None
    return {
        "available": available,
        "available_now": seconds_left(available, now) > 0,
        "available_changes_at": change.isoformat(timespec="seconds") if change else None,
    }


def _finished(devices: Sequence[Device]) -> list[FinishedRun]:
    """What finished runs of the store taught about these devices; nothing where there is no store."""
    try:
        return finished_runs.read(settings().store, {device.type for device in devices})
    except (BadInput, ServiceUnreachable) as error:
        progress.emit("notice", message=f"finished runs do not correct the prediction: {error}")
        return []
