"""Tightens a subproblem's intervals to what the limits allow (bound tightening)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from trainwright.tasks.allocate.plan.confidence import relative_deviations
from trainwright.tasks.allocate.plan.configuration import TOLERANCE, Goal, Limits
from trainwright.tasks.allocate.plan.cost import START_S, CollectiveTime
from trainwright.tasks.allocate.plan.search_space import SearchSpace
from trainwright.tasks.allocate.search.cover import Capacity, CountLimits, cover
from trainwright.tasks.allocate.search.subproblem import Subproblem
from trainwright.tasks.allocate.search.time_tables import TimeTables

_MAX_ROUNDS = 4


class Tightened(NamedTuple):
    """The part of a subproblem that the limits allow."""

    level: float
    """The first water level, in seconds."""
    least: Any
    """Fewest samples of a rank, by kind."""
    most: Any
    """Most samples of a rank, by kind."""
    collectives: CollectiveTime
    """A lower bound."""
    busy_s: float
    """The least computing time of the slowest rank."""
    counts: CountLimits
    fewest: Any
    """Ranks by kind (real numbers) of the fewest ranks that hold the batch."""
    packed: Any
    """Ranks by group on the fewest machines that hold the batch."""


class Tightening:
    """Tightens the subproblems of a search space for one goal within limits."""

    def __init__(self, space: SearchSpace, goal: Goal, limits: Limits) -> None:
        import numpy as np

        self.space, self._goal, self._limits = space, goal, limits
        topology, kinds = space.topology, space.topology.kinds
        self._topology, self._kinds = topology, kinds
        self.high_factor = np.array([kind.curve.high_factor for kind in kinds])
        self.windows = np.array([kind.available_s for kind in kinds])
        self.steps = space.model.steps(space.batch)
        self.deviations = relative_deviations(space.model.confidence)
        self._machines = np.array(
            [len(topology.sites[group.site].machines) for group in topology.groups]
        )
        self.tables = {
            accumulation: TimeTables(
                [tables[kind.index] for kind in kinds], self._knots(accumulation)
            )
            for accumulation, tables in space.tables.items()
        }
        self._finished: dict[tuple[int, int, str], Any] = {}
        self._fit: dict[tuple[int, int], Any] = {}

    def _knots(self, accumulation: int) -> list[list[int]]:
        """By kind: the samples between which its time is a straight line."""
        curves = [kind.curve.time_knots for kind in self._kinds]
        return [
            [accumulation, *(accumulation * size for size in (one.sizes if one else ()))]
            for one in curves
        ]

    def level(self, node: Subproblem, end: int) -> float:
        """The first (`end` = 0) or last (1) water level of a subproblem, in seconds."""
        return float(self.space.levels[node.accumulation][node.levels[end]])

    def samples(self, node: Subproblem, end: int) -> Any:
        """By kind: the fewest (`end` = 0) or most (1) samples of a rank at these water levels.

        Fewest: what a rank finishes before the first level. Most: what it finishes by the last.
        A rank has at least one sample.
        """
        import numpy as np

        key = (node.accumulation, node.levels[end], "left" if end == 0 else "right")
        if key not in self._finished:
            self._finished[key] = np.maximum(
                1.0, self.tables[node.accumulation].until(self.level(node, end), key[2])
            )
        return self._finished[key]

    def of(self, node: Subproblem, cutoff: float) -> Tightened | None:
        """The part of a subproblem within the limits; None if nothing in it can beat `cutoff`.

        More ranks make collectives slower, which leaves less time to compute, which needs more
        ranks. So it repeats for a few rounds, or until the number of ranks is stable.
        """
        import numpy as np

        ranks, tables = max(node.ranks[0], int(node.kinds[0].sum())), self.tables[node.accumulation]
        if ranks > min(node.ranks[1], self.space.max_ranks):
            return None
        level, least, most = self.level(node, 0), self.samples(node, 0), self.samples(node, 1)
        busy = tables.times(least)
        until = self._until(cutoff)
        on_machine = self._ranks_on_a_machine(node, least)[self._topology.kind_of]
        room = np.minimum(node.high, self._machines * on_machine)
        low = np.maximum(node.kinds[0], self._topology.by_kind(node.low))
        left: Tightened | None = None
        for _ in range(_MAX_ROUNDS):
            high = np.minimum(node.kinds[1], self._topology.by_kind(room))
            used, sure = high > 0, low > 0
            if (low > high).any() or not used.any():
                return None
            on_few = node.collectives.covering(np.where(used, most, 0.0), self.space.batch)
            if on_few is None:
                return None
            collectives = node.collectives.at(max(1, ranks), node.low, low, high, on_few[0])
            if math.isinf(collectives.total.median):
                return None  # too few machines for these ranks
            # Kinds that every configuration uses bound the slowest rank by their slowest, all
            # others by their fastest only.
            busy_s = max(
                level, float(busy[used].min()), float(busy[sure].max()) if sure.any() else 0.0
            )
            in_time = self._in_time(node, until, collectives, busy_s)
            room = np.where((in_time >= least)[self._topology.kind_of], room, 0.0)
            most = np.maximum(least, np.minimum(most, in_time))
            counts = CountLimits(low, high, ranks, node.ranks[1], self._capacity(node, room))
            fewest = cover(np.ones((1, len(low))), most[None], counts, self.space.batch)
            if fewest is None:
                return None
            left = Tightened(
                level, least, most, collectives, busy_s, counts, fewest.counts, on_few[1]
            )
            needed = math.ceil(fewest.price - 1e-6)
            if needed <= ranks:
                break
            ranks = needed
        return left

    def without_low_levels(self, node: Subproblem) -> Subproblem:
        """The subproblem without the water levels at which no choice of ranks holds the batch."""
        counts = CountLimits(*node.kinds, *node.ranks, self._capacity(node, node.high))
        low, high = node.levels
        while low < high:
            middle = (low + high) // 2
            holds = counts.covers(
                self.samples(replace(node, levels=(low, middle)), 1), self.space.batch
            )
            low, high = (low, middle) if holds else (middle + 1, high)
        return replace(node, levels=(low, node.levels[1]))

    def _until(self, cutoff: float) -> Any:
        """By kind: the latest end of the training, at the job's confidence."""
        import numpy as np

        until = np.minimum(self.windows, self._limits.deadline_s)
        if self._goal == "upper_time":
            until = np.minimum(until, cutoff)
        return until * (1 + TOLERANCE)

    def _ranks_on_a_machine(self, node: Subproblem, samples: Any) -> Any:
        """By kind: how many ranks with this many samples fit into one machine's memory."""
        import numpy as np

        key = (node.accumulation, node.levels[0])
        if key not in self._fit:
            memory = self.space.model.memory_bytes
            self._fit[key] = np.array(
                [
                    kind.ranks_that_fit(memory(kind, int(held), node.accumulation))
                    for kind, held in zip(self._kinds, samples, strict=True)
                ]
            )
        return self._fit[key]

    def _in_time(
        self, node: Subproblem, until: Any, collectives: CollectiveTime, busy_s: float
    ) -> Any:
        """By kind: the most samples with which a rank ends in time, at the job's confidence.

        Solves median^(1−z) · high^z <= until for the rank's time, in three steps from loose to
        tight: with high = median, with the median of `busy_s`, and by `_just_in_time`.
        """
        import numpy as np

        if np.isinf(until).all():
            return np.full(len(until), np.inf)
        share = min(1.0, self.deviations)
        seconds = (until - START_S.median) / self.steps - collectives.tail.median
        if share > 0:

            def by_high(median: Any) -> Any:
                """The rank's time whose high end is just in time together with this median."""
                with np.errstate(over="ignore"):  # far beyond any time
                    high = (until / median ** (1 - share)) ** (1 / share)
                step_s = (high - START_S.high) / self.steps
                return (step_s - collectives.total.high) / self.high_factor

            step_s = float(collectives.step_s(busy_s, node.accumulation))
            seconds = np.minimum(seconds, by_high(self.steps * step_s + START_S.median))
            if share < 1:
                seconds = np.minimum(
                    seconds, self._just_in_time(seconds, until, collectives, by_high)
                )
        return self.tables[node.accumulation].until(seconds * (1 + TOLERANCE))

    def _just_in_time(
        self, seconds: Any, until: Any, collectives: CollectiveTime, by_high: Any
    ) -> Any:
        """The rank's time that ends just at `until`, or a little more; it is below `seconds`.

        (1 − z) log median + z log high is concave in the rank's time, so a chord reaches the limit
        later than the function itself.
        """
        import numpy as np

        ends = np.isfinite(until) & (until > 0) & (seconds > 0)
        last, z = np.where(ends, seconds, 1.0), self.deviations

        def median(work: Any) -> Any:
            return self.steps * (work + collectives.tail.median) + START_S.median

        def over(work: Any) -> Any:
            step_s = work * self.high_factor + collectives.total.high
            high = self.steps * step_s + START_S.high
            return (
                (1 - z) * np.log(median(work))
                + z * np.log(high)
                - np.log(np.where(ends, until, 1.0))
            )

        for _ in range(2):
            first = np.clip(np.where(ends, by_high(median(last)), 0.0), 0.0, last)
            below, above = over(first), over(last)
            between = (below < 0) & (above > 0)
            slope = np.where(between, above - below, 1.0)
            last = np.where(between, first - below * (last - first) / slope, last)
        return np.where(ends, last, np.inf)

    def _capacity(self, node: Subproblem, room: Any) -> Capacity:
        """The machines' capacity for the groups of a subproblem."""
        import numpy as np

        topology, holds = self._topology, node.collectives.holds
        together = np.bincount(topology.site_of, room, len(holds))
        tight = together > holds
        shared = tight[topology.site_of]
        free = np.bincount(topology.kind_of[~shared], room[~shared], len(self._kinds))
        rows = (np.cumsum(tight) - 1)[topology.site_of[shared]]
        high, low = np.zeros((2, int(tight.sum()), len(self._kinds)))
        at = (rows, topology.kind_of[shared])
        high[at], low[at] = room[shared], node.low[shared]
        return Capacity(high, low, holds[tight], free)
