"""Divides a chain of units among unlike devices: cuts, devices and their order.

`suffix_table` finds, for every number of devices of each kind, the division with the least bound;
of these the simulated steps are compared (`pass_times`). From the best ones, cuts are moved and
devices exchanged while that makes the simulated step shorter. The least bound of the table is below
the step of every division, so that the result's gap is known.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from trainwright.tasks.allocate.pipelines.ordered_cuts import with_cuts
from trainwright.tasks.allocate.pipelines.pass_times import Division, step_seconds
from trainwright.tasks.allocate.pipelines.stage_chain import StageChain
from trainwright.tasks.allocate.pipelines.suffix_table import Kinds, SuffixTable
from trainwright.tasks.runs.artefacts.layout import StageSchedule

MOST_WORK = 2e7
_SIMULATED = 1000
_ALL_ORDERS = 400
"""Up to so many orders of devices are all tried."""
_TOGETHER = 96
"""stages of all divisions whose cuts are moved at once"""
_LEADING = 3
"""orders of devices that are exchanged until nothing better is found"""
_ROUNDS = 30
_FAR = 6
"""by how many units a cut moves at most"""


@dataclass(frozen=True)
class Partition:
    """A division with its simulated step."""

    division: Division
    schedule: StageSchedule
    step_s: float
    bound_s: float
    """no division has a shorter step with this schedule"""

    @property
    def gap(self) -> float:
        """By what share a shorter step may exist."""
        return max(0.0, 1 - self.bound_s / self.step_s) if self.step_s > 0 else 0.0


def partition(
    chain: StageChain,
    schedule: StageSchedule,
    *,
    stages: int | None = None,
    most_stages: int | None = None,
    most_work: float = MOST_WORK,
) -> Partition | None:
    """The division with the shortest step that was found; None if none fits into memory.

    `stages` is their number; None: any number up to `most_stages`. `most_work` bounds the cells of
    the table's matrices: with fewer, devices of about the same speed count as alike.
    """
    most = min(stages or most_stages or chain.devices, chain.devices, chain.units)
    kinds, exact = _kinds(chain, most, most_work)
    fastest = _fastest(chain, kinds)
    numbers: list[int | None] = [stages]
    if stages is None and schedule == "zero-bubble" and _memory_binds(chain, most):
        numbers = list(range(1, most + 1))  # the memory of a stage depends on it
    tried, bounds = _Tried(chain, schedule), list[float]()
    for number in numbers:
        table = SuffixTable(fastest, kinds, schedule, most, number)
        starts = table.starts()
        bounds += [one[0] for one in starts[:1]]
        for _, counts, first in starts[:_SIMULATED]:
            tried.add(_with_devices(kinds, *table.kinds_and_cuts(counts, first)))
    if not bounds and exact:
        return None
    tried.simulate()
    tried.add_orders(_all_orders(chain, most, stages))
    _improve(tried, fixed=stages is not None)
    found = tried.best(1)
    if not found:
        return None
    bound_s = min(bounds, default=0.0)
    return Partition(found[0], schedule, tried.seconds(found[0]), bound_s)


def _memory_binds(chain: StageChain, stages: int) -> bool:
    """Whether some device could not hold the whole chain."""
    flight = min(chain.micro_batches, stages)
    need = float(chain.state_bytes.sum() + flight * chain.kept_bytes.sum())
    return need > float(chain.room_bytes.min())


class _Tried:
    """Divisions with their simulated steps."""

    def __init__(self, chain: StageChain, schedule: StageSchedule) -> None:
        self.chain, self._schedule = chain, schedule
        self._seconds: dict[Division, float] = {}
        self._best: dict[tuple[int, ...], tuple[float, tuple[int, ...]]] = {}
        """by order of devices: the least seconds and the cuts"""
        self._waiting: dict[Division, None] = {}
        self._orders: set[tuple[int, ...]] = set()

    def add(self, division: Division) -> None:
        """Simulate this division with the next ones."""
        if division not in self._seconds:
            self._waiting[division] = None

    def add_orders(self, orders: Iterable[tuple[int, ...]]) -> None:
        """Simulate these orders of devices with their best cuts."""
        by_stages: dict[int, list[tuple[int, ...]]] = {}
        for one in orders:
            if one not in self._orders:
                self._orders.add(one)
                by_stages.setdefault(len(one), []).append(one)
        for some in by_stages.values():
            for division in with_cuts(self.chain, self._schedule, some):
                self.add(division)
        self.simulate()

    def simulate(self) -> None:
        """Simulate all that were added."""
        by_stages: dict[int, list[Division]] = {}
        for one in self._waiting:
            by_stages.setdefault(one.stages, []).append(one)
        for some in by_stages.values():
            seconds = step_seconds(self.chain, self._schedule, some).tolist()
            self._seconds.update(zip(some, seconds, strict=True))
            for one, step_s in zip(some, seconds, strict=True):
                if step_s < self._best.get(one.devices, (math.inf,))[0]:
                    self._best[one.devices] = step_s, one.cuts
        self._waiting = {}

    def seconds(self, division: Division) -> float:
        """The step of a division that was simulated."""
        return self._seconds[division]

    def best(self, count: int) -> list[Division]:
        """The best division of each order of devices, for the best orders that fit."""
        ranked = heapq.nsmallest(count, self._best.items(), key=lambda pair: pair[1][0])
        return [Division(devices, cuts) for devices, (_, cuts) in ranked]


def _kinds(chain: StageChain, most: int, most_work: float) -> tuple[Kinds, bool]:
    """Kinds of alike devices, and whether no unlike ones are joined.

    Kinds of about the same speed are joined while the table would be too large.
    """
    members: dict[int, list[int]] = {}
    for device, kind in enumerate(chain.alike):
        members.setdefault(kind, []).append(device)
    speed = chain.mean_seconds.sum(axis=1)
    groups = sorted(members.values(), key=lambda own: float(speed[own].mean()))
    joined = False
    while len(groups) > 1 and _work(groups, chain.units, most) > most_work:
        ratios = [
            float(speed[two].mean() / max(1e-30, speed[one].mean())) * (len(one) + len(two))
            for one, two in itertools.pairwise(groups)
        ]
        place = ratios.index(min(ratios))
        groups[place : place + 2] = [groups[place] + groups[place + 1]]
        joined = True
    groups = [sorted(own, key=lambda device: float(speed[device])) for own in groups]
    counts = tuple(min(len(own), most) for own in groups)
    return Kinds(tuple(own[0] for own in groups), counts, tuple(map(tuple, groups))), not joined


def _work(groups: Sequence[Sequence[int]], units: int, most: int) -> float:
    states = 1.0
    for own in groups:
        states *= min(len(own), most) + 1
    return states * len(groups) * units * (units + 1)


def _fastest(chain: StageChain, kinds: Kinds) -> StageChain:
    """The chain in which the device that stands for a kind is as good as its best ones."""
    if all(len({chain.alike[one] for one in own}) == 1 for own in kinds.members):
        return _with_own_links(chain, kinds)
    parts = {}
    for name in ("forward", "input_gradient", "weight_gradient"):
        values = getattr(chain, name).copy()
        for shown, own in zip(kinds.shown, kinds.members, strict=True):
            values[:, shown] = values[:, list(own)].min(axis=1)
        parts[name] = values
    room = chain.room_bytes.copy()
    for shown, own in zip(kinds.shown, kinds.members, strict=True):
        room[shown] = chain.room_bytes[list(own)].max()
    least = chain.own.least(kinds.shown, kinds.members)
    found = replace(chain, room_bytes=room, own=least, **parts)
    return _with_own_links(found, kinds)


def _with_own_links(chain: StageChain, kinds: Kinds) -> StageChain:
    """The fastest link between any two devices of two kinds, a kind's own among them."""
    import numpy as np

    links = []
    for given in (chain.latency_s, chain.s_per_byte):
        apart = given + np.where(np.eye(chain.devices) > 0, np.inf, 0.0)
        values = given.copy()
        for one, mine in zip(kinds.shown, kinds.members, strict=True):
            for other, theirs in zip(kinds.shown, kinds.members, strict=True):
                least = float(apart[np.ix_(mine, theirs)].min())
                values[one, other] = 0.0 if np.isinf(least) else least
        links.append(values)
    return chain.with_links(*links)


def _with_devices(kinds: Kinds, order: Sequence[int], cuts: Sequence[int]) -> Division:
    """Devices for the kinds of the stages: the first ones of each kind, in their order."""
    free = [iter(own) for own in kinds.members]
    return Division(tuple(next(free[kind]) for kind in order), tuple(cuts))


def _all_orders(chain: StageChain, most: int, stages: int | None) -> list[tuple[int, ...]]:
    """All orders of devices that differ; none if they are too many."""
    found: list[tuple[int, ...]] = [()]
    longest = [()] if stages is None else list[tuple[int, ...]]()
    for count in range(1, (stages or most) + 1):
        longer = []
        for order in found:
            free = {chain.alike[one]: one for one in range(chain.devices) if one not in order}
            longer += [(*order, one) for one in free.values()]
        if len(longest) + len(longer) > _ALL_ORDERS:
            return []
        found = longer
        if stages in (None, count):
            longest += longer
    return [one for one in longest if one]


def _improve(tried: _Tried, *, fixed: bool) -> None:
    """Move the cuts of the best orders, and exchange their devices, until none of them is new."""
    moved, exchanged = set[tuple[int, ...]](), set[tuple[int, ...]]()
    for _ in range(_ROUNDS):
        most = max((one.stages for one in tried.best(1)), default=1)
        best = tried.best(max(_LEADING, _TOGETHER // most))
        _move_cuts(tried, [one for one in best if one.devices not in moved])
        moved |= {one.devices for one in best}
        leading = [one.devices for one in tried.best(_LEADING)]
        left = [one for one in leading if one not in exchanged]
        if not left:
            return
        exchanged.add(left[0])
        tried.add_orders(_other_orders(tried.chain, left[0], fixed=fixed))


def _move_cuts(tried: _Tried, divisions: Sequence[Division]) -> None:
    """Move cuts of these divisions while that makes their steps shorter."""
    active = list(divisions)
    for _ in range(_ROUNDS):
        near = {one: [*_near(one, tried.chain.units)] for one in active}
        for some in near.values():
            for other in some:
                tried.add(other)
        tried.simulate()
        better = []
        for one, some in near.items():
            best = min(some, key=tried.seconds, default=one)
            if tried.seconds(best) < tried.seconds(one) * (1 - 1e-9):
                better.append(best)
        if not better:
            return
        active = better


def _near(division: Division, units: int) -> Iterable[Division]:
    return (Division(division.devices, cuts) for cuts in _moved(division.cuts, units))


def _other_orders(
    chain: StageChain, devices: tuple[int, ...], *, fixed: bool
) -> Iterable[tuple[int, ...]]:
    """Orders with two devices exchanged, another device, one less, or one more."""
    kinds = [chain.alike[one] for one in devices]
    for one, other in itertools.combinations(range(len(devices)), 2):
        if kinds[one] != kinds[other]:
            exchanged = list(devices)
            exchanged[one], exchanged[other] = devices[other], devices[one]
            yield tuple(exchanged)
    spare = {chain.alike[one]: one for one in range(chain.devices) if one not in devices}
    for place, kind in itertools.product(range(len(devices)), spare):
        if kind != kinds[place]:
            yield (*devices[:place], spare[kind], *devices[place + 1 :])
    if fixed:
        return
    if len(devices) > 1:
        for place in range(len(devices)):
            yield (*devices[:place], *devices[place + 1 :])
    if len(devices) < chain.units:
        for place, kind in itertools.product(range(len(devices) + 1), spare):
            yield (*devices[:place], spare[kind], *devices[place:])


def _moved(cuts: tuple[int, ...], units: int) -> Iterable[tuple[int, ...]]:
    """The cuts with one, or two of them, moved."""
    ends = [0, *cuts, units]
    for place in range(len(cuts)):
        low, high = ends[place] + 1, ends[place + 2]
        for cut in range(max(low, cuts[place] - _FAR), min(high, cuts[place] + _FAR + 1)):
            if cut != cuts[place]:
                yield (*cuts[:place], cut, *cuts[place + 1 :])
    for place, other in itertools.combinations(range(len(cuts)), 2):
        for step, back in itertools.product((-1, 1), (-1, 1)):
            moved = list(cuts)
            moved[place] += step
            moved[other] += back
            ends = [0, *moved, units]
            if all(one < two for one, two in itertools.pairwise(ends)):
                yield tuple(moved)
