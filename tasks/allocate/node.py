"""A part of the space that is searched, and what its configurations take at least.

A node is an accumulation, a width (the most ranks on a machine), an interval of water levels, one of the number of ranks, and
one of each count, by kind of device and by group. With W >= w1 every rank of kind k is busy for τ_k at least (what it finishes
before w1), and with W <= w2 it takes s_k samples at most, so what the ranks cost is at least that of the cheapest cover of the
batch, Σ s_k · n_k >= B, at τ_k each (`cover`), with collectives that take what the node's ranks take at least (`floor`). Where
the counts by kind are settled, so are the shares, and the node's cost is exact but for where its ranks sit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from trainwright.tasks.allocate.configuration import EXACT, Goal, Limits, Space
from trainwright.tasks.allocate.cost import START_S, Share, deviations
from trainwright.tasks.allocate.cover import Counts, Rooms, cover
from trainwright.tasks.allocate.floor import CollectiveFloor
from trainwright.tasks.allocate.split import split_kinds


@dataclass(frozen=True)
class Node:
    """A part of the space."""

    accumulation: int
    floor: CollectiveFloor
    levels: tuple[int, int]
    ranks: tuple[int, int]
    low: Any
    high: Any
    """Counts by group."""
    kinds: tuple[Any, Any]
    """Least and most ranks by kind: alike devices of several sites are told apart only once their number is settled."""

    @property
    def settled(self) -> bool:
        """Whether the counts by kind are."""
        return bool((self.kinds[0] == self.kinds[1]).all())


class Bounded(NamedTuple):
    """What a node's configurations take at least, counts by kind that come near it (real numbers), and the node
    cut to size."""

    value: float
    counts: Any
    node: Node
    packed: Any = None
    """Counts by group on the fewest machines."""


class Bounds:
    """Bounds for one goal within limits."""

    def __init__(self, space: Space, goal: Goal, limits: Limits) -> None:
        import numpy as np

        self.space, self.goal, self.limits = space, goal, limits
        layout, model = space.layout, space.model
        self._layout, self._kinds = layout, layout.kinds
        self._high_factor = np.array([kind.curve.high_factor for kind in self._kinds])
        self._window = np.array([kind.available_s for kind in self._kinds])
        per_j = model.energy_price_per_j or 0.0

        def column(pick: Any) -> Any:
            values = [pick(kind) for kind in self._kinds]
            return np.array([math.nan if one is None else one for one in values], dtype=float)

        idle, load, price = column(lambda k: k.idle_w), column(lambda k: k.load_w), column(lambda k: k.price_per_s)
        if not per_j:
            self._cost_held, self._cost_busy = price, np.zeros(len(self._kinds))
        else:
            self._cost_held, self._cost_busy = price + per_j * idle, per_j * (load - idle)
        self._energy_held, self._energy_busy = idle, load - idle
        self._steps = model.steps(space.batch)
        self._z = deviations(model.confidence)
        self._at: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._floors: dict[tuple[int, int], CollectiveFloor] = {}

    def floor(self, width: tuple[int, int]) -> CollectiveFloor:
        """The collectives' floor for an interval of widths."""
        if width not in self._floors:
            self._floors[width] = CollectiveFloor(self._layout, self.space.most, width)
        return self._floors[width]

    def levels(self, accumulation: int, at: int) -> tuple[Any, Any]:
        """By kind: the samples it finishes at this water level (one at least), and its time for those it finishes before."""
        import numpy as np

        if (accumulation, at) not in self._at:
            level, tables = self.space.levels[accumulation][at], self.space.tables[accumulation]
            most, busy = {}, {}
            for index, table in tables.items():
                most[index] = max(1, int(table.searchsorted(level, "right")))
                busy[index] = float(table[max(1, int(table.searchsorted(level, "left"))) - 1]) if len(table) else 0.0
            self._at[accumulation, at] = (
                np.array([most[kind.index] for kind in self._kinds], dtype=float),
                np.array([busy[kind.index] for kind in self._kinds]),
            )
        return self._at[accumulation, at]

    def of(self, node: Node, ceiling: float) -> Bounded | None:
        """The bound of a node. None: nothing in it counts, or can be below `ceiling`."""
        import numpy as np

        least = max(node.ranks[0], int(node.kinds[0].sum()))
        if least > node.ranks[1] or least > self.space.most:
            return None
        if node.settled:
            return self._settled(node)
        if self.goal in ("time", "upper_time"):
            node = self._tightened(node)
        level = float(self.space.levels[node.accumulation][node.levels[0]])
        samples, _ = self.levels(node.accumulation, node.levels[1])
        _, busy = self.levels(node.accumulation, node.levels[0])
        fewest_machines = node.floor.covering(np.where(node.kinds[1] > 0, samples, 0.0), self.space.batch)
        if fewest_machines is None:
            return None
        machines, packed = fewest_machines
        sums = node.floor.at(max(1, least), node.low, *node.kinds, machines)
        if math.isinf(sums.whole.median):
            return None  # no machines for so many
        slowest = np.maximum(level, busy)
        median = self._steps * sums.step_s(slowest, node.accumulation) + START_S.median
        slowest_high = np.maximum(busy * self._high_factor, level * float(self._high_factor.min()))
        late = self._upper(median, self._steps * (slowest_high + sums.whole.high) + START_S.high)
        deadline = np.minimum(self._window, self.limits.deadline_s)
        if self.goal == "upper_time":
            deadline = np.minimum(deadline, ceiling)
        room = np.where((late <= deadline * (1 + EXACT))[self._layout.kind_of], node.high, 0.0)
        low = np.maximum(node.kinds[0], self._layout.by_kind(node.low))
        high = np.minimum(node.kinds[1], self._layout.by_kind(room))
        used, sure = high > 0, low > 0
        if (low > high).any() or not used.any():
            return None
        # What every configuration of the node takes: its slowest group of those that it holds for sure counts.
        least_step = max(level, float(busy[used].min()), float(busy[sure].max()) if sure.any() else 0.0)
        counts = Counts(low, high, least, node.ranks[1], self._rooms(node, room))
        if self.goal in ("time", "upper_time"):
            found = cover(np.ones(len(low)), samples, counts, self.space.batch)
            if found is None:
                return None
            fewest = math.ceil(found[0] - 1e-6)
            if fewest > least:
                sums = node.floor.at(fewest, node.low, low, high, machines)
        seconds = self._steps * float(sums.step_s(least_step, node.accumulation)) + START_S.median
        factor = float(self._high_factor[used].min())
        seconds_high = self._steps * (least_step * factor + sums.whole.high) + START_S.high
        upper_s = float(self._upper(np.array(seconds), np.array(seconds_high)))
        until = min(self.limits.deadline_s, float(self._window[sure].min()) if sure.any() else math.inf)
        if upper_s > until * (1 + EXACT):
            return None
        held_s = np.maximum(median, seconds)

        def covered(held: Any, running: Any) -> tuple[float, Any] | None:
            prices = held * held_s + self._steps * running * busy
            unknown = np.isnan(prices)
            if (unknown & sure).any():
                return None
            known = replace(counts, high=np.where(unknown, 0.0, high))
            return cover(np.where(unknown, 0.0, prices), samples, known, self.space.batch)

        if self.limits.budget < math.inf or self.goal in ("cost", "upper_cost"):
            priced = covered(self._cost_held, self._cost_busy)
            if priced is None:
                return None
            spread = min(
                factor,
                START_S.high / START_S.median,
                sums.whole.high / sums.whole.median if sums.whole.median > 0 else math.inf,
            )
            upper_cost = priced[0] * max(1.0, spread) ** self._z
            if upper_cost > self.limits.budget * (1 + EXACT):
                return None
            if self.goal in ("cost", "upper_cost"):
                return Bounded(priced[0] if self.goal == "cost" else upper_cost, priced[1], node)
        if self.goal == "energy":
            powered = covered(self._energy_held, self._energy_busy)
            return None if powered is None else Bounded(*powered, node)
        assert found is not None
        return Bounded(seconds if self.goal == "time" else upper_s, found[1], node, packed)

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
        high[rows, layout.kind_of[shared]], low[rows, layout.kind_of[shared]] = room[shared], node.low[shared]
        return Rooms(high, low, holds[tight], free)

    def _settled(self, node: Node) -> Bounded | None:
        """The cost of these counts by kind, wherever they sit."""
        counts = node.kinds[0]
        size = int(counts.sum())
        if not max(1, node.ranks[0]) <= size <= node.ranks[1]:
            return None
        sums = node.floor.at(size, node.low, counts, counts)
        if math.isinf(sums.whole.median):
            return None
        kinds = [kind for kind, count in zip(self._kinds, counts, strict=True) if count]
        tables = [self.space.tables[node.accumulation][kind.index] for kind in kinds]
        ranks = [int(count) for count in counts if count]
        if not all(len(table) for table in tables):
            return None
        split = split_kinds(self.space.batch, tables, ranks, self.space.levels[node.accumulation])
        if split is None:
            return None
        shares = [Share(kind, batch, count) for kind, one in zip(kinds, split, strict=True) for batch, count in one]
        cost = self.space.model.cost(shares, sums, self.space.batch, node.accumulation)
        until = min(self.limits.deadline_s, *(kind.available_s for kind in kinds))
        upper_s = float(self._upper(cost.duration_s.median, cost.duration_s.high))
        upper_cost = math.inf
        if cost.cost:
            # With a price of energy the high end may fall as the collectives' median grows; the median never does.
            spread = cost.cost.high / cost.cost.median if cost.cost.median > 0 and not self._cost_busy.any() else 1.0
            upper_cost = cost.cost.median * spread ** min(1.0, self._z)
        if upper_s > until * (1 + EXACT) or (
            self.limits.budget < math.inf and upper_cost > self.limits.budget * (1 + EXACT)
        ):
            return None
        value = {
            "time": cost.duration_s.median,
            "energy": cost.energy_j.median if cost.energy_j else math.inf,
            "cost": cost.cost.median if cost.cost else math.inf,
            "upper_time": upper_s,
            "upper_cost": upper_cost,
        }[self.goal]
        return None if math.isinf(value) else Bounded(value, counts, node)

    def _tightened(self, node: Node) -> Node:
        """The node without the levels at which its ranks could not hold the batch, however they are chosen."""
        low, high = node.levels
        counts = Counts(*node.kinds, *node.ranks, self._rooms(node, node.high))
        while low < high:
            middle = (low + high) // 2
            samples, _ = self.levels(node.accumulation, middle)
            low, high = (low, middle) if counts.covers(samples, self.space.batch) else (middle + 1, high)
        return replace(node, levels=(low, node.levels[1]))

    def _upper(self, median: Any, high: Any) -> Any:
        """A bound of `cost.upper` from bounds of its two arguments: it grows with both, up to a confidence of 95 %."""
        if self._z <= 1:
            return median ** (1 - self._z) * high**self._z
        return high
