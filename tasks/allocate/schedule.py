"""Schedules jobs with least energy within their deadlines. Arithmetic on values.

For one choice of devices for each job and an order of the jobs, each job starts, in that order, at
the earliest time from which its devices stay free for long enough. Over all orders, these
schedules contain one that keeps given limits on the jobs' ends, if any schedule does
(A. Sprecher, R. Kolisch, A. Drexl, "Semi-active, active, and non-delay schedules for the
resource-constrained project scheduling problem", EJOR 80, 1995).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainwright.tasks.allocate.plan.confidence import TOLERANCE
from trainwright.tasks.allocate.plan.configuration import Configuration

_FACTORS = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
"""Factors that stretch the deadlines of late jobs; the first sufficient one applies."""
_QUICK = 5_000
"""Maximum number of placements in a quick search."""


@dataclass(frozen=True)
class ScheduleChoice:
    """One configuration of a job: its devices, its duration and its energy."""

    configuration: Configuration
    holds: tuple[tuple[object, int], ...]
    """Number of devices by group: alike devices of one machine."""
    upper_s: float
    """Duration, not exceeded at the job's confidence."""
    energy_j: float

    def beats(self, other: ScheduleChoice) -> bool:
        """Whether it is at least as good: no more energy, time or devices, and may end as late."""
        held = dict(other.holds)
        return (
            self.energy_j <= other.energy_j
            and self.upper_s <= other.upper_s
            and all(count <= held.get(key, 0) for key, count in self.holds)
            and self.configuration.available_s() >= other.configuration.available_s()
        )


@dataclass(frozen=True)
class Scheduled:
    """A choice and its start."""

    choice: ScheduleChoice
    start_s: float

    @property
    def end_s(self) -> float:
        """When its devices are free again."""
        return self.start_s + self.choice.upper_s


@dataclass
class Effort:
    """The number of placements that a search may still try. At 0, it was not exhaustive."""

    left: int = 50_000

    @property
    def spent(self) -> bool:
        """Whether none are left."""
        return self.left <= 0


def fewest_late(
    options: Sequence[Sequence[ScheduleChoice]],
    deadlines: Sequence[float],
    dispensable: Sequence[int],
    room: Mapping[object, int],
) -> tuple[list[Scheduled] | None, tuple[int, ...], bool]:
    """The schedule of least energy with as few late jobs as possible.

    `options` are each job's choices, `room` the devices by group. `dispensable` lists the jobs that
    may be late, the least important first. Late jobs are late by the lowest sufficient one of
    `_FACTORS`, whatever the energy.

    Returns the schedule, the late jobs, and whether every combination was tried. The schedule is
    None if there is none even without deadlines. If there are too many combinations to try all,
    deadlines are added one by one, the most important first, while a schedule is found.
    """
    effort = Effort()
    limited = [number for number in dispensable if deadlines[number] < math.inf]
    for count in range(len(limited) + 1):
        for late in itertools.combinations(limited, count):
            found = least_energy(options, _stretched(deadlines, late), room, effort)
            if found is not None:
                return _less_late(found, options, deadlines, late, room), late, not effort.spent
            if effort.spent:
                return *_one_by_one(options, deadlines, limited, room), False
    return None, (), True


def _one_by_one(
    options: Sequence[Sequence[ScheduleChoice]],
    deadlines: Sequence[float],
    limited: Sequence[int],
    room: Mapping[object, int],
) -> tuple[list[Scheduled] | None, tuple[int, ...]]:
    """Start with all jobs late, and add the deadlines that can be met, one after another."""
    late = tuple(limited)
    kept = _quickly(options, _stretched(deadlines, late), room)
    for number in reversed(limited):
        fewer = tuple(one for one in late if one != number)
        found = _quickly(options, _stretched(deadlines, fewer), room)
        if found is not None:
            kept, late = found, fewer
    return kept and _less_late(kept, options, deadlines, late, room), late


def _less_late(
    found: list[Scheduled],
    options: Sequence[Sequence[ScheduleChoice]],
    deadlines: Sequence[float],
    late: Sequence[int],
    room: Mapping[object, int],
) -> list[Scheduled]:
    """The same jobs late by the lowest factor that works; `found` if none does."""
    for factor in _FACTORS if late else ():
        less = _quickly(options, _stretched(deadlines, late, factor), room)
        if less is not None:
            return less
    return found


def _quickly(
    options: Sequence[Sequence[ScheduleChoice]],
    deadlines: Sequence[float],
    room: Mapping[object, int],
) -> list[Scheduled] | None:
    """The best schedule that is found quickly, else one of the fastest choices."""
    frugal = least_energy(options, deadlines, room, Effort(_QUICK))
    if frugal is not None:
        return frugal
    fastest = [min(some, key=lambda one: one.upper_s) for some in options]
    return schedule(fastest, deadlines, room, Effort(_QUICK))


def _stretched(
    deadlines: Sequence[float], late: Sequence[int], factor: float = math.inf
) -> list[float]:
    return [
        deadline * (factor if number in late else 1.0) for number, deadline in enumerate(deadlines)
    ]


def least_energy(
    options: Sequence[Sequence[ScheduleChoice]],
    deadlines: Sequence[float],
    room: Mapping[object, int],
    effort: Effort,
) -> list[Scheduled] | None:
    """The schedule of least energy that meets the deadlines.

    None if none exists, or none was found with the effort.
    """
    fitting = [
        [one for one in some if one.upper_s <= until]
        for some, until in zip(options, deadlines, strict=True)
    ]
    if not all(fitting):
        return None
    for combination in _by_energy(fitting):
        if effort.spent:
            return None
        found = schedule(combination, deadlines, room, effort)
        if found is not None:
            return found
    return None


def _by_energy(options: Sequence[Sequence[ScheduleChoice]]) -> Iterator[list[ScheduleChoice]]:
    """Every combination of choices, by increasing energy."""

    def energy(at: tuple[int, ...]) -> float:
        return math.fsum(
            choices[place].energy_j for choices, place in zip(options, at, strict=True)
        )

    first = (0,) * len(options)
    heap, known = [(energy(first), first)], {first}
    while heap:
        _, at = heapq.heappop(heap)
        yield [choices[place] for choices, place in zip(options, at, strict=True)]
        for number, place in enumerate(at):
            following = (*at[:number], place + 1, *at[number + 1 :])
            if place + 1 < len(options[number]) and following not in known:
                known.add(following)
                heapq.heappush(heap, (energy(following), following))


def schedule(
    combination: Sequence[ScheduleChoice],
    deadlines: Sequence[float],
    room: Mapping[object, int],
    effort: Effort,
) -> list[Scheduled] | None:
    """The starts that meet the deadlines with the least sum of ends; None if no order does.

    Depth-first over the orders, the most urgent job first. A branch is cut if a job is already
    late, because it can't end sooner later, or if the sum of ends can't get below the best.
    """
    until = [
        min(limit, one.configuration.available_s()) * (1 + TOLERANCE)
        for one, limit in zip(combination, deadlines, strict=True)
    ]
    urgent = sorted(
        range(len(until)), key=lambda number: (until[number], combination[number].upper_s, number)
    )
    kept: list[Scheduled] | None = None
    least_s = math.inf

    def place(placed: dict[int, Scheduled], ends_s: float) -> None:
        nonlocal kept, least_s
        if len(placed) == len(until):
            kept = [placed[number] for number in range(len(until))]
            least_s = ends_s * (1 - TOLERANCE)
            return
        following: list[tuple[int, Scheduled]] = []
        for number in urgent:
            if number not in placed:
                effort.left -= 1
                start_s = _earliest(combination[number], list(placed.values()), room)
                one = Scheduled(combination[number], start_s)
                if one.end_s > until[number]:
                    return
                following.append((number, one))
        if ends_s + sum(one.end_s for _, one in following) >= least_s:
            return
        for number, one in following:
            if not effort.spent:
                place({**placed, number: one}, ends_s + one.end_s)

    place({}, 0.0)
    return kept


def _earliest(
    choice: ScheduleChoice, placed: Sequence[Scheduled], room: Mapping[object, int]
) -> float:
    """The earliest time from which its devices stay free for its whole duration."""

    def held(key: object, at: float) -> int:
        return sum(
            dict(one.choice.holds).get(key, 0) for one in placed if one.start_s <= at < one.end_s
        )

    def fits(start: float) -> bool:
        # The number of held devices changes only at starts and ends.
        end = start + choice.upper_s
        times = [start, *(one.start_s for one in placed if start < one.start_s < end)]
        return all(
            count + held(key, at) <= room[key] for key, count in choice.holds for at in times
        )

    return next(start for start in sorted({0.0, *(one.end_s for one in placed)}) if fits(start))
