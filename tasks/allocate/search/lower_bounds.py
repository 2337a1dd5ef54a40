"""Lower bounds of subproblems: the least cost of their configurations.

At a water level of w1 or more, a rank that holds b samples of kind k, for t_k(b) seconds, costs at
least p_k(b): its power while it computes, and its idle power and price for a step of
max(w1, t_k(b)) plus the collectives (`collective_bound`). At a level of w2 or less, and in time
(`tightening`), it holds at most s_k samples. So the subproblem costs at least the cheapest cover
of the batch:

    min Σ_k Σ_b p_k(b) · n_kb   with   Σ b · n_kb >= B,
                                       n_k = Σ_b n_kb within the subproblem and its machines

(`cover`), for which few b matter (`time_tables`). Once the numbers of ranks by kind are fixed, so
are the shares, and the bound is exact except for the placement of the ranks.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from trainwright.tasks.allocate.plan.configuration import TOLERANCE, Goal, Limits
from trainwright.tasks.allocate.plan.cost import BACKWARD, START_S, CollectiveTime, Cost
from trainwright.tasks.allocate.plan.kinds import Share
from trainwright.tasks.allocate.plan.search_space import SearchSpace
from trainwright.tasks.allocate.plan.split import split_kinds
from trainwright.tasks.allocate.search.collective_bound import CollectiveBound
from trainwright.tasks.allocate.search.cover import Cover, cover
from trainwright.tasks.allocate.search.subproblem import Looseness, Relaxation, Subproblem
from trainwright.tasks.allocate.search.tightening import Tightened, Tightening

# Weights of what loosens a bound, set by trial: they steer branching and change no bound.
_SPREAD = 0.2
"""Of the share of time by which the ranks' times differ, or that collectives take from them."""
_FRACTION = 0.2
"""Of the share of ranks by which counts are not whole."""


class LowerBounds:
    """Lower bounds for one goal within limits."""

    def __init__(self, space: SearchSpace, goal: Goal, limits: Limits) -> None:
        import numpy as np

        self.space, self.goal, self.limits = space, goal, limits
        self._tightening = Tightening(space, goal, limits)
        self._topology, self._kinds = space.topology, space.topology.kinds
        per_j = space.model.energy_price_per_j or 0.0

        def column(pick: Any) -> Any:
            values = [pick(kind) for kind in self._kinds]
            return np.array([math.nan if one is None else one for one in values], dtype=float)

        idle, load, price = (
            column(lambda kind: kind.idle_w),
            column(lambda kind: kind.load_w),
            column(lambda kind: kind.price_per_s),
        )
        # By kind: for each second that a rank is leased, and for each that it computes.
        self._energy = (idle, load - idle)
        self._cost = (
            (price + per_j * idle, per_j * (load - idle))
            if per_j
            else (price, np.zeros(len(self._kinds)))
        )
        self._steps, self._z = self._tightening.steps, self._tightening.deviations
        self._collectives: dict[tuple[int, int], CollectiveBound] = {}

    def collectives(self, width: tuple[int, int]) -> CollectiveBound:
        """The bound of collectives for an interval of widths."""
        if width not in self._collectives:
            self._collectives[width] = CollectiveBound(self._topology, self.space.max_ranks, width)
        return self._collectives[width]

    def of(self, node: Subproblem, cutoff: float) -> Relaxation | None:
        """The bound of a subproblem; None: nothing in it is feasible and below `cutoff`."""
        if node.kinds_fixed:
            return self._with_fixed_kinds(node)
        in_time = self.goal in ("time", "upper_time")
        if in_time:
            node = self._tightening.without_low_levels(node)
        tight = self._tightening.of(node, cutoff)
        if tight is None:
            return None
        median_s, upper_s = self._durations(node, tight)
        if upper_s > self._ends_s(tight) * (1 + TOLERANCE):
            return None
        paid: Relaxation | None = None
        if self.limits.budget < math.inf or self.goal == "upper_cost":
            paid = self._cheapest_cover(self._cost, node, tight, upper=True)
            if paid is None or paid.bound > self.limits.budget * (1 + TOLERANCE):
                return None
        if self.goal == "upper_cost":
            return paid
        if not in_time:
            rates = self._energy if self.goal == "energy" else self._cost
            return self._cheapest_cover(rates, node, tight)
        bound = median_s if self.goal == "time" else upper_s
        return self._fastest(node, tight, bound, paid)

    def _durations(self, node: Subproblem, tight: Tightened) -> tuple[float, float]:
        """Bounds of the duration at the median, and at the job's confidence."""
        collectives = tight.collectives
        factor = float(self._tightening.high_factor[tight.counts.high > 0].min())
        step_s = float(collectives.step_s(tight.busy_s, node.accumulation))
        median_s = self._steps * step_s + START_S.median
        high_s = self._steps * (tight.busy_s * factor + collectives.total.high) + START_S.high
        return median_s, self._upper(median_s, high_s)

    def _ends_s(self, tight: Tightened) -> float:
        """The deadline, or the first end of a window among the kinds that are surely used."""
        windows, sure = self._tightening.windows, tight.counts.low > 0
        first = float(windows[sure].min()) if sure.any() else math.inf
        return min(self.limits.deadline_s, first)

    def _fastest(
        self, node: Subproblem, tight: Tightened, bound: float, paid: Relaxation | None
    ) -> Relaxation:
        """The relaxation if time is minimised; `paid` is the one that keeps the budget."""
        collectives, most = tight.collectives, min(node.ranks[1], self.space.max_ranks)
        step_s = float(collectives.step_s(tight.level, node.accumulation))
        levels = (self._tightening.level(node, 1) - tight.level) / step_s
        if paid is None:
            ranks = self._slower(node, collectives, most, tight.level) / step_s
            loose = Looseness(levels, ranks)
            return Relaxation(bound, node, tight.fewest, tight.most, loose, tight.packed)
        most = min(most, math.ceil(float(paid.counts.sum())))  # more ranks may be too expensive
        ranks = self._slower(node, collectives, most, tight.level) / step_s
        loose = paid.loose._replace(levels=levels, ranks=ranks)
        return paid._replace(bound=bound, loose=loose, packed=tight.packed)

    def _cheapest_cover(
        self, rates: tuple[Any, Any], node: Subproblem, tight: Tightened, *, upper: bool = False
    ) -> Relaxation | None:
        """The least cost of ranks that hold the batch.

        `rates` are what each second costs that a rank is leased, and that it computes. With
        `upper`, the cost that is not exceeded at the job's confidence: by Hölder's inequality,
        Σ m^(1−z) · h^z over the ranks' medians m and high ends h is at most (Σ m)^(1−z) · (Σ h)^z.
        """
        import numpy as np

        collectives, accumulation, steps = tight.collectives, node.accumulation, self._steps
        unknown = np.isnan(rates[0]) | np.isnan(rates[1])
        if (unknown & (tight.counts.low > 0)).any():
            return None
        leased, computing = (np.where(unknown, 0.0, one) for one in rates)
        hidden_s = (collectives.total.median - collectives.tail.median) * accumulation / BACKWARD
        last_level = self._tightening.level(node, 1)
        bends = [one for one in (tight.busy_s, hidden_s) if tight.level < one < last_level]
        tables = self._tightening.tables[accumulation]
        choices = tables.between(tight.least, tight.most, bends)
        step_s = collectives.step_s(np.maximum(choices.times, tight.busy_s), accumulation)
        prices = leased * (steps * step_s + START_S.median) + steps * computing * choices.times
        if upper and self._z > 0:
            factors = self._tightening.high_factor
            lowest = float(factors[tight.counts.high > 0].min())
            high_s = np.maximum(choices.times * factors, tight.level * lowest)
            high_s = high_s + collectives.total.high
            # The computing time is at least that at the median. The difference falls as collectives
            # take more of a step, so the bound ignores it.
            high = leased * (steps * high_s + START_S.high) + steps * computing * choices.times
            prices = self._upper(prices, high)
        counts = replace(tight.counts, high=np.where(unknown, 0.0, tight.counts.high))
        found = cover(prices, choices.samples, counts, self.space.batch)
        return found and Relaxation(
            found.price,
            node,
            found.counts,
            found.samples,
            self._looseness(found, leased, node, tight),
        )

    def _looseness(
        self, found: Cover, leased: Any, node: Subproblem, tight: Tightened
    ) -> Looseness:
        """The relative additional cost of a cover's ranks if all waited for the slowest one and for
        the collectives of this many ranks."""
        import numpy as np

        there, collectives = found.counts > 1e-9, tight.collectives
        ranks, samples = found.counts[there], found.samples[there]
        times = self._tightening.tables[node.accumulation].times(
            np.round(np.where(there, found.samples, 1.0))
        )[there]
        busy_s = np.maximum(times, tight.busy_s)
        slowest = float(busy_s.max())
        size = min(max(1, math.ceil(float(ranks.sum()) - 1e-6)), node.ranks[1])
        waits = float(collectives.step_s(slowest, node.accumulation)) - collectives.step_s(
            busy_s, node.accumulation
        )
        per_s = ranks * leased[there] * self._steps / max(found.price, 1e-300)
        spread = float(samples * ranks @ (1 - busy_s / slowest)) / self.space.batch
        loose = Looseness(
            float(per_s @ waits) + _SPREAD * spread,
            float(per_s.sum()) * self._slower(node, collectives, size, slowest),
            _FRACTION * float(np.abs(ranks - np.round(ranks)).sum()) / size,
        )
        if self.limits.deadline_s < math.inf:
            all_high_s = node.collectives.at_least(size).total.high
            longer_s = all_high_s - collectives.total.high
            loose = loose._replace(ranks=loose.ranks + _SPREAD * longer_s / slowest)
        return loose

    def _slower(
        self, node: Subproblem, collectives: CollectiveTime, ranks: int, busy_s: float
    ) -> float:
        """By how much the collectives of this many ranks exceed the bound's."""
        most = node.collectives.at_least(ranks)
        found = float(most.step_s(busy_s, node.accumulation)) - float(
            collectives.step_s(busy_s, node.accumulation)
        )
        return min(max(0.0, found), 1e300)

    def _with_fixed_kinds(self, node: Subproblem) -> Relaxation | None:
        """The cost of these numbers of ranks by kind, in their best placement."""
        counts = node.kinds[0]
        size = int(counts.sum())
        if not max(1, node.ranks[0]) <= size <= node.ranks[1]:
            return None
        collectives = node.collectives.at(size, node.low, counts, counts)
        if math.isinf(collectives.total.median):
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
        cost = self.space.model.cost(shares, collectives, self.space.batch, node.accumulation)
        ends_s = min(self.limits.deadline_s, *(kind.available_s for kind in kinds))
        value = self._within_limits(cost, ends_s)
        return None if math.isinf(value) else Relaxation(value, node, counts)

    def _within_limits(self, cost: Cost, ends_s: float) -> float:
        """The goal's value, as a lower bound; infinite if it is unknown or limits are missed."""
        upper_s = self._upper(cost.duration_s.median, cost.duration_s.high)
        upper_cost = math.inf
        if cost.cost:
            # With a price of energy the high end may fall as the collectives' median grows; the
            # median never does. So only the median is used then.
            spread = (
                cost.cost.high / cost.cost.median
                if cost.cost.median > 0 and not self._cost[1].any()
                else 1.0
            )
            upper_cost = cost.cost.median * spread ** min(1.0, self._z)
        late = upper_s > ends_s * (1 + TOLERANCE)
        budget = self.limits.budget
        if late or (budget < math.inf and upper_cost > budget * (1 + TOLERANCE)):
            return math.inf
        values: dict[Goal, float] = {
            "time": cost.duration_s.median,
            "energy": cost.energy_j.median if cost.energy_j else math.inf,
            "cost": cost.cost.median if cost.cost else math.inf,
            "upper_time": upper_s,
            "upper_cost": upper_cost,
        }
        return values[self.goal]

    def _upper(self, median: Any, high: Any) -> Any:
        """A bound of `plan.confidence.not_exceeded`, from bounds of median and high end.

        median^(1−z) · high^z grows with both of them up to a confidence of 95 % (z = 1). Beyond,
        `high` is a bound by itself.
        """
        if self._z <= 1:
            return median ** (1 - self._z) * high**self._z
        return high
