"""Makes a run's plan, and another one if the pool changed or a replan was requested.

Learning rate and checkpoint are valid only for the run's global batch. So another plan keeps the
global batch, and may change all else.
"""

from __future__ import annotations

from datetime import UTC, datetime

from trainwright.tasks import progress
from trainwright.tasks.allocate.acquire import Planner, gone
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.allocate.queue_wait import with_queue_wait
from trainwright.tasks.errors import BadInput, Infeasible
from trainwright.tasks.estimate.step import predicted
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.run import Run
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Device, load_pool


def planner(run: Run, data: DataSchema) -> Planner:
    """A planner for the run's first plan. Estimates again if the pool has other device kinds.

    The planner raises Infeasible.
    """
    job = run.job()

    def plan(devices: list[Device]) -> Plan:
        found = run.read(Estimate)
        if len(_known(devices, found)) < len(devices):
            pool = load_pool(job.pool).name
            progress.emit(
                "notice",
                message=f"plan: pool {pool} has other kinds of devices now; estimating again",
            )
            found = predicted(run)
            run.write(found)
        known = _known(devices, found)

        def make(job: Job) -> Plan:
            return make_plan(job, load_pool(job.pool), found, data, known, now=datetime.now(UTC))

        return with_queue_wait(make, job, run.settings)

    return plan


def _known(devices: list[Device], estimate: Estimate) -> list[Device]:
    # the pool may have changed after the estimate
    kinds = {device.variant: device for device in devices}
    known = {variant for variant, device in kinds.items() if estimate.find(device) is not None}
    return [device for device in devices if device.variant in known]


def replanner(run: Run, data: DataSchema) -> Planner:
    """A planner that keeps the global batch, with a new estimate.

    The planner raises Infeasible, naming devices that are gone.
    """
    job = run.job()
    estimated = False

    def again(devices: list[Device]) -> Plan:
        nonlocal estimated
        before = run.read(Plan)
        train = job.train.model_copy(update={"global_batch_size": before.global_batch_size})
        lost, pool = ", ".join(gone(before, job)), load_pool(job.pool)
        if not estimated or len(_known(devices, run.read(Estimate))) < len(devices):
            why = f"pool {pool.name} no longer has {lost} as planned; " if lost else ""
            progress.emit("notice", message=f"plan: {why}planning again")
            estimated = True
            run.write(predicted(run))
        same_batch, found = job.model_copy(update={"train": train}), run.read(Estimate)
        try:
            return make_plan(
                same_batch,
                pool,
                found,
                data,
                _known(devices, found),
                now=datetime.now(UTC),
                continues=True,
            )
        except Infeasible as error:
            lacking = f"pool {pool.name} no longer has {lost} as planned, and without it, "
            why = lacking if lost else ""
            raise Infeasible(
                f"plan: {why}for the same global batch of {before.global_batch_size}: {error}",
                **error.details,
            ) from error

    return again


def require_devices(plan: Plan, job: Job) -> None:
    """Check that a plan's devices exist, for a plan that must not change. Raises BadInput."""
    lost = gone(plan, job)
    if lost:
        raise BadInput(
            f"--replay: its plan uses {', '.join(lost)}, "
            f"which pool {load_pool(job.pool).name} does not have; "
            "allowed: a pool with the devices of the replayed run"
        )
