"""How a run gets its devices: it queues, plans with what is free at its turn, and leases that.

`lease` waits and reports the run's place in the queue. If the context defers, it raises MustWait
instead: the caller keeps the place (`look`) and calls again. `on_devices` works on leased devices.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from trainwright.tasks import progress
from trainwright.tasks.context import RunContext
from trainwright.tasks.errors import (
    BadInput,
    Infeasible,
    Interrupted,
    MustWait,
    Preempted,
    RunHeld,
    ServiceUnreachable,
    TrainingFailed,
    TrainwrightError,
)
from trainwright.tasks.estimate import memory_limits
from trainwright.tasks.leases.ledger import TTL_S, Heartbeat
from trainwright.tasks.leases.queue import Queue, Turn
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.eligibility import usable
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Device, load_pool

LOOK_EVERY_S = 1.0
"""The next run in the queue checks it this often; the others check less often."""
_LOOKS_AT_MOST_EVERY = 5
Done = TypeVar("Done")
Planner = Callable[[list[Device]], Plan]


def lease(
    context: RunContext, plan: Plan | Planner, *, again: Planner | None = None
) -> tuple[Plan, int]:
    """Lease the devices of a plan, or of the plan that a planner makes from what is free.

    Returns the plan and the lease's token. `again` makes another plan if the pool no longer has the
    plan's devices, or if a replan was requested; without it, both are ignored.

    Raises Infeasible if no plan meets the limits even with every device free; RunHeld after the
    job's `queue_timeout`; Interrupted if the context is stopped; MustWait if it defers.
    """
    run, ledger, me = context.run, context.ledger, context.holder
    job, queue = run.job(), Queue(ledger)
    asked_by = ledger.revoked_by(run.uri)
    if asked_by == run.uri:  # a replan was requested: keep the devices that both plans use
        ledger.clear_replan(run.uri)
        plan = _or_stay(again, plan, job) if again is not None and isinstance(plan, Plan) else plan
    elif asked_by is not None:  # another run needs the devices, and nothing here uses them
        ledger.release(run.uri, devices_of(context), holder=me.name)
    context.reported_place = 0
    least = job.devices.min_count
    try:
        while True:
            if again is not None and isinstance(plan, Plan) and gone(plan, job):
                plan = again
            devices = [] if isinstance(plan, Plan) else usable(load_pool(job.pool), job)
            wanted = (
                plan.resources(run.uri)
                if isinstance(plan, Plan)
                else [device.resource_of(run.uri) for device in devices]
            )
            needed = len(set(wanted)) if isinstance(plan, Plan) else min(least, len(devices))
            turn = queue.look(
                run.uri,
                me,
                wanted,
                needed,
                priority=job.priority,
                deadline_s=job.objective.deadline,
            )
            if len(turn.available) >= needed:
                chosen = plan if isinstance(plan, Plan) else _plan(plan, devices, turn, run.uri)
                if chosen is None:
                    least = len(turn.available) + 1
                    continue  # too few are free for a feasible plan: wait for more
                names = chosen.resources(run.uri)
                token = queue.take(run.uri, me, names, priority=job.priority)
                if token is not None:
                    # the earlier plan may have used other devices
                    if left := devices_of(context) - set(names):
                        ledger.release(run.uri, left, holder=me.name)
                    return chosen, token
            elif not context.reported_place and not isinstance(plan, Plan):
                plan(devices)  # raises Infeasible at once if even all devices together are too few
            if turn.waited_s >= job.queue_timeout:
                raise _timed_out(job, turn)
            if context.defers:
                raise MustWait(
                    f"waits for devices: place {turn.place} of {turn.length}",
                    run=run.uri,
                    holder=me.name,
                    **_place(turn),
                )
            _report(context, turn)
            pause_s = LOOK_EVERY_S * min(1 + turn.rivals, _LOOKS_AT_MOST_EVERY)
            pause_s = min(pause_s, max(0.05, job.queue_timeout - turn.waited_s))
            if context.stop.wait(pause_s) or context.stop.is_set():
                raise Interrupted("stopped while waiting for devices")
    except MustWait:
        raise
    except BaseException:
        queue.leave(run.uri)
        raise


def _report(context: RunContext, turn: Turn) -> None:
    """Report the run's place in the queue if it has changed."""
    if context.reported_place != turn.place:
        context.reported_place = turn.place
        progress.emit("queue", run=context.run.uri, **_place(turn))


def _place(turn: Turn) -> dict[str, str | int | None]:
    holder = turn.blocked_by.holder if turn.blocked_by else None
    return {"place": turn.place, "waiting": turn.length, "held_by": holder}


def devices_of(context: RunContext) -> set[str]:
    """The names of the devices that the run leases currently, as in the ledger."""
    held = context.ledger.held("device ")
    return {lease.resource for lease in held if lease.run == context.run.uri}


def _or_stay(again: Planner, plan: Plan, job: Job) -> Planner:
    """A planner that keeps the current plan if no other plan meets the limits."""

    def chosen(devices: list[Device]) -> Plan:
        try:
            return again(devices)
        except (Infeasible, BadInput) as error:  # BadInput: the pool file lacks information
            if gone(plan, job):
                raise
            progress.emit("notice", message=f"plan: unchanged: {error}")
            return plan

    return chosen


def gone(plan: Plan, job: Job) -> list[str]:
    """The ids of the plan's devices that the pool lacks, or has as another kind."""
    there = {device.resource: device.variant for device in usable(load_pool(job.pool), job)}
    return [device.id for device in plan.devices if there.get(device.resource) != device.variant]


def _plan(make: Planner, devices: list[Device], turn: Turn, run: str) -> Plan | None:
    """The plan with the available devices; None if it needs devices of other runs."""
    free = [device for device in devices if device.resource_of(run) in turn.available]
    try:
        return make(free)
    except Infeasible:
        if len(free) == len(devices):
            raise
        make(devices)  # raises if even all devices are too few
        return None


def _timed_out(job: Job, turn: Turn) -> RunHeld:
    lease = turn.blocked_by
    why = (
        f"{lease.resource} is held by {lease.by} for {lease.run}"
        if lease
        else "others are ahead in the queue"
    )
    return RunHeld(
        f"devices: no devices became free within queue_timeout ({job.queue_timeout:g} s); "
        f"place {turn.place} of {turn.length}; {why}",
        place=turn.place,
        waiting=turn.length,
        waited_s=round(turn.waited_s, 1),
        holder=lease.holder if lease else None,
        run=lease.run if lease else None,
    )


@dataclass(frozen=True)
class Claim:
    """A lease on devices. Calling it returns whether the run still holds them.

    `token` is the fencing token for writes under this lease.
    """

    token: int
    heartbeats: tuple[Heartbeat, ...]

    def __call__(self) -> bool:
        """Whether the run and its devices are still held, as far as the ledger answers."""
        return all(one.mine() for one in self.heartbeats)

    def lost(self, said: str) -> TrainwrightError:
        """The error of a lost lease: that the ledger did not answer, or else RunHeld."""
        for one in self.heartbeats:
            if one.unreachable is not None:
                return ServiceUnreachable(
                    f"{one.unreachable}; the lease on the devices expired meanwhile, and the last "
                    "checkpoint is kept: run it again to continue",
                    **one.unreachable.details,
                )
        return RunHeld(said)


def on_devices(
    context: RunContext,
    work: Callable[[threading.Event, Claim], Done],
    what: str,
    *,
    again: Planner | None = None,
) -> Done:
    """Work on the devices of the run's plan. `work` gets an event that ends it, and the claim.

    A run with a higher priority may request the devices: then the work ends, the devices are
    released, and this waits for its next turn. If a replan is requested, or the plan's batches do
    not fit in the devices' memory, the work ends and continues with a new plan. Raises RunHeld if
    the devices are lost, and the errors of `lease`.
    """
    run, ledger, me = context.run, context.ledger, context.holder
    failed: TrainingFailed | None = None
    while True:
        stored = run.read(Plan)
        try:
            plan, token = lease(
                context, stored if failed is None or again is None else again, again=again
            )
        except Infeasible as error:
            if failed is None:
                raise
            raise TrainingFailed(
                f"{failed}; no other plan is feasible: {error}", **failed.details
            ) from error
        failed = None
        names = plan.resources(run.uri)
        with (
            Heartbeat(ledger, run.uri, names, TTL_S, holder=me.name, token=token) as heartbeat,
            Heartbeat(ledger, run.uri, [run.hold], TTL_S, holder=me.name) as hold,
        ):
            claim = Claim(token, (heartbeat, hold))
            if not claim():
                raise RunHeld(f"the lease on the devices was lost before {what} started")
            if plan != stored:
                run.write(plan)
            run.note(state="running", error=None)
            try:
                done = work(AnyOf(context.stop, heartbeat.revoked), claim)
                if not claim():
                    raise claim.lost(f"the lease on the devices was lost during {what}")
                return done
            except RunHeld as error:
                raise claim.lost(str(error)) from error
            except TrainingFailed as error:
                if again is None or "most_batch_sizes" not in error.details:
                    raise
                memory_limits.note(run, plan, error.details["most_batch_sizes"])
                progress.emit("notice", message=f"{error}; planning again with batches that fit")
                failed = error
            except Preempted as error:
                progress.emit("notice", message=f"{error}; waiting for hosts to continue")
            except Interrupted as error:
                if context.stop.is_set() or not heartbeat.revoked.is_set():
                    raise
                claimant = ledger.revoked_by(run.uri)
                if claimant == run.uri:
                    progress.emit("notice", message=f"replan requested; {error}")
                    continue
                note = Interrupted(
                    f"{claimant} has a higher priority and requested the devices; {error}; "
                    "waiting to continue"
                )
                run.note(state="interrupted", error=note.document())
                ledger.release(run.uri, names, holder=me.name, token=token)
                progress.emit("notice", message=str(note))


def look(context: RunContext) -> bool:
    """Keep a waiting run's place and lease. Returns whether the run must act.

    It must act if its turn has come, its pool has changed, its time is up, or its place or lease is
    lost. Reports the place if it has changed.
    """
    run, ledger = context.run, context.ledger
    hold = ledger.renew(run.uri, [run.hold], holder=context.holder.name)
    found = Queue(ledger).keep(run.uri)
    if not hold or found is None:
        return True  # the step then reports the loss, or joins the queue again
    turn, wish = found
    _report(context, turn)
    job = run.job()
    if turn.waited_s >= job.queue_timeout or len(turn.available) >= wish.needed:
        return True
    plan = run.find(Plan)
    if plan is not None and (job.pool is None or not gone(plan, job)):
        return False  # the local machine's devices do not change
    there = usable(load_pool(job.pool), job)
    return wish.wanted != {device.resource_of(run.uri) for device in there}


def leave_queue(context: RunContext) -> None:
    """Stop waiting: leave the queue, and release the run."""
    run = context.run
    Queue(context.ledger).leave(run.uri)
    if context.ledger.release(run.uri, holder=context.holder.name):
        error = Interrupted("stopped while waiting for devices")
        run.note(state="interrupted", step="allocate", error=error.document())


class AnyOf(threading.Event):
    """An event that is set if it, or one of the others, is set."""

    def __init__(self, *others: threading.Event) -> None:
        super().__init__()
        self._others = others

    def is_set(self) -> bool:
        """Whether any of them is set."""
        return super().is_set() or any(one.is_set() for one in self._others)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until any of them is set."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self.is_set():
            left = 0.05 if until is None else until - time.monotonic()
            if left <= 0:
                return False
            super().wait(min(0.05, left))
        return True
