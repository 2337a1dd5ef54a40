"""The best configuration for a global batch: branch and bound over accumulation, width, water level, ranks and counts.

A node is an accumulation, a width (the most ranks on a machine), an interval of water levels, one of the number of ranks, and
one of each count, by kind of device and by group. With W >= w1 every rank of kind k is busy for τ_k at least (what it finishes
before w1), and with W <= w2 it takes s_k samples at most, so what the ranks cost is at least that of the cheapest cover of the
batch, Σ s_k · n_k >= B, at τ_k each (`bounds.cover`), with collectives that take what the node's ranks take at least
(`bounds.CollectiveFloor`). A node whose bound is not below the best that was found is dropped; the others are cut where their
bound is loosest. What is found when no node is left is the best there is; where the work is cut short, `Found.bound` says how
much better anything else can be. The work is counted in nodes, not in seconds: the same question has the same answer.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from trainwright.tasks.allocate.bounds import CollectiveFloor, cover, ranges, roomiest
from trainwright.tasks.allocate.configuration import EXACT, Configuration, Found, Goal, Limits, Space
from trainwright.tasks.allocate.cost import START_S, deviations

_LEVEL = 0.05  # levels and ranks are cut first while they loosen the bound by more than this share of one rank
_FEW = 24  # counts are tried one by one where there are no more of them
MOST_NODES = 3_000


@dataclass(frozen=True)
class _Node:
    accumulation: int
    floor: CollectiveFloor
    levels: tuple[int, int]
    ranks: tuple[int, int]
    low: Any
    high: Any
    """Counts by group."""
    kinds: tuple[Any, Any]
    """Least and most ranks by kind: alike devices of several sites are told apart only once their number is settled."""


class Search:
    """One search: what is minimised within which limits, and what was found so far."""

    def __init__(self, space: Space, goal: Goal, limits: Limits, cutoff: float = math.inf) -> None:
        import numpy as np

        self.space, self.goal, self.limits = space, goal, limits
        self.cutoff = cutoff
        self.best: Configuration | None = None
        self.seen: dict[object, list[Configuration]] = {}
        groups = space.layout.groups
        model = space.model
        self._kinds = space.layout.kinds
        places = {kind.index: place for place, kind in enumerate(self._kinds)}
        self._kind_at = np.array([places[group.kind.index] for group in groups], dtype=int)
        self._groups_of_kind = [np.flatnonzero(self._kind_at == place) for place in range(len(self._kinds))]
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

    def run(self, most_nodes: int = MOST_NODES) -> Found:
        """Search until nothing can be better, or this many nodes were looked at."""
        import numpy as np

        heap: list[tuple[float, int, _Node, Any]] = []
        ticket = itertools.count()

        def push(node: _Node, floor: float) -> None:
            bounded = self._bound(node)
            if bounded is not None:
                bound = max(floor, bounded[0])
                if bound < self._ceiling():
                    self._try(bounded[2], bounded[1])
                    heapq.heappush(heap, (bound, -next(ticket), bounded[2], bounded[1]))

        sites = self.space.layout.sites
        widest = max((site.size for site in sites if not site.local), default=0)
        widths = [(0, 0)] * any(site.local for site in sites) + ranges(min(widest, self.space.most))
        for width in widths if self.space.least <= self.space.most else []:
            floor = CollectiveFloor(self.space.layout, self.space.most, width)
            for accumulation in self.space.accumulations:
                levels = len(self.space.levels[accumulation])
                usable = np.array([len(self.space.tables[accumulation][kind.index]) > 0 for kind in self._kinds])
                if levels:
                    high = np.where(usable[self._kind_at], floor.room, 0.0)
                    ranks = (self.space.least, int(min(self.space.most, high.sum())))
                    push(
                        _Node(
                            accumulation, floor, (0, levels - 1), ranks, 0 * high, high, self._by_kind(0 * high, high)
                        ),
                        0.0,
                    )
        nodes = 0
        while heap and heap[0][0] < self._ceiling() and nodes < most_nodes:
            bound, _, node, plan = heapq.heappop(heap)
            nodes += 1
            for child in self._branch(node, plan):
                push(child, bound)
        bound = min(heap[0][0] if heap else math.inf, self._ceiling())
        if self.best is not None:
            bound = min(bound, self.best.value(self.goal))
        return Found(self.best, bound, nodes, list(itertools.chain.from_iterable(self.seen.values())))

    def _by_kind(self, low: Any, high: Any) -> tuple[Any, Any]:
        import numpy as np

        kinds = len(self._kinds)
        return np.bincount(self._kind_at, low, kinds), np.bincount(self._kind_at, high, kinds)

    def _ceiling(self) -> float:
        """What a bound must be below for its node to matter."""
        best = self.best.value(self.goal) if self.best else math.inf
        return min(best * (1 - EXACT), self.cutoff)

    def _levels(self, accumulation: int, at: int) -> tuple[Any, Any]:
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

    def _bound(self, node: _Node) -> tuple[float, Any, _Node] | None:
        """What a node's configurations take at least, counts that come near it, the node cut to size. None: none counts."""
        import numpy as np

        least = max(node.ranks[0], int(node.kinds[0].sum()))
        if least > node.ranks[1] or least > self.space.most:
            return None
        if self.goal in ("time", "upper_time"):
            node = self._tightened(node)
        level = float(self.space.levels[node.accumulation][node.levels[0]])
        samples, _ = self._levels(node.accumulation, node.levels[1])
        _, busy = self._levels(node.accumulation, node.levels[0])
        collective, collective_high = node.floor.at(max(1, least), node.low)
        if math.isinf(collective):
            return None  # no machines for so many
        slowest = np.maximum(level, busy)
        median = self._steps * (slowest + collective) + START_S.median
        slowest_high = np.maximum(busy * self._high_factor, level * float(self._high_factor.min()))
        longest = self._steps * (slowest_high + collective_high) + START_S.high
        late = self._upper(median, longest)
        deadline = np.minimum(self._window, self.limits.deadline_s)
        if self.goal == "upper_time":
            deadline = np.minimum(deadline, self._ceiling())
        in_time = late <= deadline * (1 + EXACT)
        room = np.where(in_time[self._kind_at], node.high, 0.0)
        held_low, held_high = self._by_kind(node.low, room)
        low, high = np.maximum(node.kinds[0], held_low), np.minimum(node.kinds[1], held_high)
        if (low > high).any():
            return None
        used = high > 0
        if not used.any():
            return None
        # What every configuration of the node takes: its slowest group of those that it holds for sure counts.
        sure = low > 0
        least_step = max(level, float(busy[used].min()), float(busy[sure].max()) if sure.any() else 0.0)
        seconds = self._steps * (least_step + collective) + START_S.median
        factor = float(self._high_factor[used].min())
        seconds_high = self._steps * (least_step * factor + collective_high) + START_S.high
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
            return cover(
                np.where(unknown, 0.0, prices)[used], samples[used], low[used], np.where(unknown, 0.0, high)[used],
                self.space.batch, least, node.ranks[1],
            )  # fmt: skip

        spread = min(
            factor, START_S.high / START_S.median, collective_high / collective if collective > 0 else math.inf
        )
        result: tuple[float, Any] | None
        if self.limits.budget < math.inf or self.goal in ("cost", "upper_cost"):
            result = covered(self._cost_held, self._cost_busy)
            if result is None:
                return None
            upper_cost = result[0] * max(1.0, spread) ** self._z
            if upper_cost > self.limits.budget * (1 + EXACT):
                return None
            value = result[0] if self.goal == "cost" else upper_cost
        if self.goal == "energy":
            result = covered(self._energy_held, self._energy_busy)
        elif self.goal in ("time", "upper_time"):
            plan = roomiest(samples[used], low[used], high[used], self.space.batch, least, node.ranks[1])
            result = None if plan is None else (0.0, plan)
        if result is None:
            return None
        if self.goal == "energy":
            value = result[0]
        elif self.goal in ("time", "upper_time"):
            value = seconds if self.goal == "time" else upper_s
        counts = np.zeros(len(high))
        counts[used] = result[1]
        return value, counts, node

    def _tightened(self, node: _Node) -> _Node:
        """The node without the levels at which its ranks could not hold the batch, however they are chosen."""
        import numpy as np

        low, high = node.levels
        least, most = node.kinds
        while low < high:
            middle = (low + high) // 2
            samples, _ = self._levels(node.accumulation, middle)
            order = np.argsort(-samples, kind="stable")
            ends = np.minimum(np.cumsum((most - least)[order]), node.ranks[1] - least.sum())
            held = float((samples * least).sum() + (samples[order] * np.diff(ends, prepend=0.0)).sum())
            low, high = (low, middle) if held >= self.space.batch else (middle + 1, high)
        return replace(node, levels=(low, node.levels[1]))

    def _upper(self, median: Any, high: Any) -> Any:
        """A bound of `cost.upper` from bounds of its two arguments: it grows with both, up to a confidence of 95 %."""
        if self._z <= 1:
            return median ** (1 - self._z) * high**self._z
        return high

    def _try(self, node: _Node, plan: Any) -> None:
        """Look at whole counts near a bound's."""
        import numpy as np

        samples, _ = self._levels(node.accumulation, node.levels[1])
        down = np.floor(plan + 1e-9)
        missing = self.space.batch - float((samples * down).sum())
        parts = sorted(np.flatnonzero(plan - down > 1e-9), key=lambda one: (samples[one], one))
        if missing > 0 and parts:
            enough = [one for one in parts if samples[one] >= missing]
            for one in enough[:1] or parts:
                down[one] += 1
        counts = self._spread(down, node)
        if counts is not None:
            self._look(tuple(int(one) for one in counts), node.accumulation)

    def _spread(self, by_kind: Any, node: _Node) -> Any | None:
        """Counts by group with these by kind: as many as can be where there is most room. None where there is too little."""
        counts = node.low.copy()
        for count, places in zip(by_kind, self._groups_of_kind, strict=True):
            left = count - counts[places].sum()
            for place in sorted(places, key=lambda one: (-node.high[one], one)) if left > 0 else []:
                taken = min(left, node.high[place] - counts[place])
                counts[place] += taken
                left -= taken
            if left:
                return None
        return counts

    def _look(self, counts: tuple[int, ...], accumulation: int) -> None:
        key = (counts, accumulation)
        if key in self.seen:
            return
        self.seen[key] = self.space.configure(counts, accumulation)
        for one in self.seen[key]:
            value = one.value(self.goal)
            if math.isinf(value) or one.excess(self.limits) > 0:
                continue
            if self.best is None or self._key(one) < self._key(self.best):
                self.best = one

    def _key(self, one: Configuration) -> tuple[Any, ...]:
        return (one.value(self.goal), one.size, one.accumulation, tuple(-count for count in one.counts), one.seating)

    def _branch(self, node: _Node, plan: Any) -> Iterator[_Node]:
        """The parts of a node, cut where its bound is loosest; none where all its counts were looked at."""
        import numpy as np

        widths = node.high - node.low + 1
        if np.log(widths).sum() <= math.log(_FEW):
            choices = [range(int(low), int(high) + 1) for low, high in zip(node.low, node.high, strict=True)]
            for counts in itertools.product(*choices):
                by_kind, _ = self._by_kind(counts, counts)
                inside = (node.kinds[0] <= by_kind).all() and (by_kind <= node.kinds[1]).all()
                if inside and node.ranks[0] <= sum(counts) <= node.ranks[1]:
                    self._look(counts, node.accumulation)
            return
        low, high = node.levels
        times = self.space.levels[node.accumulation]
        collective, _ = node.floor.at(max(1, node.ranks[0]), node.low)
        step = float(times[low]) + collective
        loose_level = (float(times[high]) - float(times[low])) / step
        top = min(node.ranks[1], len(node.floor.median) - 1)
        loose_ranks = (min(float(node.floor.median[top]), 1e300) - float(node.floor.median[node.ranks[0]])) / step
        part = np.abs(plan - np.round(plan))
        # Counts matter to the time only through the level that they reach.
        loose_count = 0.0 if self.goal in ("time", "upper_time") else 1.0 / max(1.0, float(plan.sum()))
        if low < high and loose_level >= max(loose_ranks, _LEVEL * loose_count):
            # Half of the ratio, not of the difference: short steps are told apart as finely as long ones.
            middle = int(np.searchsorted(times, math.sqrt(float(times[low]) * float(times[high])), "right")) - 1
            middle = min(max(middle, low), high - 1)
            yield replace(node, levels=(low, middle))
            yield replace(node, levels=(middle + 1, high))
            return
        if node.ranks[0] < node.ranks[1] and loose_ranks >= _LEVEL * loose_count:
            middle = int(math.sqrt(node.ranks[0] * node.ranks[1]))
            middle = min(max(middle, node.ranks[0]), node.ranks[1] - 1)
            yield replace(node, ranks=(node.ranks[0], middle))
            yield replace(node, ranks=(middle + 1, node.ranks[1]))
            return
        least, most = node.kinds
        open_kinds = np.flatnonzero(most > least)
        if len(open_kinds):
            at = max(
                open_kinds, key=lambda one: (part[one] > 1e-6, plan[one] > least[one], most[one] - least[one], -one)
            )
            cut = min(max(math.floor(plan[at] + 1e-9), least[at]), most[at] - 1)
            for low_count, high_count in ((least[at], cut), (cut + 1, most[at])):
                lows, highs = least.copy(), most.copy()
                lows[at], highs[at] = low_count, high_count
                yield self._within_kinds(node, lows, highs, at)
            return
        settled = self._spread(least, node)
        if settled is None:
            return
        at = np.argmax(node.high - node.low)
        cut = min(max(settled[at], node.low[at]), node.high[at] - 1)
        for low_count, high_count in ((node.low[at], cut), (cut + 1, node.high[at])):
            lows, highs = node.low.copy(), node.high.copy()
            lows[at], highs[at] = low_count, high_count
            yield replace(node, low=lows, high=highs)

    def _within_kinds(self, node: _Node, lows: Any, highs: Any, at: Any) -> _Node:
        """The node with these numbers by kind, which are also those of a group that is the only one of its kind."""
        places = self._groups_of_kind[at]
        low, high = node.low.copy(), node.high.copy()
        high[places] = high[places].clip(max=highs[at])
        if len(places) == 1:
            low[places] = low[places].clip(min=lows[at])
        return replace(node, low=low, high=high, kinds=(lows, highs))
