"""Plans jobs without a run, as if they started now. Leases nothing."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from trainwright.estimator.predict.calibration import Calibration
from trainwright.estimator.predict.correction import FinishedRun
from trainwright.estimator.structure import Structure
from trainwright.tasks import progress
from trainwright.tasks.allocate.joint_planner import Pending, check, make_joint_plan
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.allocate.queue_wait import with_queue_wait
from trainwright.tasks.errors import BadInput, ServiceUnreachable
from trainwright.tasks.estimate import finished_runs
from trainwright.tasks.extract import batch_spec, extract_model
from trainwright.tasks.leases.ledger import Ledger
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import HeldDevice, JointPlan, Plan
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.eligibility import require_possible, usable
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Device, Pool, load_pool


def plan_job(job: Job, settings: Settings, calibrations: Sequence[Calibration] = ()) -> Plan:
    """The plan for a job that starts now on its whole pool; `held` lists the devices in use."""
    return plan_and_estimate(job, settings, calibrations)[0]


def plan_and_estimate(
    job: Job, settings: Settings, calibrations: Sequence[Calibration] = ()
) -> tuple[Plan, Estimate]:
    """As `plan_job`, with the estimate from which the plan was made."""
    pool, found, schema = predicted(job, settings, calibrations)

    def make(job: Job) -> Plan:
        return make_plan(job, pool, found, schema, now=datetime.now(UTC))

    made = with_queue_wait(make, job, settings)
    held = held_devices(usable(pool, job), settings)
    return made.model_copy(update={"held": held}), found


def plan_jobs(
    jobs: Sequence[Job], settings: Settings, calibrations: Sequence[Calibration] = ()
) -> JointPlan:
    """The joint plan of several jobs on one pool; `held` lists the devices in use.

    Raises BadInput, Infeasible.
    """
    pools = {job.pool for job in jobs}
    if len(pools) > 1:
        raise BadInput(
            f"pool: got {', '.join(sorted(str(pool) for pool in pools))}; "
            "allowed: one pool for all jobs (--pool FILE)"
        )
    check(jobs, load_pool(jobs[0].pool))
    now = datetime.now(UTC)
    pending = [Pending(job, *predicted(job, settings, calibrations)) for job in jobs]
    made = make_joint_plan(pending, now=now)
    devices = {device.id: device for job in jobs for device in usable(pending[0].pool, job)}
    return made.model_copy(update={"held": held_devices(list(devices.values()), settings)})


def predicted(
    job: Job, settings: Settings, calibrations: Sequence[Calibration] = ()
) -> tuple[Pool, Estimate, DataSchema]:
    """The inputs of a job's plan: its pool, the estimate for its devices, its data's schema.

    Checks for an impossible job first, before it reads data or measures. Raises BadInput.
    """
    from trainwright.tasks.data import dataset
    from trainwright.tasks.data.model_schema import schema_of_model
    from trainwright.tasks.data.sources import localized

    if job.model is None:
        raise BadInput("model: required field is missing; `recommend` finds one for the data")
    pool = load_pool(job.pool)
    usable(pool, job)  # raises BadInput if there are too few
    require_possible(job, pool)
    data = localized(job.data, settings)
    if data.reader == "model":
        schema = schema_of_model(job.model, data, settings)
    else:
        schema = dataset.describe(data, job.train.seed)
    dataset.say_changes(schema)
    require_possible(job, pool, schema.train_rows)
    structure = extract_model(
        job.model,
        settings,
        spec=batch_spec(schema),
        optimizer=job.train.optimizer,
        precision=job.train.precision,
        label_smoothing=job.train.label_smoothing,
        job=job,
    )
    return pool, _estimated(job, pool, structure, settings, calibrations), schema


def plan_structure(
    job: Job,
    pool: Pool,
    schema: DataSchema,
    structure: Structure,
    settings: Settings,
    calibrations: Sequence[Calibration] = (),
    finished: Sequence[FinishedRun] | None = None,
) -> Plan:
    """The plan for a job with a known structure; reads neither data nor the model's code.

    `finished`: the store's finished runs (default: they are read).
    """
    return make_plan(
        job,
        pool,
        _estimated(job, pool, structure, settings, calibrations, finished),
        schema,
        now=datetime.now(UTC),
    )


def _estimated(
    job: Job,
    pool: Pool,
    structure: Structure,
    settings: Settings,
    calibrations: Sequence[Calibration],
    finished: Sequence[FinishedRun] | None = None,
) -> Estimate:
    from trainwright.tasks.estimate.pool_estimate import estimate

    devices: list[Device] = usable(pool, job)
    return estimate(
        structure,
        devices,
        calibrations,
        power=pool.power,
        backend=job.train.backend,
        settings=settings,
        finished=finished_on(devices, settings) if finished is None else finished,
    )


def held_devices(devices: Sequence[Device], settings: Settings) -> list[HeldDevice] | None:
    """The devices that runs hold; None, with a notice, if the ledger is unreachable."""
    try:
        leases = {lease.resource: lease for lease in Ledger(settings.ledger_url).held("device ")}
    except (BadInput, ServiceUnreachable) as error:
        progress.emit("notice", message=f"devices in use are unknown: {error}")
        return None
    return [
        HeldDevice(id=device.id, holder=lease.holder, run=lease.run, until=_time(lease.expires_at))
        for device in devices
        if (lease := leases.get(device.resource)) is not None
    ]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def finished_on(devices: Sequence[Device], settings: Settings) -> list[FinishedRun]:
    """The store's finished runs on these device types; none, with a notice, if unreachable."""
    try:
        types = {device.type for device in devices}
        return finished_runs.read(settings.store, types, settings)
    except (BadInput, ServiceUnreachable) as error:
        progress.emit("notice", message=f"no correction by finished runs: {error}")
        return []
