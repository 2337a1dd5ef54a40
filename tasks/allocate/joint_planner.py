"""Several pending jobs on one pool: which devices for each and in which order, for the least energy with every deadline met.

The rule. A job's choices are its configurations, at the global batch of its own plan, that no other beats in time, energy and
devices at once; they accumulate gradients where it can't run alone without that. Jobs hold their devices from start to end, for
the time that they do not exceed at their confidence; when they start is in `schedule`. The joint plan has the least energy of
those that meet all deadlines; ties go to the earlier sum of ends. Where none does, the fewest jobs slip, those of the lowest
priority first, and by little rather than with little energy. Where there are too many choices and orders to try them all, the
plan says `bounded`. A host's window is the one that is open now: what would start in a later one waits for another plan.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from trainwright.tasks.allocate.infeasible import infeasible
from trainwright.tasks.allocate.plan.configuration import (
    EXACT,
    Configuration,
    Found,
    Goal,
    Limits,
    Space,
)
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.plan.placement import Layout, machine_of
from trainwright.tasks.allocate.planner import TRAINED_ACCUMULATION, Planner, make_plan, planned
from trainwright.tasks.allocate.schedule import Choice, Scheduled, beats, fewest_late
from trainwright.tasks.allocate.strategies import best
from trainwright.tasks.errors import BadInput, Infeasible
from trainwright.tasks.runs.artefacts import DataSchema, Estimate, JointPlan, ScheduledJob
from trainwright.tasks.spec.eligibility import usable
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Device, Pool

MOST_JOBS = 32
_MOST_CONFIGURATIONS = 300
_DURATIONS = 6


@dataclass(frozen=True)
class Pending:
    """A job that waits, and what the planner needs to know of it."""

    job: Job
    pool: Pool
    estimate: Estimate
    data: DataSchema


def make_joint_plan(pending: Sequence[Pending], *, now: datetime | None = None) -> JointPlan:
    """The joint plan.

    Raises BadInput for too many jobs, or two of one name, and Infeasible where a job can't run alone, or the hosts' windows end
    before all have run (`binding`: availability; bounded where not all choices were tried).
    """
    started = time.perf_counter()
    check([one.job for one in pending], pending[0].pool)
    every = [_options(one, now) for one in pending]
    room = Counter(_group(device, pending[0].pool) for device in pending[0].pool.devices())
    deadlines = [one.job.objective.deadline or math.inf for one in pending]
    dispensable = sorted(
        range(len(pending)), key=lambda one: (pending[one].job.priority, -deadlines[one], one)
    )
    found, slipping, complete = fewest_late(
        [options for options, _ in every], deadlines, dispensable, room
    )
    exact = complete and all(whole for _, whole in every)
    if (
        found is None
    ):  # every job may be late and wait for the others: only the hosts' windows end that
        raise Infeasible(
            "no feasible plan: no order of the jobs ends within the hosts' windows (available)"
            + ("" if exact else ", among the choices that were tried; there are more"),
            feasible=False,
            binding="availability" if exact else "bounded",
        )
    took_s = time.perf_counter() - started
    late = {
        pending[one].job.name: why for one in slipping if (why := _late_alone(pending[one], now))
    }
    gap = 0.0 if exact else None
    if not exact and all(whole for _, whole in every):
        gap = _gap(found, [options for options, _ in every], deadlines, slipping)
    return _document(pending, found, slipping, late, gap, exact, took_s)


def _gap(
    found: Sequence[Scheduled],
    options: Sequence[Sequence[Choice]],
    deadlines: Sequence[float],
    slipping: Sequence[int],
) -> float:
    """By what share the energy can be less: that of each job alone is never more than its part of a joint plan."""
    least = [
        min(
            one.energy_j
            for one in some
            if number in slipping or one.upper_s <= deadlines[number] * (1 + EXACT)
        )
        for number, some in enumerate(options)
    ]
    return max(0.0, 1 - math.fsum(least) / math.fsum(one.choice.energy_j for one in found))


def check(jobs: Sequence[Job], pool: Pool) -> None:
    """What can be told before anything is traced or predicted. Raises BadInput."""
    names = [job.name for job in jobs]
    if len(jobs) > MOST_JOBS:
        raise BadInput(f"jobs: got {len(jobs)}; allowed: at most {MOST_JOBS} together")
    if len(set(names)) < len(names):
        raise BadInput(f"jobs: got {', '.join(names)}; allowed: a name for each")
    ids = {device.id for device in pool.devices()}
    for job in jobs:
        named = ids & {*job.devices.ids, *job.devices.exclude}
        if named:
            raise BadInput(
                f"devices: got {sorted(named)[0]!r} in {job.name}; allowed for jobs together: types and hosts, no ids"
            )


def _options(pending: Pending, now: datetime | None) -> tuple[list[Choice], bool]:
    """A job's choices. Raises Infeasible, naming the job, where it can't run even with all devices and all the time."""
    try:
        return choices(pending, now)
    except Infeasible as error:
        raise Infeasible(
            f"job {pending.job.name}, even alone: {error}", **error.details, job=pending.job.name
        ) from None


def _late_alone(pending: Pending, now: datetime | None) -> str | None:
    """Why a job misses its deadline even where it has all devices to itself; None where it would not."""
    try:
        make_plan(pending.job, pending.pool, pending.estimate, pending.data, now=now)
    except Infeasible as error:
        return str(error)
    return None


def _group(device: Device, pool: Pool) -> object:
    """What devices share that one can take the place of another."""
    window = next(host.available for host in pool.hosts if host.name == device.host)
    return (machine_of(device), device.variant, window)


def choices(pending: Pending, now: datetime | None) -> tuple[list[Choice], bool]:
    """A job's configurations worth a look, least energy first, and whether that is all of them.

    They have the global batch of the job's own plan: with its deadline where one meets that, else without.
    """
    job = pending.job
    frugal = job.model_copy(
        update={"objective": job.objective.model_copy(update={"minimize": "energy"})}
    )
    model = CostModel(frugal, pending.pool, pending.estimate, pending.data, now)
    planner = Planner(frugal, model, usable(pending.pool, job.devices))
    # One machine's devices are no other's here: another job may hold some of them.
    planner.layout = Layout(model, planner.devices, apart=True)
    endless = Limits(budget=planner.limits.budget)
    chosen = _best(planner, planner.limits) or _best(planner, endless)
    if chosen is None or chosen.best is None:
        raise infeasible(planner)
    planner.limits = endless  # it may have to slip
    request = planner.request(chosen.best.batch, "energy", planner.limits)
    rooms = [group.count for group in planner.layout.groups]
    complete = math.prod(room + 1 for room in rooms) <= _MOST_CONFIGURATIONS
    known: list[Configuration] = [chosen.best]
    if complete:
        space = Space(
            planner.layout, request.batch, request.least, request.most, planner.most_accumulation
        )
        for counts in itertools.product(*(range(room + 1) for room in rooms)):
            known += [
                one
                for accumulation in space.accumulations
                for one in space.configure(counts, accumulation)
            ]
    else:
        known += _between(planner, chosen.best)
    kept: list[Choice] = []
    for one in known:
        if one.excess(Limits(budget=planner.limits.budget)) <= 0:
            held = Counter(_group(device, pending.pool) for device, _ in one.devices())
            kept.append(
                Choice(one, tuple(held.items()), one.cost.upper_duration_s, one.value("energy"))
            )
    kept.sort(
        key=lambda one: (
            one.energy_j,
            one.upper_s,
            one.configuration.size,
            one.configuration.counts,
        )
    )
    worth: list[Choice] = []
    for choice in kept:
        if not any(beats(other, choice) for other in worth):
            worth.append(choice)
    return worth, complete


def _best(planner: Planner, limits: Limits) -> Found | None:
    """The plan of least energy within limits, accumulating where there is none without; the planner keeps how."""
    planner.limits = limits
    for most in (1, TRAINED_ACCUMULATION):
        planner.most_accumulation = most
        chosen, _ = planner.choose("energy", limits)
        if chosen is not None:
            return chosen
    return None


def _between(planner: Planner, frugal: Configuration) -> list[Configuration]:
    """Where there are too many configurations: those of least energy for some durations, and for some numbers of devices."""
    found = []
    request = planner.request(frugal.batch, "time", Limits(budget=planner.limits.budget))
    quickest = best(request).best
    if quickest is not None:
        first, last = (
            quickest.cost.upper_duration_s,
            max(frugal.cost.upper_duration_s, quickest.cost.upper_duration_s),
        )
        for place in range(_DURATIONS):
            limits = Limits(
                first * (last / first) ** (place / _DURATIONS) * (1 + EXACT), planner.limits.budget
            )
            goal: Goal = "energy"
            found.append(best(planner.request(frugal.batch, goal, limits)).best)
    return [one for one in [quickest, *found] if one is not None]


def _document(
    pending: Sequence[Pending],
    found: Sequence[Scheduled],
    slipping: Sequence[int],
    late: dict[str, str],
    gap: float | None,
    exact: bool,
    seconds: float,
) -> JointPlan:
    """The plan with devices by name: those free in each group, in the order of the pool."""
    jobs: list[tuple[float, int, ScheduledJob]] = []
    taken: list[tuple[float, float, str]] = []
    for number in sorted(range(len(found)), key=lambda one: (found[one].start_s, one)):
        one, job, chosen = found[number], pending[number].job, found[number].choice.configuration
        busy = {name for start, end, name in taken if start < one.end_s and one.start_s < end}
        devices = []
        for seat, batch in chosen.devices():
            device = next(
                other
                for other in usable(pending[number].pool, job.devices)
                if _group(other, pending[number].pool) == _group(seat, pending[number].pool)
                and other.id not in busy
            )
            busy.add(device.id)
            taken.append((one.start_s, one.end_s, device.id))
            devices.append(planned(chosen.layout.model, device, batch, chosen.accumulation))
        document = ScheduledJob(
            job=job.name,
            starts_s=one.start_s,
            ends_s=one.end_s,
            deadline_s=job.objective.deadline,
            slips=number in slipping,
            devices=devices,
            global_batch_size=chosen.batch,
            accumulation=chosen.accumulation,
            predicted=chosen.cost.prediction(),
        )
        jobs.append((one.start_s, number, document))
    return JointPlan(
        feasible=not slipping,
        jobs=[document for _, _, document in jobs],
        energy_j=math.fsum(one.choice.energy_j for one in found),
        slips=[pending[number].job.name for number in slipping],
        late_alone=late,
        search="exact" if exact else "bounded",
        gap=gap,
        solve_time_s=seconds,
    )
