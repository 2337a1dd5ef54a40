"""Tightens a subproblem's intervals to what the limits allow (bound tightening)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from trainwright.tasks.allocate.plan.confidence import TOLERANCE
from trainwright.tasks.allocate.plan.configuration import Goal, Limits, is_upper
from trainwright.tasks.allocate.plan.cost import START_S
from trainwright.tasks.allocate.plan.search_space import MicroBatchRange, SearchSpace
from trainwright.tasks.allocate.search.collective_bound import LeastCollectives
from trainwright.tasks.allocate.search.cover import Capacity, CountLimits, cover
from trainwright.tasks.allocate.search.subproblem import Subproblem
from trainwright.tasks.allocate.search.time_tables import TimeTables

_MAX_ROUNDS = 4


class Tightened(NamedTuple):
    """The part of a subproblem that the limits allow."""

    level: float
    """The least time of the slowest rank, in seconds."""
    most: Any
    """Most samples of a rank, by kind."""
    collectives: LeastCollectives
    busy_s: float
    """`level`, or more: the least time of the slowest rank of these kinds."""
    counts: CountLimits
    fewest: Any
    """Ranks by kind (real numbers) of the fewest ranks that hold the batch."""
    packed: Any
    """Ranks by group on the fewest machines that hold the batch."""


class Tightening:
    """Tightens the subproblems of a search space for one goal within limits.

    Times are at the quantile of the goal: at the median, or (`upper_…`) at the job's confidence.
    """

    def __init__(self, space: SearchSpace, goal: Goal, limits: Limits) -> None:
        import numpy as np

        self.space, self._limits = space, limits
        topology, self._kinds = space.topology, space.topology.kinds
        self._topology = topology
        self.z = space.model.z
        self.goal_z = self.z if is_upper(goal) else 0.0
        self._until_goal, self._median_time = goal == "upper_time", goal == "time"
        self.factor = np.array([kind.factor(self.z) for kind in self._kinds])
        """By kind: a rank's time at the job's confidence, relative to the median."""
        self.scale = self.factor if is_upper(goal) else np.ones(len(self._kinds))
        """By kind: a rank's time at the goal's quantile, relative to the median."""
        self.windows = np.array([kind.available_s for kind in self._kinds])
        self.steps = space.model.steps(space.batch)
        self._machines = np.array(
            [len(topology.sites[group.site].machines) for group in topology.groups]
        )
        self._tables: dict[MicroBatchRange, TimeTables] = {}
        self._finished: dict[tuple[MicroBatchRange, int], Any] = {}
        self._fit: dict[MicroBatchRange, Any] = {}

    def tables(self, accumulation: MicroBatchRange) -> TimeTables:
        """The times of all kinds at the goal's quantile."""
        if accumulation not in self._tables:
            times = self.space.times(accumulation)
            ordered = [times[kind.index] for kind in self._kinds]
            self._tables[accumulation] = TimeTables(
                [one.seconds * scale for one, scale in zip(ordered, self.scale, strict=True)],
                [one.knots for one in ordered],
            )
        return self._tables[accumulation]

    def level(self, node: Subproblem, end: int) -> float:
        """The first (`end` = 0) or last (1) time of the slowest rank, in seconds."""
        return float(self.tables(node.accumulation).levels[node.levels[end]])

    def most_samples(self, node: Subproblem) -> Any:
        """By kind: the most samples of a rank at these levels; at least one."""
        import numpy as np

        key = (node.accumulation, node.levels[1])
        if key not in self._finished:
            self._finished[key] = np.maximum(
                1.0, self.tables(node.accumulation).until(self.level(node, 1))
            )
        return self._finished[key]

    def of(self, node: Subproblem, cutoff: float) -> Tightened | None:
        """The part of a subproblem within the limits; None if nothing in it can beat `cutoff`.

        More ranks make collectives slower, which leaves less time to compute, which needs more
        ranks. So it repeats for a few rounds, or until the number of ranks is stable.
        """
        import numpy as np

        ranks, tables = max(node.ranks[0], int(node.kinds[0].sum())), self.tables(node.accumulation)
        if ranks > min(node.ranks[1], self.space.max_ranks):
            return None
        level, most = self.level(node, 0), self.most_samples(node)
        median_until = cutoff if self._median_time else math.inf
        one_sample_s = tables.times(np.ones(len(most)))
        until = self._until(cutoff)
        on_machine = self._ranks_on_a_machine(node.accumulation)[self._topology.kind_of]
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
            if math.isinf(collectives.median.total):
                return None  # too few machines for these ranks
            # Kinds that every configuration uses bound the slowest rank by their slowest, all
            # others by their fastest only.
            busy_s = max(
                level,
                float(one_sample_s[used].min()),
                float(one_sample_s[sure].max()) if sure.any() else 0.0,
            )
            in_time = self._in_time(node, until, median_until, collectives)
            room = np.where((in_time >= 1)[self._topology.kind_of], room, 0.0)
            most = np.maximum(1.0, np.minimum(most, in_time))
            counts = CountLimits(low, high, ranks, node.ranks[1], self._capacity(node, room))
            fewest = cover(np.ones((1, len(low))), most[None], counts, self.space.batch)
            if fewest is None:
                return None
            left = Tightened(level, most, collectives, busy_s, counts, fewest.counts, on_few[1])
            needed = math.ceil(fewest.price - 1e-6)
            if needed <= ranks:
                break
            ranks = needed
        return left

    def without_low_levels(self, node: Subproblem) -> Subproblem:
        """The subproblem without the levels at which no choice of ranks holds the batch."""
        counts = CountLimits(*node.kinds, *node.ranks, self._capacity(node, node.high))
        low, high = node.levels
        while low < high:
            middle = (low + high) // 2
            holds = counts.covers(
                self.most_samples(replace(node, levels=(low, middle))), self.space.batch
            )
            low, high = (low, middle) if holds else (middle + 1, high)
        return replace(node, levels=(low, node.levels[1]))

    def _until(self, cutoff: float) -> Any:
        """By kind: the latest end of the training, at the job's confidence."""
        import numpy as np

        until = np.minimum(self.windows, self._limits.deadline_s)
        if self._until_goal:
            until = np.minimum(until, cutoff)
        return until * (1 + TOLERANCE)

    def _ranks_on_a_machine(self, accumulation: MicroBatchRange) -> Any:
        """By kind: how many ranks with one sample fit into one machine's memory."""
        import numpy as np

        if accumulation not in self._fit:
            memory = self.space.model.memory_bytes
            self._fit[accumulation] = np.array(
                [kind.ranks_that_fit(memory(kind, 1, accumulation[1])) for kind in self._kinds]
            )
        return self._fit[accumulation]

    def _in_time(
        self, node: Subproblem, until: Any, median_until: float, collectives: LeastCollectives
    ) -> Any:
        """By kind: the most samples with which a rank ends in time.

        That is until one time at the job's confidence, and until another one at the median.
        """
        import numpy as np

        if np.isinf(until).all() and math.isinf(median_until):
            return np.full(len(until), np.inf)
        step_s = (until - START_S.at(self.z)) / self.steps
        slowest_s = collectives.upper.slowest_s(step_s, node.accumulation[0])
        allowed_s = slowest_s / self.factor * self.scale
        if math.isfinite(median_until):
            step_s = (median_until - START_S.median) / self.steps
            slowest_s = collectives.median.slowest_s(step_s, node.accumulation[0])
            allowed_s = np.minimum(allowed_s, slowest_s)  # the tables' times are at the median
        return self.tables(node.accumulation).until(allowed_s * (1 + TOLERANCE))

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
