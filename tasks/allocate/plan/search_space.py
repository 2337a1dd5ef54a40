"""The configurations that a topology allows for one global batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from trainwright.tasks.allocate.plan.cheapest_split import (
    CheapestSplit,
    RankKind,
    Split,
    ValueFunction,
    cheapest_split,
)
from trainwright.tasks.allocate.plan.confidence import TOLERANCE
from trainwright.tasks.allocate.plan.configuration import (
    Configuration,
    Goal,
    Limits,
    is_upper,
    value_of,
)
from trainwright.tasks.allocate.plan.cost import START_S, CollectiveTime, CostModel, Quantiles
from trainwright.tasks.allocate.plan.kinds import (
    Kind,
    Share,
    largest_batch,
    median_times,
    micro_batch_times,
)
from trainwright.tasks.allocate.plan.placement import Placement, placements, sharing_memory
from trainwright.tasks.allocate.plan.topology import Topology

MicroBatchRange = tuple[int, int]
"""The least and the most micro-batches of a step."""


@dataclass(frozen=True, eq=False)
class Times:
    """Seconds that a rank of one kind takes for 1, 2, … samples, as many as memory holds.

    Straight lines between the knots; for an interval of micro-batches, a lower bound.
    """

    seconds: Any
    knots: list[int]


class Configured(NamedTuple):
    """A configuration, and a lower bound of the goal over all splits of the same ranks.

    The bound covers the splits within the limits; infinite: there are none.
    """

    configuration: Configuration
    bound: float


class _Placed(NamedTuple):
    """A placement of some ranks, its collectives, and by kind how many ranks share a memory."""

    placement: Placement
    collectives: CollectiveTime
    sharing: Mapping[int, int]

    def as_good_as(self, other: _Placed, z: float) -> bool:
        """Whether no quantity is worse than in another placement of the same ranks."""
        mine, theirs = self.collectives, other.collectives
        return all(
            one.at(at) <= two.at(at)
            for at in (0.0, z, -1.0, 1.0)
            for one, two in ((mine.total, theirs.total), (mine.tail, theirs.tail))
        ) and all(ranks <= other.sharing.get(kind, 0) for kind, ranks in self.sharing.items())


class SearchSpace:
    """All numbers of ranks, splits of the batch, and numbers of micro-batches.

    Ranks are between `min_ranks` and `max_ranks`, micro-batches at most `max_accumulation`. More
    micro-batches only take longer, so those beyond what any device's memory needs are left out.
    """

    def __init__(
        self,
        topology: Topology,
        batch: int,
        min_ranks: int,
        max_ranks: int,
        max_accumulation: int | None = None,
    ) -> None:
        self.topology, self.batch, self.min_ranks = topology, batch, min_ranks
        self.max_ranks = min(max_ranks, batch, sum(group.count for group in topology.groups))
        self.model: CostModel = topology.model
        self._times: dict[MicroBatchRange, dict[int, Times]] = {}
        self._largest: dict[tuple[int, bool, int], int] = {}
        most = min(batch, batch if max_accumulation is None else max_accumulation)
        useful = [self.most_micro_batches(kind, batch) for kind in topology.kinds]
        most = min(most, max(useful, default=1))
        self.accumulations: list[MicroBatchRange] = [(1, 1), (2, most)][: 1 if most < 2 else 2]
        """Intervals of micro-batches that cover all that are useful."""

    def times(self, accumulation: MicroBatchRange) -> dict[int, Times]:
        """By kind: a rank's times with so many micro-batches, or a lower bound of them."""
        if accumulation not in self._times:
            self._times[accumulation] = {
                kind.index: self._times_of(kind, *accumulation) for kind in self.topology.kinds
            }
        return self._times[accumulation]

    def _times_of(self, kind: Kind, least: int, most: int) -> Times:
        import numpy as np

        micro = self._micro(kind, most)
        count = min(self.batch, most * micro)
        samples, knots = np.arange(1, count + 1), kind.knots
        if not count:
            return Times(np.empty(0), [])
        if most == 1:
            return Times(median_times(kind.curve, samples), [*knots, 1, count])
        # With fewer micro-batches, a step never takes longer: `DeviceCurve.micro_batch_s`.
        sizes = np.minimum(micro, np.maximum(1.0, samples / least))
        seconds = samples / sizes * micro_batch_times(kind.curve, sizes)
        corners = {1, least, least * micro, most, count}
        for knot in kind.micro_knots:
            corners |= {math.floor(least * knot), math.ceil(least * knot)}
        return Times(seconds, sorted(one for one in corners if 1 <= one <= count))

    def _micro(self, kind: Kind, accumulation: int, sharing: int = 1) -> int:
        """The most samples at once, if so many ranks share a machine's memory equally."""
        sharing = sharing if kind.shares_memory else 1
        key = (kind.index, accumulation > 1, sharing)
        if key not in self._largest:
            kept = self.model.kept_bytes(accumulation)
            self._largest[key] = largest_batch(kind.curve, self.batch, kept, sharing)
        return self._largest[key]

    def most_micro_batches(self, kind: Kind, samples: int) -> int:
        """The most micro-batches that can pay if a rank of this kind has at most these samples.

        More of them take no less time, and no less memory is needed than for one sample.
        """
        room = self.topology.most_sharing_memory
        if self._micro(kind, 1, room) >= samples:
            return 1
        micro = self._micro(kind, 2, room) or min(1, self._micro(kind, 2))
        return math.ceil(samples / micro) if micro else 1

    def rank_kinds(
        self,
        counts: Sequence[tuple[Kind, int]],
        accumulation: MicroBatchRange,
        collectives: Quantiles,
        limits: Limits,
        sharing: Mapping[int, int] = MappingProxyType({}),
    ) -> list[RankKind]:
        """Ranks of each kind, with the times that memory and limits allow.

        `sharing`: by kind, the ranks that share the memory of a machine.
        """
        z, steps = self.model.z, self.model.steps(self.batch)
        end_s = min([limits.deadline_s, *(kind.available_s for kind, _ in counts)])
        slowest_s = math.inf
        if end_s < math.inf:
            step_s = (end_s * (1 + TOLERANCE) - START_S.at(z)) / steps
            slowest_s = float(collectives.at(z).slowest_s(step_s, accumulation[0]))
        found = []
        for kind, ranks in counts:
            times, factor = self.times(accumulation)[kind.index], kind.factor(z)
            most = len(times.seconds)
            if sharing.get(kind.index, 1) > 1:
                micro = self._micro(kind, accumulation[1], sharing[kind.index])
                most = min(most, accumulation[1] * micro)
            if slowest_s < math.inf:
                allowed = slowest_s / factor * (1 + TOLERANCE)
                most = min(most, int(times.seconds.searchsorted(allowed, "right")))
            watts = kind.extra_w if math.isfinite(kind.extra_w) else 0.0
            found.append(RankKind(ranks, times.seconds[:most], times.knots, watts, factor))
        return found

    def configure(
        self, counts: Sequence[int], accumulation: int, goal: Goal, limits: Limits
    ) -> Iterator[Configured]:
        """These ranks by group, with the best split for the goal.

        One for each placement that is not worse than another in collectives and memory. Where no
        split meets the limits, it is the one that comes closest to a limit. Empty if the ranks do
        not fit.
        """
        if not self.min_ranks <= sum(counts) <= self.max_ranks:
            return
        by_kind: dict[int, int] = {}
        for group, count in zip(self.topology.groups, counts, strict=True):
            if count:
                by_kind[group.kind.index] = by_kind.get(group.kind.index, 0) + count
        kinds = [
            (kind, by_kind[kind.index]) for kind in self.topology.kinds if kind.index in by_kind
        ]
        for place in self._placed(counts):
            one = self._configured(tuple(counts), kinds, place, accumulation, goal, limits)
            if one is not None:
                yield one

    def _placed(self, counts: Sequence[int]) -> list[_Placed]:
        """The placements of these ranks, without those that another one is as good as."""
        time, found = self.topology.collectives.time, list[_Placed]()
        for placement in placements(self.topology, counts):
            sharing = sharing_memory(self.topology, counts, placement)
            new = _Placed(placement, time(placement.ring), sharing)
            if not any(one.as_good_as(new, self.model.z) for one in found):
                found = [one for one in found if not new.as_good_as(one, self.model.z)] + [new]
        return found

    def _configured(
        self,
        counts: tuple[int, ...],
        kinds: Sequence[tuple[Kind, int]],
        placed: _Placed,
        accumulation: int,
        goal: Goal,
        limits: Limits,
    ) -> Configured | None:
        placement, collectives, sharing = placed

        def best(goal: Goal, limits: Limits) -> CheapestSplit:
            return self._best_split(kinds, accumulation, collectives, goal, limits, sharing)

        result = best(goal, limits)
        bound = result.bound
        if result.split is None:
            result = best("upper_time", Limits())
            if result.value <= limits.deadline_s:
                result = best("upper_cost", Limits(limits.deadline_s))
        if result.split is None:
            return None
        shares = _shares(kinds, result.split)
        cost = self.model.cost(shares, collectives, self.batch, accumulation)
        one = Configuration(
            self.topology, counts, placement, shares, self.batch, accumulation, cost
        )
        return Configured(one, bound)

    def _best_split(
        self,
        counts: Sequence[tuple[Kind, int]],
        accumulation: int,
        collectives: CollectiveTime,
        goal: Goal,
        limits: Limits,
        sharing: Mapping[int, int],
    ) -> CheapestSplit:
        kinds = self.rank_kinds(counts, (accumulation, accumulation), collectives, limits, sharing)
        value = self.value_of(counts, accumulation, collectives, goal, limits)
        return cheapest_split(self.batch, kinds, value, by_upper=is_upper(goal))

    def value_of(
        self,
        counts: Sequence[tuple[Kind, int]],
        accumulation: int,
        collectives: Quantiles,
        goal: Goal,
        limits: Limits,
    ) -> ValueFunction:
        """The goal's value for these ranks, as a function of their times."""
        costs = self.model.ranks_cost(counts, collectives, self.batch, accumulation)
        available_s = min(kind.available_s for kind, _ in counts)
        return value_of(costs, goal, limits, available_s, self.model.z)


def _shares(kinds: Sequence[tuple[Kind, int]], split: Split) -> tuple[Share, ...]:
    return tuple(
        Share(kind, batch, count)
        for (kind, _), one in zip(kinds, split, strict=True)
        for batch, count in one
    )
