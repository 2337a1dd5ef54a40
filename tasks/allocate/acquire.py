"""How a run comes by its devices: it waits in the queue, plans with what is free when its turn comes, and takes that.

In a process that may wait, `lease` waits, and tells the place in the queue; within `deferring()` it raises MustWait instead, and
whoever called keeps the place (`look`) and calls again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from trainwright.tasks import progress
from trainwright.tasks.errors import (
    BadInput,
    Infeasible,
    Interrupted,
    MustWait,
    RunHeld,
    TrainingFailed,
)
from trainwright.tasks.estimate import memory_limits
from trainwright.tasks.leases.ledger import TTL_S, Heartbeat, Holder
from trainwright.tasks.leases.queue import Queue, Turn
from trainwright.tasks.runs.artefacts import Plan
from trainwright.tasks.runs.run import Run
from trainwright.tasks.spec.eligibility import usable
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Device, load_pool
from trainwright.tasks.step import holder, ledger, stop

LOOK_EVERY_S = 1.0
"""of one whom nobody stands before; the others look less often"""
_LOOKS_AT_MOST_EVERY = 5
_deferring: ContextVar[bool] = ContextVar("deferring", default=False)
Done = TypeVar("Done")
Planner = Callable[[list[Device]], Plan]


@contextlib.contextmanager
def deferring() -> Iterator[None]:
    """Within the block, a run that has to wait is told by MustWait."""
    before = _deferring.set(True)
    try:
        yield
    finally:
        _deferring.reset(before)


def lease(
    run: Run, plan: Plan | Planner, *, again: Planner | None = None, halt: threading.Event = stop
) -> tuple[Plan, int]:
    """Take the devices of a plan, or of the plan that a planner makes of what is free; the plan, and the lease's token.

    `again` plans anew where the pool no longer has the devices of the plan, or where the run was asked to; without it neither is
    looked at.

    Raises Infeasible where no plan meets the limits, whoever holds what; RunHeld after the job's `queue_timeout`; Interrupted;
    MustWait.
    """
    job, me, queue = run.job(), holder(run), Queue(ledger())
    asked_by = ledger().revoked_by(run.uri)
    if asked_by == run.uri:  # it keeps what the new plan has, too
        ledger().heard(run.uri)
        plan = _or_stay(again, plan, job) if again is not None and isinstance(plan, Plan) else plan
    elif asked_by is not None:  # nothing of this run works on them now
        ledger().release(run.uri, devices_of(run), holder=me.name)
    told = 0
    least = job.devices.min_count
    try:
        while True:
            if again is not None and isinstance(plan, Plan) and gone(plan, job):
                plan = again
            devices = [] if isinstance(plan, Plan) else usable(load_pool(job.pool), job.devices)
            wanted = (
                plan.resources
                if isinstance(plan, Plan)
                else [device.resource for device in devices]
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
                chosen = plan if isinstance(plan, Plan) else _plan(plan, devices, turn)
                if chosen is None:
                    least = len(turn.available) + 1
                    continue  # what is free does not do: ask for more
                token = queue.take(run.uri, me, chosen.resources, priority=job.priority)
                if token is not None:
                    if left := devices_of(run) - set(chosen.resources):  # of the plan before
                        ledger().release(run.uri, left, holder=me.name)
                    return chosen, token
            elif not told and not isinstance(plan, Plan):
                plan(devices)  # Infeasible, whoever holds what: that need not wait
            if turn.waited_s >= job.queue_timeout:
                raise _timed_out(job, turn)
            if _deferring.get():
                raise MustWait(
                    f"waits for devices: place {turn.place} of {turn.length}",
                    run=run.uri,
                    holder=me.name,
                )
            if told != turn.place:
                told = turn.place
                progress.emit(
                    "queue", place=turn.place, waiting=turn.length, held_by=_name(turn), run=run.uri
                )
            if (
                halt.wait(
                    min(
                        LOOK_EVERY_S * min(1 + turn.rivals, _LOOKS_AT_MOST_EVERY),
                        max(0.05, job.queue_timeout - turn.waited_s),
                    )
                )
                or halt.is_set()
            ):
                raise Interrupted("stopped while it waited for devices")
    except MustWait:
        raise
    except BaseException:
        queue.leave(run.uri)
        raise


def devices_of(run: Run) -> set[str]:
    """The devices that are leased to a run now, by their names in the ledger."""
    return {one.resource for one in ledger().held("device ") if one.run == run.uri}


def _or_stay(again: Planner, plan: Plan, job: Job) -> Planner:
    """Plans anew; what worked so far goes on by its own plan where no other meets the limits."""

    def chosen(devices: list[Device]) -> Plan:
        try:
            return again(devices)
        except (
            Infeasible,
            BadInput,
        ) as error:  # BadInput: limits that the pool no longer says enough for
            if gone(plan, job):
                raise
            progress.emit("notice", message=f"plan: stays as it was: {error}")
            return plan

    return chosen


def gone(plan: Plan, job: Job) -> list[str]:
    """The ids of the plan's devices that the job's pool no longer has, or that are others by now."""
    there = {device.resource: device.variant for device in usable(load_pool(job.pool), job.devices)}
    return [device.id for device in plan.devices if there.get(device.resource) != device.variant]


def _plan(make: Planner, devices: list[Device], turn: Turn) -> Plan | None:
    """The plan with what is available; None where only what others hold or wait for would do."""
    free = [device for device in devices if device.resource in turn.available]
    try:
        return make(free)
    except Infeasible:
        if len(free) == len(devices):
            raise
        make(devices)  # raises where even all of them would not do
        return None


def _name(turn: Turn) -> str | None:
    return turn.blocked_by.holder if turn.blocked_by else None


def _timed_out(job: Job, turn: Turn) -> RunHeld:
    lease = turn.blocked_by
    why = (
        f"{lease.resource} is held by {lease.holder} for {lease.run}"
        if lease
        else "others are ahead in the queue"
    )
    return RunHeld(
        f"devices: none in the {job.queue_timeout:g} s of queue_timeout; place {turn.place} of {turn.length}; {why}",
        place=turn.place,
        waiting=turn.length,
        waited_s=round(turn.waited_s, 1),
        holder=lease.holder if lease else None,
        run=lease.run if lease else None,
    )


@dataclass(frozen=True)
class Claim:
    """A lease on devices: call it to ask whether they are still the run's; `token` fences what is written in its name."""

    token: int
    beats: tuple[Heartbeat, ...]

    def __call__(self) -> bool:
        """Whether the devices and the run are still ours, as far as anybody can say."""
        return all(beat.mine() for beat in self.beats)


def on_devices(
    run: Run,
    work: Callable[[threading.Event, Claim], Done],
    what: str,
    *,
    again: Planner | None = None,
) -> Done:
    """Work on the devices of the run's plan: with an event that ends it, and the claim to them.

    A run of a higher priority may ask for them: the work is ended, the devices are given back, and this waits for its turn to
    go on. Where the run was asked to plan anew, the work is ended and goes on by the new plan; so it does where it failed since
    the devices do not hold the plan's batches. Raises RunHeld where the devices were lost, and what `lease` raises.
    """
    me, failed = holder(run), None
    while True:
        stored = run.read(Plan)
        try:
            plan, token = lease(
                run, stored if failed is None or again is None else again, again=again
            )
        except Infeasible as error:
            if failed is None:
                raise
            raise TrainingFailed(
                f"{failed}; planned anew, there is {error}", **failed.details
            ) from error
        failed = None
        names = plan.resources
        with (
            Heartbeat(ledger(), run.uri, names, TTL_S, holder=me.name, token=token) as beat,
            Heartbeat(ledger(), run.uri, [run.hold], TTL_S, holder=me.name) as hold,
        ):
            claim = Claim(token, (beat, hold))
            if not claim():
                raise RunHeld(f"the lease on the devices was lost before {what}")
            if plan != stored:
                run.write(plan)
            run.note(state="running", error=None)
            try:
                done = work(Either(stop, beat.revoked), claim)
                if not claim():
                    raise RunHeld(f"the lease on the devices was lost while {what}")
                return done
            except TrainingFailed as error:
                if again is None or "most_batch_sizes" not in error.details:
                    raise
                memory_limits.note(run, plan, error.details["most_batch_sizes"])
                progress.emit("notice", message=f"{error}; planned anew with what fits")
                failed = error
            except Interrupted as error:
                if stop.is_set() or not beat.revoked.is_set():
                    raise
                claimant = ledger().revoked_by(run.uri)
                if claimant == run.uri:
                    progress.emit("notice", message=f"asked to plan anew; {error}")
                    continue
                note = Interrupted(
                    f"{claimant} has a higher priority and asked for the devices; {error}; waits to go on"
                )
                run.note(state="interrupted", error=note.document())
                ledger().release(run.uri, names, holder=me.name, token=token)
                progress.emit("notice", message=str(note))


def look(run: Run, owner: str) -> bool:
    """Keep a waiting run's place and its hold; whether it has something to do: its turn, a changed pool, its time is up."""
    hold = ledger().renew(run.uri, [run.hold], holder=owner)
    found = Queue(ledger()).keep(run.uri)
    if not hold or found is None:
        return True  # somebody else's by now, or dropped: the step says so, or joins again
    turn, wish = found
    job = run.job()
    if turn.waited_s >= job.queue_timeout or len(turn.available) >= wish.needed:
        return True
    plan = run.find(Plan)
    if plan is not None and (
        job.pool is None or not gone(plan, job)
    ):  # this machine itself does not change
        return False
    return wish.wanted != {one.resource for one in usable(load_pool(job.pool), job.devices)}


def give_up(run: Run, owner: Holder) -> None:
    """A waiting run is not wanted any more: leave the queue, end its hold."""
    Queue(ledger()).leave(run.uri)
    if ledger().release(run.uri, holder=owner.name):
        error = Interrupted("stopped while it waited for devices")
        run.note(state="interrupted", step="allocate", error=error.document())


class Either(threading.Event):
    """Set when it is set itself, or one of the others is."""

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
