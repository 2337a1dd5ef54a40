"""When jobs run whose configurations are chosen: the schedule of least energy that meets their deadlines. Arithmetic on values.

For a choice for each job and an order of the jobs, each starts, in that order, at the earliest time at which its devices stay
free for long enough; for limits on ends these schedules, over all orders, contain one that keeps them if any schedule does
(A. Sprecher, R. Kolisch, A. Drexl, "Semi-active, active, and non-delay schedules", EJOR 80, 1995).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainwright.tasks.allocate.plan.configuration import EXACT, Configuration

_FACTORS = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)
"""Of the deadlines of jobs that can't be in time."""


@dataclass(frozen=True)
class Choice:
    """One configuration of a job: what it holds of each group of devices, for how long, at what energy."""

    configuration: Configuration
    holds: tuple[tuple[object, int], ...]
    """By machine and kind of device: how many."""
    upper_s: float
    energy_j: float


@dataclass(frozen=True)
class Scheduled:
    """A choice with its start."""

    choice: Choice
    start_s: float

    @property
    def end_s(self) -> float:
        """When its devices are free again."""
        return self.start_s + self.choice.upper_s


@dataclass
class Effort:
    """How many placements may still be tried; a search that has spent them was not to the end."""

    left: int = 50_000

    @property
    def spent(self) -> bool:
        """Whether none are left."""
        return self.left <= 0


def fewest_late(
    options: Sequence[Sequence[Choice]],
    deadlines: Sequence[float],
    dispensable: Sequence[int],
    room: Mapping[object, int],
) -> tuple[list[Scheduled] | None, tuple[int, ...], bool]:
    """The schedule of least energy with as few jobs as possible late, which they are, and whether all was tried.

    `dispensable` are the jobs from the one that is to be late first to the one that is last. Those that are late are so by the
    least of `_FACTORS` that is enough, whatever the energy. None where not even deadlines stand in the way. Where not all can be
    tried, deadlines are kept one by one, the most important first, while they can be.
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
    options: Sequence[Sequence[Choice]],
    deadlines: Sequence[float],
    limited: Sequence[int],
    room: Mapping[object, int],
) -> tuple[list[Scheduled] | None, tuple[int, ...]]:
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
    options: Sequence[Sequence[Choice]],
    deadlines: Sequence[float],
    late: Sequence[int],
    room: Mapping[object, int],
) -> list[Scheduled]:
    """The same jobs late by the least of a few factors of their deadlines; what was found where none is enough."""
    for factor in _FACTORS if late else ():
        less = _quickly(options, _stretched(deadlines, late, factor), room)
        if less is not None:
            return less
    return found


def _quickly(
    options: Sequence[Sequence[Choice]], deadlines: Sequence[float], room: Mapping[object, int]
) -> list[Scheduled] | None:
    """The first schedule found of little energy, else of the quickest choices."""
    frugal = least_energy(options, deadlines, room, Effort(5_000))
    if frugal is not None:
        return frugal
    return schedule(
        [min(some, key=lambda one: one.upper_s) for some in options], deadlines, room, Effort(5_000)
    )


def _stretched(
    deadlines: Sequence[float], late: Sequence[int], factor: float = math.inf
) -> list[float]:
    return [
        deadline * (factor if number in late else 1.0) for number, deadline in enumerate(deadlines)
    ]


def least_energy(
    options: Sequence[Sequence[Choice]],
    deadlines: Sequence[float],
    room: Mapping[object, int],
    effort: Effort,
) -> list[Scheduled] | None:
    """The schedule of least energy that meets the deadlines. None: none does, or none was found before the effort was spent."""
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


def _by_energy(options: Sequence[Sequence[Choice]]) -> Iterator[list[Choice]]:
    """Every combination, least energy first."""

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
    combination: Sequence[Choice],
    deadlines: Sequence[float],
    room: Mapping[object, int],
    effort: Effort,
) -> list[Scheduled] | None:
    """The starts that meet the deadlines with the least sum of ends, over the orders that can have it. None: no order does."""
    until = [
        min(limit, one.configuration.available_s()) * (1 + EXACT)
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
            kept, least_s = [placed[number] for number in range(len(until))], ends_s * (1 - EXACT)
            return
        following: list[tuple[int, Scheduled]] = []
        for number in urgent:
            if number not in placed:
                effort.left -= 1
                one = Scheduled(
                    combination[number], _earliest(combination[number], list(placed.values()), room)
                )
                if one.end_s > until[number]:
                    return  # with more jobs before it, it would not end sooner
                following.append((number, one))
        if ends_s + sum(one.end_s for _, one in following) >= least_s:
            return
        for number, one in following:
            if not effort.spent:
                place({**placed, number: one}, ends_s + one.end_s)

    place({}, 0.0)
    return kept


def _earliest(choice: Choice, placed: Sequence[Scheduled], room: Mapping[object, int]) -> float:
    """The first time from which its devices stay free for as long as it takes."""

    def fits(start: float) -> bool:
        end = start + choice.upper_s
        # What others hold changes only at their starts and ends.
        times = [start, *(one.start_s for one in placed if start < one.start_s < end)]
        return all(
            count
            + sum(
                dict(one.choice.holds).get(key, 0)
                for one in placed
                if one.start_s <= at < one.end_s
            )
            <= room[key]
            for key, count in choice.holds
            for at in times
        )

    return next(start for start in sorted({0.0, *(one.end_s for one in placed)}) if fits(start))


def beats(one: Choice, other: Choice) -> bool:
    """Whether a choice is no dearer, no longer, and holds no device more."""
    held = dict(other.holds)
    return (
        one.energy_j <= other.energy_j
        and one.upper_s <= other.upper_s
        and all(count <= held.get(key, 0) for key, count in one.holds)
        and one.configuration.available_s() >= other.configuration.available_s()
    )
