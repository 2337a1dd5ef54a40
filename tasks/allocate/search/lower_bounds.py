"""Lower bounds of subproblems: the least cost of their configurations.

If the slowest rank takes w1 or more, a rank that holds b samples of kind k, for t_k(b) seconds,
costs at least p_k(b): its power while it computes, and its idle power and price for a step of
max(w1, t_k(b)) plus the collectives (`collective_bound`). If the slowest rank takes w2 or less, and
in time (`tightening`), it holds at most s_k samples. So the subproblem costs at least the cheapest
cover of the batch:

    min Σ_k Σ_b p_k(b) · n_kb   with   Σ b · n_kb >= B,
                                       n_k = Σ_b n_kb within the subproblem and its machines

(`cover`), for which few b matter (`time_tables`). Once the numbers of ranks by kind are fixed,
`plan.cheapest_split` bounds the cost of their best split.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

from trainwright.tasks.allocate.plan.cheapest_split import least_value
from trainwright.tasks.allocate.plan.confidence import TOLERANCE
from trainwright.tasks.allocate.plan.configuration import Goal, Limits, is_upper
from trainwright.tasks.allocate.plan.cost import START_S
from trainwright.tasks.allocate.plan.search_space import MicroBatchRange, SearchSpace
from trainwright.tasks.allocate.search.collective_bound import CollectiveBound, LeastCollectives
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
        self._per_j = space.model.energy_price_per_j or 0.0

        def column(pick: Any) -> Any:
            values = [pick(kind) for kind in self._kinds]
            return np.array([math.nan if one is None else one for one in values], dtype=float)

        self._idle_w, self._price = (
            column(lambda kind: kind.idle_w),
            column(lambda kind: kind.price_per_s),
        )
        self._extra_w = column(lambda kind: kind.load_w) - self._idle_w
        self._spread = column(lambda kind: 1 + kind.curve.power_spread)
        self._steps = self._tightening.steps
        self._z, self._goal_z = self._tightening.z, self._tightening.goal_z
        self._collectives: dict[tuple[int, int], CollectiveBound] = {}

    def levels(self, accumulation: MicroBatchRange) -> Any:
        """Every time that the slowest rank can take: a sorted numpy array."""
        return self._tightening.tables(accumulation).levels

    def collectives(self, width: tuple[int, int]) -> CollectiveBound:
        """The bound of collectives for an interval of widths."""
        if width not in self._collectives:
            self._collectives[width] = CollectiveBound(self._topology, self.space.max_ranks, width)
        return self._collectives[width]

    def of(self, node: Subproblem, cutoff: float) -> Relaxation | None:
        """The bound of a subproblem; None: nothing in it is feasible and below `cutoff`."""
        import numpy as np

        # A kind has no more ranks than what the other kinds' fewest ranks leave.
        least, most = node.kinds
        spare = min(node.ranks[1], self.space.max_ranks) - least.sum()
        if spare < 0:
            return None
        most = most.clip(max=least + spare)
        high = np.minimum(node.high, most[self._topology.kind_of])
        node = replace(node, kinds=(least, most), high=high)
        if node.kinds_fixed:
            return self._with_fixed_kinds(node)
        in_time = self.goal in ("time", "upper_time")
        if in_time:
            node = self._tightening.without_low_levels(node)
        tight = self._tightening.of(node, cutoff)
        if tight is None:
            return None
        slowest_s = tight.busy_s * (1.0 if is_upper(self.goal) else self._least_factor(tight))
        upper_s = self._duration_s(node, tight, self._z, slowest_s)
        if upper_s > self._ends_s(tight) * (1 + TOLERANCE):
            return None
        paid: Relaxation | None = None
        if self.limits.budget < math.inf:
            paid = self._cheapest_cover(node, tight, "cost", self._z)
            if paid is None or paid.bound > self.limits.budget * (1 + TOLERANCE):
                return None
        if in_time:
            bound = self._duration_s(node, tight, self._goal_z, tight.busy_s)
            found: Relaxation | None = self._fastest(node, tight, bound, paid)
        else:
            what: Literal["energy", "cost"] = "energy" if self.goal == "energy" else "cost"
            found = self._cheapest_cover(node, tight, what, self._goal_z)
        if found is not None and node.accumulation[0] < node.accumulation[1]:
            found = found._replace(most_accumulation=self._most_accumulation(tight))
        return found

    def _most_accumulation(self, tight: Tightened) -> int:
        """More micro-batches can't pay for shares of at most these samples."""
        return max(
            self.space.most_micro_batches(kind, int(samples))
            for kind, samples, ranks in zip(self._kinds, tight.most, tight.counts.high, strict=True)
            if ranks > 0
        )

    def _least_factor(self, tight: Tightened) -> float:
        return float(self._tightening.factor[tight.counts.high > 0].min())

    def _duration_s(self, node: Subproblem, tight: Tightened, z: float, slowest_s: float) -> float:
        """A bound of the duration at z, if the slowest rank takes at least this long at z."""
        step_s = tight.collectives.at(z).step_s(slowest_s, node.accumulation[0])
        return self._steps * float(step_s) + START_S.at(z)

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
        step_s = float(collectives.at(self._goal_z).step_s(tight.level, node.accumulation[0]))
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
        self, node: Subproblem, tight: Tightened, what: Literal["energy", "cost"], z: float
    ) -> Relaxation | None:
        """The least energy or cost at z of ranks that hold the batch."""
        import numpy as np

        energy, cost = self._rates(what, z)
        unknown = np.isnan(energy[0] + cost)
        if (unknown & (tight.counts.low > 0)).any():
            return None
        leased, computing = (np.where(unknown, 0.0, one) for one in (energy[0] + cost, energy[1]))
        collectives, accumulation = tight.collectives.at(z), node.accumulation[0]
        hidden_s = (
            (collectives.total - collectives.tail) * accumulation / collectives.overlap
            if collectives.overlap
            else 0.0
        )
        tables = self._tightening.tables(node.accumulation)
        scale = self._tightening.scale
        if z == self._goal_z:  # the tables' times are at z
            factor, floor_s = np.ones(len(scale)), tight.busy_s
        else:
            factor, floor_s = self._tightening.factor, tight.busy_s * self._least_factor(tight)
        # The cost of a share bends where its rank becomes the slowest, and where collectives show.
        # The slowest rank's bend may be below all levels for a kind with a larger factor.
        bends = [bend / factor for bend in (floor_s, hidden_s) if bend > 0]
        choices = tables.between(np.ones(len(scale)), tight.most, bends)
        step_s = collectives.step_s(np.maximum(choices.times * factor, floor_s), accumulation)
        prices = leased * (self._steps * step_s + START_S.at(z))
        prices = prices + self._steps * computing * choices.times / scale
        counts = replace(tight.counts, high=np.where(unknown, 0.0, tight.counts.high))
        found = cover(prices, choices.samples, counts, self.space.batch)
        return found and Relaxation(
            found.price,
            node,
            found.counts,
            found.samples,
            self._looseness(found, leased, node, tight),
        )

    def _rates(self, what: Literal["energy", "cost"], z: float) -> tuple[tuple[Any, Any], Any]:
        """By kind, of energy and of rent: what each second costs at z.

        Of energy: for a second that a rank is leased, and for one (at the median) that it computes.
        """
        import numpy as np

        per_j = 1.0 if what == "energy" else self._per_j
        none = np.zeros(len(self._kinds))
        energy = (none, none)
        if per_j:
            spread = per_j * self._spread**z
            energy = (spread * self._idle_w, spread * self._extra_w * self._factor_at(z))
        return energy, none if what == "energy" else self._price

    def _factor_at(self, z: float) -> Any:
        return self._tightening.factor if z else 1.0

    def _looseness(
        self, found: Cover, leased: Any, node: Subproblem, tight: Tightened
    ) -> Looseness:
        """The relative additional cost of a cover's ranks if all waited for the slowest one and for
        the collectives of this many ranks."""
        import numpy as np

        there, collectives = found.counts > 1e-9, tight.collectives
        ranks, samples = found.counts[there], found.samples[there]
        times = self._tightening.tables(node.accumulation).times(
            np.round(np.where(there, found.samples, 1.0))
        )[there]
        busy_s = np.maximum(times, tight.busy_s)
        slowest = float(busy_s.max())
        size = min(max(1, math.ceil(float(ranks.sum()) - 1e-6)), node.ranks[1])
        at, accumulation = collectives.at(self._goal_z), node.accumulation[0]
        waits = float(at.step_s(slowest, accumulation)) - at.step_s(busy_s, accumulation)
        per_s = ranks * leased[there] * self._steps / max(found.price, 1e-300)
        spread = float(samples * ranks @ (1 - busy_s / slowest)) / self.space.batch
        loose = Looseness(
            float(per_s @ waits) + _SPREAD * spread,
            float(per_s.sum()) * self._slower(node, collectives, size, slowest),
            _FRACTION * float(np.abs(ranks - np.round(ranks)).sum()) / size,
        )
        if self.limits.deadline_s < math.inf:
            longer_s = node.collectives.at_least(size).upper.total - collectives.upper.total
            loose = loose._replace(ranks=loose.ranks + _SPREAD * longer_s / slowest)
        return loose

    def _slower(
        self, node: Subproblem, collectives: LeastCollectives, ranks: int, busy_s: float
    ) -> float:
        """By how much the collectives of this many ranks exceed the bound's."""
        most, z = node.collectives.at_least(ranks), self._goal_z
        accumulation = node.accumulation[0]
        found = float(most.at(z).step_s(busy_s, accumulation)) - float(
            collectives.at(z).step_s(busy_s, accumulation)
        )
        return min(max(0.0, found), 1e300)

    def _with_fixed_kinds(self, node: Subproblem) -> Relaxation | None:
        """The cost of these numbers of ranks by kind, with their best placement and split."""
        counts = node.kinds[0]
        size = int(counts.sum())
        if not max(1, node.ranks[0]) <= size <= node.ranks[1]:
            return None
        collectives = node.collectives.at(size, node.low, counts, counts)
        if math.isinf(collectives.median.total):
            return None
        ranks = [
            (kind, int(count)) for kind, count in zip(self._kinds, counts, strict=True) if count
        ]
        space, accumulation = self.space, node.accumulation
        kinds = space.rank_kinds(ranks, accumulation, collectives, self.limits)
        value = space.value_of(ranks, accumulation[0], collectives, self.goal, self.limits)
        bound = least_value(space.batch, kinds, value, by_upper=is_upper(self.goal))
        return None if math.isinf(bound) else Relaxation(bound, node, counts)
