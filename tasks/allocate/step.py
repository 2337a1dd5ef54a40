"""Step `allocate`: chooses the devices and their shares of the batch, and leases the devices."""

from __future__ import annotations

from trainwright.tasks import progress
from trainwright.tasks.allocate.acquire import Planner, lease
from trainwright.tasks.allocate.layouts.words import ALL_SUMMED
from trainwright.tasks.allocate.replan.run_plans import planner, replanner, require_devices
from trainwright.tasks.context import Reference, RunContext
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.units import seconds


def work(context: RunContext) -> Reference:
    """Plan and lease; wait in the queue if other runs hold the devices.

    A run that continues keeps its plan, unless the pool no longer has its devices. Raises
    Infeasible if no plan meets the limits, RunHeld if no devices became free within the job's
    `queue_timeout`.
    """
    run = context.run
    stored = run.find(Plan)
    if stored is not None:
        plan = stored
        if not run.has(Result):  # a trained run needs no devices
            plan, _ = lease(context, stored, again=replanner_of(context))
    elif context.replay is not None:
        replayed = context.replay.read(Plan)
        require_devices(replayed, run.job())
        plan, _ = lease(context, replayed)
    else:
        plan, _ = lease(context, planner(run, run.data()))
    if plan != stored:
        run.write(plan)
    return {
        "artefact": Plan.FILE,
        "feasible": plan.feasible,
        "devices": {device.id: device.batch_size for device in plan.devices},
        "global_batch_size": plan.global_batch_size,
        "layout": plan.layout_in_words or None,
        "queue_wait": plan.queue_wait.in_words if plan.queue_wait else None,
        "predicted_duration_s": plan.predicted.duration_s.median if plan.predicted else None,
    }


def summary(reference: Reference) -> str:
    """One line, as in `global batch 64 (here/0 43, here/1 21), about 12 s of training`.

    The layout follows if it is not data parallel for all layers, and a cluster's expected wait.
    """
    split = ", ".join(f"{device} {batch}" for device, batch in reference["devices"].items())
    layout, wait = reference.get("layout") or "", reference.get("queue_wait")
    return (
        f"global batch {reference['global_batch_size']} ({split}), "
        f"about {seconds(reference['predicted_duration_s'])} of training"
        + (f"; {layout}" if layout and not layout.startswith(ALL_SUMMED) else "")
        + (f"; {wait}" if wait else "")
    )


def replanner_of(context: RunContext) -> Planner | None:
    """The planner for a changed pool. None for a replay, whose plan must not change."""
    run = context.run
    if context.replay is not None:
        require_devices(run.read(Plan), run.job())
        return None
    return replanner(run, run.data())


def release(context: RunContext) -> Reference:
    """Release the run's devices. Idempotent; succeeds even if the run failed."""
    run = context.run
    plan = run.find(Plan)
    count = 0
    if plan is not None:
        count = context.ledger.release(run.uri, plan.resources(run.uri), holder=context.holder.name)
    progress.emit("step", name="release", state="done", seconds=0.0, summary={"released": count})
    return {"run": run.uri, "released": count}
