"""What the limits leave of a node: which kinds, how many samples on a rank of each, and the collectives that takes at least."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from trainwright.tasks.allocate.plan.configuration import EXACT, Goal, Limits, Space
from trainwright.tasks.allocate.plan.cost import START_S, Collectives, deviations
from trainwright.tasks.allocate.search.choices import Tables
from trainwright.tasks.allocate.search.cover import Counts, Rooms, cover
from trainwright.tasks.allocate.search.subproblem import Node

_MOST_ROUNDS = 4


class Narrow(NamedTuple):
    """What the limits leave of a node."""

    level: float
    """The first water level, in seconds."""
    least: Any
    """By kind: samples of a rank, at least, and at most."""
    most: Any
    sums: Collectives
    """What they take at least."""
    least_step: float
    """Seconds that the slowest rank works for, at least."""
    counts: Counts
    fewest: Any
    """Counts by kind (real numbers) of the fewest ranks that hold the batch."""
    packed: Any
    """Counts by group on the fewest machines."""


class Narrowing:
    """Narrows the nodes of a space to what limits leave of them."""

    def __init__(self, space: Space, goal: Goal, limits: Limits) -> None:
        import numpy as np

        self.space, self._goal, self._limits = space, goal, limits
        layout, kinds = space.layout, space.layout.kinds
        self._layout, self._kinds = layout, kinds
        self.high_factor = np.array([kind.curve.high_factor for kind in kinds])
        self.windows = np.array([kind.available_s for kind in kinds])
        self.steps = space.model.steps(space.batch)
        self.deviations = deviations(space.model.confidence)
        """Of the job's confidence, of those of the high end."""
        self._machines = np.array(
            [len(layout.sites[group.site].machines) for group in layout.groups]
        )
        self.tables = {
            accumulation: Tables([tables[kind.index] for kind in kinds], self._knots(accumulation))
            for accumulation, tables in space.tables.items()
        }
        self._finished: dict[tuple[int, int, str], Any] = {}
        self._together: dict[tuple[int, int], Any] = {}

    def _knots(self, accumulation: int) -> list[list[int]]:
        """By kind: the samples between which its time is a straight line."""
        curves = [kind.curve.time_knots for kind in self._kinds]
        return [
            [accumulation, *(accumulation * size for size in (one.sizes if one else ()))]
            for one in curves
        ]

    def level(self, node: Node, end: int) -> float:
        """The first (0) or last (1) water level of a node, in seconds."""
        return float(self.space.levels[node.accumulation][node.levels[end]])

    def samples(self, node: Node, end: int) -> Any:
        """By kind: what a rank holds at least (0): one more than none, and what it finishes before the first level; or at
        most (1)."""
        import numpy as np

        key = (node.accumulation, node.levels[end], "left" if end == 0 else "right")
        if key not in self._finished:
            self._finished[key] = np.maximum(
                1.0, self.tables[node.accumulation].until(self.level(node, end), key[2])
            )
        return self._finished[key]

    def of(self, node: Node, ceiling: float) -> Narrow | None:
        """What is left of a node; None: nothing, or nothing that can be below `ceiling`.

        More ranks take longer sums, which leave less time for work, which takes more ranks: some rounds of that.
        """
        import numpy as np

        ranks, tables = max(node.ranks[0], int(node.kinds[0].sum())), self.tables[node.accumulation]
        if ranks > min(node.ranks[1], self.space.most):
            return None
        level, least, most = self.level(node, 0), self.samples(node, 0), self.samples(node, 1)
        busy = tables.times(least)
        until = np.minimum(self.windows, self._limits.deadline_s)
        if self._goal == "upper_time":
            until = np.minimum(until, ceiling)
        until = until * (1 + EXACT)
        room = np.minimum(
            node.high, self._machines * self._on_a_machine(node, least)[self._layout.kind_of]
        )
        low = np.maximum(node.kinds[0], self._layout.by_kind(node.low))
        left: Narrow | None = None
        for _ in range(_MOST_ROUNDS):
            high = np.minimum(node.kinds[1], self._layout.by_kind(room))
            used, sure = high > 0, low > 0
            if (low > high).any() or not used.any():
                return None
            on_few = node.floor.covering(np.where(used, most, 0.0), self.space.batch)
            if on_few is None:
                return None
            sums = node.floor.at(max(1, ranks), node.low, low, high, on_few[0])
            if math.isinf(sums.whole.median):
                return None  # no machines for so many
            # What every configuration of the node takes: its slowest group of those that it holds for sure counts.
            least_step = max(
                level, float(busy[used].min()), float(busy[sure].max()) if sure.any() else 0.0
            )
            in_time = self._in_time(node, until, sums, least_step)
            room = np.where((in_time >= least)[self._layout.kind_of], room, 0.0)
            most = np.maximum(least, np.minimum(most, in_time))
            counts = Counts(low, high, ranks, node.ranks[1], self._rooms(node, room))
            fewest = cover(np.ones((1, len(low))), most[None], counts, self.space.batch)
            if fewest is None:
                return None
            left = Narrow(level, least, most, sums, least_step, counts, fewest.counts, on_few[1])
            needed = math.ceil(fewest.price - 1e-6)
            if needed <= ranks:
                break
            ranks = needed
        return left

    def tightened(self, node: Node) -> Node:
        """The node without the levels at which its ranks could not hold the batch, however they are chosen."""
        counts = Counts(*node.kinds, *node.ranks, self._rooms(node, node.high))
        low, high = node.levels
        while low < high:
            middle = (low + high) // 2
            holds = counts.covers(
                self.samples(replace(node, levels=(low, middle)), 1), self.space.batch
            )
            low, high = (low, middle) if holds else (middle + 1, high)
        return replace(node, levels=(low, node.levels[1]))

    def _on_a_machine(self, node: Node, samples: Any) -> Any:
        """By kind: how many ranks with so many samples one machine's memory holds; infinite where it is the devices' own."""
        import numpy as np

        key = (node.accumulation, node.levels[0])
        if key not in self._together:
            memory = self.space.model.memory_bytes
            self._together[key] = np.array(
                [
                    kind.together(memory(kind, int(held), node.accumulation))
                    for kind, held in zip(self._kinds, samples, strict=True)
                ]
            )
        return self._together[key]

    def _in_time(self, node: Node, until: Any, sums: Collectives, least_step: float) -> Any:
        """By kind: the samples that a rank finishes so early that these deadlines hold, at the job's confidence."""
        import numpy as np

        if np.isinf(until).all():
            return np.full(len(until), np.inf)
        share = min(1.0, self.deviations)
        seconds = (until - START_S.median) / self.steps - sums.after.median
        if share > 0:

            def by_high(median: Any) -> Any:
                """The work whose high end is so far above this median that both together are just in time."""
                with np.errstate(over="ignore"):  # far beyond what there is
                    high = (until / median ** (1 - share)) ** (1 / share)
                return ((high - START_S.high) / self.steps - sums.whole.high) / self.high_factor

            median = self.steps * float(sums.step_s(least_step, node.accumulation)) + START_S.median
            seconds = np.minimum(seconds, by_high(median))
            if share < 1:
                seconds = np.minimum(seconds, self._just_in_time(seconds, until, sums, by_high))
        return self.tables[node.accumulation].until(seconds * (1 + EXACT))

    def _just_in_time(self, seconds: Any, until: Any, sums: Collectives, by_high: Any) -> Any:
        """The work that ends `until` then, with the median that such work has, or some more; it is below `seconds`.

        (1 − z) log median + z log high is concave in the work, so that a chord reaches the limit later than itself.
        """
        import numpy as np

        ends = np.isfinite(until) & (until > 0) & (seconds > 0)
        last, z = np.where(ends, seconds, 1.0), self.deviations

        def median(work: Any) -> Any:
            return self.steps * (work + sums.after.median) + START_S.median

        def over(work: Any) -> Any:
            high = self.steps * (work * self.high_factor + sums.whole.high) + START_S.high
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

    def _rooms(self, node: Node, room: Any) -> Rooms:
        """The machines' room for the groups of a node."""
        import numpy as np

        layout, holds = self._layout, node.floor.holds
        together = np.bincount(layout.site_of, room, len(holds))
        tight = together > holds
        shared = tight[layout.site_of]
        free = np.bincount(layout.kind_of[~shared], room[~shared], len(self._kinds))
        rows = (np.cumsum(tight) - 1)[layout.site_of[shared]]
        high, low = np.zeros((2, int(tight.sum()), len(self._kinds)))
        high[rows, layout.kind_of[shared]], low[rows, layout.kind_of[shared]] = (
            room[shared],
            node.low[shared],
        )
        return Rooms(high, low, holds[tight], free)
