"""What a node's configurations take at least.

With a water level of w1 or more, a rank that holds b samples of kind k, for t_k(b) seconds, costs p_k(b) at least: what it draws
while it works, and what it takes for a step of max(w1, t_k(b)) with the collectives that the node's ranks take at least
(`floor`). With a level of w2 or less, and in time (`narrow`), it holds no more than s_k samples. So the node's cost is that of
the cheapest cover of the batch at least:

    min Σ_k Σ_b p_k(b) · n_kb   with   Σ b · n_kb >= B,   n_k = Σ_b n_kb in the node's intervals and on its machines

(`cover`), where few b matter (`choices`). Where the counts by kind are settled, so are the shares, and the node's cost is exact
but for where its ranks sit.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from trainwright.tasks.allocate.plan.configuration import EXACT, Goal, Limits, Space
from trainwright.tasks.allocate.plan.cost import HIDDEN, START_S, Collectives, Share
from trainwright.tasks.allocate.plan.split import split_kinds
from trainwright.tasks.allocate.search.collective_floor import CollectiveFloor
from trainwright.tasks.allocate.search.cover import Cover, cover
from trainwright.tasks.allocate.search.narrow import Narrow, Narrowing
from trainwright.tasks.allocate.search.subproblem import Bounded, Looseness, Node

_UNLIKE = 0.2
"""By what share of the time that ranks are apart, or that sums take from them, the bound is loose: how dear shares grow."""
_PART = 0.2
"""By what share of a rank, where a count is not whole."""


class Bounds:
    """Bounds for one goal within limits."""

    def __init__(self, space: Space, goal: Goal, limits: Limits) -> None:
        import numpy as np

        self.space, self.goal, self.limits = space, goal, limits
        self._narrowing = Narrowing(space, goal, limits)
        self._layout, self._kinds = space.layout, space.layout.kinds
        per_j = space.model.energy_price_per_j or 0.0

        def column(pick: Any) -> Any:
            values = [pick(kind) for kind in self._kinds]
            return np.array([math.nan if one is None else one for one in values], dtype=float)

        idle, load, price = (
            column(lambda k: k.idle_w),
            column(lambda k: k.load_w),
            column(lambda k: k.price_per_s),
        )
        # For each second that a rank is held, and for each that it works.
        self._energy = (idle, load - idle)
        self._cost = (
            (price + per_j * idle, per_j * (load - idle))
            if per_j
            else (price, np.zeros(len(self._kinds)))
        )
        self._steps, self._z = self._narrowing.steps, self._narrowing.deviations
        self._floors: dict[tuple[int, int], CollectiveFloor] = {}

    def floor(self, width: tuple[int, int]) -> CollectiveFloor:
        """The collectives' floor for an interval of widths."""
        if width not in self._floors:
            self._floors[width] = CollectiveFloor(self._layout, self.space.most, width)
        return self._floors[width]

    def of(self, node: Node, ceiling: float) -> Bounded | None:
        """The bound of a node. None: nothing in it counts, or can be below `ceiling`."""
        if node.settled:
            return self._settled(node)
        in_time = self.goal in ("time", "upper_time")
        if in_time:
            node = self._narrowing.tightened(node)
        narrow = self._narrowing.of(node, ceiling)
        if narrow is None:
            return None
        sums, sure, windows = narrow.sums, narrow.counts.low > 0, self._narrowing.windows
        factor = float(self._narrowing.high_factor[narrow.counts.high > 0].min())
        seconds = (
            self._steps * float(sums.step_s(narrow.least_step, node.accumulation)) + START_S.median
        )
        upper_s = self._upper(
            seconds, self._steps * (narrow.least_step * factor + sums.whole.high) + START_S.high
        )
        until = min(self.limits.deadline_s, float(windows[sure].min()) if sure.any() else math.inf)
        if upper_s > until * (1 + EXACT):
            return None
        paid: Bounded | None = None
        if self.limits.budget < math.inf or self.goal == "upper_cost":
            paid = self._covered(self._cost, node, narrow, upper=True)
            if paid is None or paid.value > self.limits.budget * (1 + EXACT):
                return None
        if self.goal == "upper_cost":
            return paid
        if not in_time:
            return self._covered(
                self._energy if self.goal == "energy" else self._cost, node, narrow
            )
        step, apart = (
            float(sums.step_s(narrow.level, node.accumulation)),
            self._narrowing.level(node, 1) - narrow.level,
        )
        value, top = (
            seconds if self.goal == "time" else upper_s,
            min(node.ranks[1], self.space.most),
        )
        if paid is None:
            loose = Looseness(apart / step, self._slower(node, sums, top, narrow.level) / step)
            return Bounded(value, node, narrow.fewest, narrow.most, loose, narrow.packed)
        top = min(top, math.ceil(float(paid.counts.sum())))  # the quickest may be too dear
        loose = paid.loose._replace(
            levels=apart / step, ranks=self._slower(node, sums, top, narrow.level) / step
        )
        return paid._replace(value=value, loose=loose, packed=narrow.packed)

    def _covered(
        self, rates: tuple[Any, Any], node: Node, narrow: Narrow, *, upper: bool = False
    ) -> Bounded | None:
        """The least cost of ranks that hold the batch, at these rates of each second held and of each at work.

        With `upper`, that which is not exceeded at the job's confidence: Σ m^(1−z) · h^z of medians and high ends of the ranks
        is never more than (Σ m)^(1−z) · (Σ h)^z (O. Hölder, 1889).
        """
        import numpy as np

        sums, accumulation, steps = narrow.sums, node.accumulation, self._steps
        unknown = np.isnan(rates[0]) | np.isnan(rates[1])
        if (unknown & (narrow.counts.low > 0)).any():
            return None
        held, working = (np.where(unknown, 0.0, one) for one in rates)
        bends = [narrow.least_step, (sums.whole.median - sums.after.median) * accumulation / HIDDEN]
        within = [one for one in bends if narrow.level < one < self._narrowing.level(node, 1)]
        choices = self._narrowing.tables[accumulation].between(narrow.least, narrow.most, within)
        step_s = sums.step_s(np.maximum(choices.times, narrow.least_step), accumulation)
        prices = held * (steps * step_s + START_S.median) + steps * working * choices.times
        if upper and self._z > 0:
            factors = self._narrowing.high_factor
            lowest = float(factors[narrow.counts.high > 0].min())
            high_s = np.maximum(choices.times * factors, narrow.level * lowest) + sums.whole.high
            # At work for no shorter than at the median; by how much longer, falls as sums take more of a step.
            high = held * (steps * high_s + START_S.high) + steps * working * choices.times
            prices = self._upper(prices, high)
        counts = replace(narrow.counts, high=np.where(unknown, 0.0, narrow.counts.high))
        found = cover(prices, choices.samples, counts, self.space.batch)
        return found and Bounded(
            found.price,
            node,
            found.counts,
            found.samples,
            self._looseness(found, held, node, narrow),
        )

    def _looseness(self, found: Cover, held: Any, node: Node, narrow: Narrow) -> Looseness:
        """What the ranks of a cover would cost more: if all waited for their slowest, and for the sums of so many."""
        import numpy as np

        there, sums = found.counts > 1e-9, narrow.sums
        ranks, samples = found.counts[there], found.samples[there]
        times = self._narrowing.tables[node.accumulation].times(
            np.round(np.where(there, found.samples, 1.0))
        )[there]
        busy_s = np.maximum(times, narrow.least_step)
        slowest, size = (
            float(busy_s.max()),
            min(max(1, math.ceil(float(ranks.sum()) - 1e-6)), node.ranks[1]),
        )
        waits = float(sums.step_s(slowest, node.accumulation)) - sums.step_s(
            busy_s, node.accumulation
        )
        per_s = ranks * held[there] * self._steps / max(found.price, 1e-300)
        loose = Looseness(
            float(per_s @ waits)
            + _UNLIKE * float(samples * ranks @ (1 - busy_s / slowest)) / self.space.batch,
            float(per_s.sum()) * self._slower(node, sums, size, slowest),
            _PART * float(np.abs(ranks - np.round(ranks)).sum()) / size,
        )
        if self.limits.deadline_s < math.inf:
            longer_s = node.floor.of(size).whole.high - sums.whole.high
            loose = loose._replace(ranks=loose.ranks + _UNLIKE * longer_s / slowest)
        return loose

    def _slower(self, node: Node, sums: Collectives, ranks: int, busy_s: float) -> float:
        """By how much a step is slower with so many ranks than with those that the bound is for."""
        most = node.floor.of(ranks)
        found = float(most.step_s(busy_s, node.accumulation)) - float(
            sums.step_s(busy_s, node.accumulation)
        )
        return min(max(0.0, found), 1e300)

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
        shares = [
            Share(kind, batch, count)
            for kind, one in zip(kinds, split, strict=True)
            for batch, count in one
        ]
        cost = self.space.model.cost(shares, sums, self.space.batch, node.accumulation)
        until = min(self.limits.deadline_s, *(kind.available_s for kind in kinds))
        upper_s = self._upper(cost.duration_s.median, cost.duration_s.high)
        upper_cost = math.inf
        if cost.cost:
            # With a price of energy the high end may fall as the collectives' median grows; the median never does.
            spread = (
                cost.cost.high / cost.cost.median
                if cost.cost.median > 0 and not self._cost[1].any()
                else 1.0
            )
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
        return None if math.isinf(value) else Bounded(value, node, counts)

    def _upper(self, median: Any, high: Any) -> Any:
        """A bound of `cost.upper` from bounds of its two arguments: it grows with both, up to a confidence of 95 %."""
        if self._z <= 1:
            return median ** (1 - self._z) * high**self._z
        return high
