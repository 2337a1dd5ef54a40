"""Plans several pending jobs on one pool: least energy with every deadline met.

A job's choices are those of its configurations, at the global batch of its own plan, that no other
beats in time, energy and devices at once. They accumulate gradients only if the job can't run
without. A job holds its devices from start to end, for its duration at its confidence; `schedule`
decides when each job starts. Among the joint plans that meet all deadlines, the one with the least
energy wins; ties go to the least sum of ends. If none meets all deadlines, as few jobs as possible
are late, those of the lowest priority first, and by as little as possible before energy counts. If
there are too many choices and orders to try all, the plan says `bounded`. Only the hosts' windows
that are open now count: a job that would start in a later window waits for another plan.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from trainwright.tasks.allocate.batch_choice import choose_batch
from trainwright.tasks.allocate.infeasible.binding_limits import infeasible
from trainwright.tasks.allocate.plan.confidence import TOLERANCE
from trainwright.tasks.allocate.plan.configuration import Configuration, Goal, Limits
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.plan.topology import machine_of
from trainwright.tasks.allocate.planner import make_plan, planned
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.allocate.schedule import ScheduleChoice, Scheduled, fewest_late
from trainwright.tasks.allocate.strategies import best
from trainwright.tasks.errors import BadInput, Infeasible
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import JointPlan, PlannedDevice, ScheduledJob
from trainwright.tasks.spec.eligibility import usable
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Device, Pool

MOST_JOBS = 32
_MAX_CONFIGURATIONS = 300
_DURATIONS = 6


@dataclass(frozen=True)
class Pending:
    """A pending job, with the planner's inputs."""

    job: Job
    pool: Pool
    estimate: Estimate
    data: DataSchema


def make_joint_plan(pending: Sequence[Pending], *, now: datetime | None = None) -> JointPlan:
    """The joint plan of jobs on one pool; `now` is its start, for the hosts' windows.

    Raises BadInput if there are too many jobs or two have the same name. Raises Infeasible if a
    job can't run even alone, or if the hosts' windows end before all jobs have run (`binding`:
    `availability`; or `bounded`, if not all choices were tried).
    """
    started = time.perf_counter()
    check([one.job for one in pending], pending[0].pool)
    every = [_choices_or_why(one, now) for one in pending]
    options, whole = [some for some, _ in every], all(complete for _, complete in every)
    room = Counter(_group(device, pending[0].pool) for device in pending[0].pool.devices())
    deadlines = [one.job.objective.deadline or math.inf for one in pending]
    dispensable = sorted(
        range(len(pending)), key=lambda one: (pending[one].job.priority, -deadlines[one], one)
    )
    found, late, exhaustive = fewest_late(options, deadlines, dispensable, room)
    exact = exhaustive and whole
    if found is None:  # any job may be late, so only the hosts' windows can prevent a plan
        raise Infeasible(
            "no feasible plan: no order of the jobs ends within the hosts' windows (available)"
            + ("" if exact else ", among the choices that were tried; there are more"),
            feasible=False,
            binding="availability" if exact else "bounded",
        )
    took_s = time.perf_counter() - started
    late_alone = {
        pending[one].job.name: why for one in late if (why := _late_alone(pending[one], now))
    }
    gap = 0.0 if exact else _gap(found, options, deadlines, late) if whole else None
    return JointPlan(
        feasible=not late,
        jobs=_jobs(pending, found, late),
        energy_j=math.fsum(one.choice.energy_j for one in found),
        slips=[pending[number].job.name for number in late],
        late_alone=late_alone,
        search="exact" if exact else "bounded",
        gap=gap,
        solve_time_s=took_s,
    )


def _gap(
    found: Sequence[Scheduled],
    options: Sequence[Sequence[ScheduleChoice]],
    deadlines: Sequence[float],
    late: Sequence[int],
) -> float:
    """The share by which energy could fall: alone, no job needs more than in a joint plan."""
    least = [
        min(
            one.energy_j
            for one in some
            if number in late or one.upper_s <= deadlines[number] * (1 + TOLERANCE)
        )
        for number, some in enumerate(options)
    ]
    return max(0.0, 1 - math.fsum(least) / math.fsum(one.choice.energy_j for one in found))


def check(jobs: Sequence[Job], pool: Pool) -> None:
    """Check all that needs no trace and no prediction. Raises BadInput."""
    names = [job.name for job in jobs]
    if len(jobs) > MOST_JOBS:
        raise BadInput(f"jobs: got {len(jobs)}; allowed: at most {MOST_JOBS} together")
    if len(set(names)) < len(names):
        raise BadInput(f"jobs: got {', '.join(names)}; allowed: different names")
    ids = {device.id for device in pool.devices()}
    for job in jobs:
        named = ids & {*job.devices.ids, *job.devices.exclude}
        if named:
            raise BadInput(
                f"devices: got {sorted(named)[0]!r} in {job.name}; "
                "when planning several jobs, restrict devices by type or host, not by id"
            )


def _choices_or_why(pending: Pending, now: datetime | None) -> tuple[list[ScheduleChoice], bool]:
    """`choices`; raises Infeasible naming the job if it can't run even alone."""
    try:
        return choices(pending, now)
    except Infeasible as error:
        raise Infeasible(
            f"job {pending.job.name}, even alone: {error}", **error.details, job=pending.job.name
        ) from None


def _late_alone(pending: Pending, now: datetime | None) -> str | None:
    """Why a job misses its deadline even with all devices to itself; None if it does not."""
    try:
        make_plan(pending.job, pending.pool, pending.estimate, pending.data, now=now)
    except Infeasible as error:
        return str(error)
    return None


def _group(device: Device, pool: Pool) -> object:
    """The key that interchangeable devices share."""
    window = next(host.available for host in pool.hosts if host.name == device.host)
    return (machine_of(device), device.variant, window)


def choices(pending: Pending, now: datetime | None) -> tuple[list[ScheduleChoice], bool]:
    """A job's choices, by increasing energy, and whether the list is complete.

    They have the global batch of the job's own plan: made with its deadline if a configuration
    meets that, else without.
    """
    objective = pending.job.objective.model_copy(update={"minimize": "energy"})
    job = pending.job.model_copy(update={"objective": objective})
    model = CostModel(job, pending.pool, pending.estimate, pending.data, now)
    # No two machines count as alike: another job may hold devices of one of them.
    problem = PlanningProblem.of(job, model, usable(pending.pool, pending.job), apart=True)
    endless = Limits(budget=problem.limits.budget)
    result, _ = choose_batch(problem)
    if result is None:
        result, _ = choose_batch(replace(problem, limits=endless))
    if result is None or result.best is None:
        raise infeasible(problem)
    problem = replace(problem, limits=endless)  # the job may have to be late
    found, complete = _configurations(problem, result.best)
    kept = []
    for one in found:
        if one.excess(endless) <= 0:
            held = Counter(_group(device, pending.pool) for device, _ in one.devices())
            holds = tuple(held.items())
            kept.append(ScheduleChoice(one, holds, one.cost.upper_duration_s, one.value("energy")))
    kept.sort(
        key=lambda one: (
            one.energy_j,
            one.upper_s,
            one.configuration.size,
            one.configuration.counts,
        )
    )
    worth: list[ScheduleChoice] = []
    for choice in kept:
        if not any(other.beats(choice) for other in worth):
            worth.append(choice)
    return worth, complete


def _configurations(
    problem: PlanningProblem, frugal: Configuration
) -> tuple[list[Configuration], bool]:
    """The configurations, and whether the list is complete; `frugal` has the least energy."""
    rooms = [group.count for group in problem.topology.groups]
    space = problem.request(frugal.batch).space()
    accumulations = [one for low, high in space.accumulations for one in range(low, high + 1)]
    if math.prod(room + 1 for room in rooms) * len(accumulations) > _MAX_CONFIGURATIONS:
        return [frugal, *_between(problem, frugal)], False
    goals: tuple[Goal, ...] = ("energy", "upper_time")
    every = [
        one.configuration
        for counts in itertools.product(*(range(room + 1) for room in rooms))
        for accumulation in accumulations
        for goal in goals
        for one in space.configure(counts, accumulation, goal, problem.limits)
    ]
    return [frugal, *every], True


def _between(problem: PlanningProblem, frugal: Configuration) -> list[Configuration]:
    """The fastest configuration, and the most economical ones for some longer durations."""
    budget = problem.limits.budget
    fastest = best(problem.request(frugal.batch, "time")).best
    if fastest is None:
        return []
    first = fastest.cost.upper_duration_s
    last = max(frugal.cost.upper_duration_s, first)
    found: list[Configuration | None] = [fastest]
    for place in range(_DURATIONS):
        deadline_s = first * (last / first) ** (place / _DURATIONS) * (1 + TOLERANCE)
        request = problem.request(frugal.batch, "energy", Limits(deadline_s, budget))
        found.append(best(request).best)
    return [one for one in found if one is not None]


def _jobs(
    pending: Sequence[Pending], found: Sequence[Scheduled], late: Sequence[int]
) -> list[ScheduledJob]:
    """The jobs by start, each with its devices: in each group the first free ones."""
    jobs: list[ScheduledJob] = []
    taken: list[tuple[float, float, str]] = []
    for number in sorted(range(len(found)), key=lambda one: (found[one].start_s, one)):
        one, given, chosen = found[number], pending[number], found[number].choice.configuration
        busy = {name for start, end, name in taken if start < one.end_s and one.start_s < end}
        devices: list[PlannedDevice] = []
        for seat, batch in chosen.devices():
            device = next(
                other
                for other in usable(given.pool, given.job)
                if _group(other, given.pool) == _group(seat, given.pool) and other.id not in busy
            )
            busy.add(device.id)
            taken.append((one.start_s, one.end_s, device.id))
            devices.append(planned(chosen.topology.model, device, batch, chosen.accumulation))
        jobs.append(
            ScheduledJob(
                job=given.job.name,
                starts_s=one.start_s,
                ends_s=one.end_s,
                deadline_s=given.job.objective.deadline,
                slips=number in late,
                devices=devices,
                global_batch_size=chosen.batch,
                accumulation=chosen.accumulation,
                predicted=chosen.cost.prediction(),
            )
        )
    return jobs
