"""The best configuration for a global batch, by branch and bound.

Branches over accumulation, width, the slowest rank's time, number of ranks, and ranks by kind and
group; `plan.cheapest_split` finds the split of the batch. A
subproblem whose lower bound (`lower_bounds`) is not below the incumbent is pruned; the others are
divided (`branching`), the lowest bound first. When none is left, the incumbent is optimal. If the
search is truncated, `SearchResult.bound` says how much better any other configuration can be. The
effort is counted in nodes, not in seconds, so the same request always has the same result.
"""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Any

from trainwright.tasks.allocate.plan.confidence import TOLERANCE
from trainwright.tasks.allocate.plan.configuration import (
    Configuration,
    Goal,
    Limits,
    comes_before,
)
from trainwright.tasks.allocate.plan.search_request import EXACT_NODES, MAX_NODES, SearchResult
from trainwright.tasks.allocate.plan.search_space import SearchSpace
from trainwright.tasks.allocate.search.branching import Branching, enumerated
from trainwright.tasks.allocate.search.lower_bounds import LowerBounds
from trainwright.tasks.allocate.search.packing import pack
from trainwright.tasks.allocate.search.subproblem import Relaxation, Subproblem

_ACCEPTED_GAP = 1e-3
"""After `EXACT_NODES` nodes, an incumbent relatively this close to its bound is accepted."""


class BranchAndBound:
    """One search: the goal, the limits, and the incumbent."""

    def __init__(
        self, space: SearchSpace, goal: Goal, limits: Limits, cutoff: float = math.inf
    ) -> None:
        self.space, self.goal, self.limits, self.cutoff = space, goal, limits, cutoff
        self.incumbent: Configuration | None = None
        self._seen: dict[object, list[Configuration]] = {}
        self._least_split = math.inf
        """A lower bound of the splits that were not proved worse than the one found."""
        self._packed: set[object] = set()
        self._bounds = LowerBounds(space, goal, limits)
        self._branching = Branching(self._bounds)

    def run(self, max_nodes: int = MAX_NODES) -> SearchResult:
        """Search until the incumbent is optimal, or this many nodes were expanded."""
        heap: list[tuple[float, int, Relaxation]] = []
        ticket = itertools.count()

        def push(node: Subproblem, parent_bound: float) -> None:
            relaxed = self._bounds.of(node, self._upper_bound())
            if relaxed is None:
                return
            bound = max(parent_bound, relaxed.bound)
            if bound < self._upper_bound():
                self._round(relaxed)
                if bound < self._upper_bound():
                    heapq.heappush(heap, (bound, -next(ticket), relaxed))

        for root in self._roots():
            push(root, 0.0)
        nodes = 0
        while heap and self._promising(heap[0][0], nodes) and nodes < max_nodes:
            bound, _, relaxed = heapq.heappop(heap)
            nodes += 1
            few = enumerated(relaxed.subproblem, self.space.topology.by_kind)
            if few is not None:
                for counts in few:
                    self._evaluate(counts, relaxed.subproblem.accumulation[0])
                continue
            for child in self._branching.children(relaxed):
                push(child, bound)
        bound = min(heap[0][0] if heap else math.inf, self._upper_bound(), self._least_split)
        if self.incumbent is not None:
            bound = min(bound, self.incumbent.value(self.goal))
        seen = list(itertools.chain.from_iterable(self._seen.values()))
        return SearchResult(self.incumbent, bound, nodes, seen)

    def _roots(self) -> list[Subproblem]:
        """A subproblem for each accumulation: on this machine alone, and with others."""
        import numpy as np

        space, topology = self.space, self.space.topology
        if space.min_ranks > space.max_ranks:
            return []
        widest = max((site.size for site in topology.sites if not site.local), default=0)
        local = any(site.local for site in topology.sites)
        found = []
        for width in [(0, 0)] * local + [(1, min(widest, space.max_ranks))] * bool(widest):
            collectives = self._bounds.collectives(width)
            for accumulation in space.accumulations:
                levels, times = len(self._bounds.levels(accumulation)), space.times(accumulation)
                if not levels:
                    continue
                usable = np.array([len(times[kind.index].seconds) > 0 for kind in topology.kinds])
                high = np.where(usable[topology.kind_of], collectives.room, 0.0)
                ranks = (max(space.min_ranks, width[0]), int(min(space.max_ranks, high.sum())))
                kinds = (topology.by_kind(0 * high), topology.by_kind(high))
                found.append(
                    Subproblem(
                        accumulation, collectives, (0, levels - 1), ranks, 0 * high, high, kinds
                    )
                )
        return found

    def _upper_bound(self) -> float:
        """The value below which a bound must be for its subproblem to be kept."""
        best = self.incumbent.value(self.goal) if self.incumbent else math.inf
        return min(best * (1 - TOLERANCE), self.cutoff)

    def _promising(self, bound: float, nodes: int) -> bool:
        """Whether a subproblem with this bound is expanded after this many nodes."""
        late = self.incumbent is not None and nodes >= EXACT_NODES
        return bound < self._upper_bound() * (1 - (_ACCEPTED_GAP if late else 0.0))

    def _round(self, relaxed: Relaxation) -> None:
        """Evaluate whole counts near a relaxed solution (a primal heuristic)."""
        import numpy as np

        node, relaxed_counts, samples = relaxed.subproblem, relaxed.counts, relaxed.samples
        if node.accumulation[0] < node.accumulation[1]:
            return
        if samples is None:
            self._pack(node, relaxed_counts)
        else:
            down = np.floor(relaxed_counts + 1e-9)
            fractional = np.flatnonzero(relaxed_counts - down > 1e-9)
            up = down.copy()
            up[fractional] += 1
            missing = self.space.batch - float(samples @ down)
            one_more = down.copy()
            if missing > 0 and len(fractional):
                enough = [one for one in fractional if samples[one] >= missing] or [
                    max(fractional, key=lambda one: samples[one])
                ]
                one_more[min(enough, key=lambda one: (samples[one], one))] += 1
            self._pack(node, one_more)
            self._pack(node, up)
        if relaxed.packed is not None:
            self._evaluate(tuple(relaxed.packed.astype(int).tolist()), node.accumulation[0])

    def _pack(self, node: Subproblem, by_kind: Any) -> None:
        """Evaluate these counts by kind on few machines, and spread over many."""
        import numpy as np

        width = node.collectives.width[0]
        narrowest = self._bounds.collectives((width, width))
        for room in (node.collectives, narrowest):
            high = np.minimum(node.high, room.room)
            key = (
                tuple(by_kind),
                node.accumulation,
                room.width,
                node.low.tobytes(),
                high.tobytes(),
            )
            if key not in self._packed and (node.low <= high).all():
                self._packed.add(key)
                counts = pack(by_kind, node.low, high, room)
                if counts is not None:
                    self._evaluate(tuple(counts.astype(int).tolist()), node.accumulation[0])

    def _evaluate(self, counts: tuple[int, ...], accumulation: int) -> None:
        """Compute the cost of these counts, once, and keep the best as the incumbent."""
        key = (counts, accumulation)
        if key in self._seen:
            return
        found = list(self.space.configure(counts, accumulation, self.goal, self.limits))
        self._seen[key] = [one for one, _ in found]
        for one, bound in found:
            value = math.inf if one.excess(self.limits) > 0 else one.value(self.goal)
            if bound < value * (1 - TOLERANCE):
                self._least_split = min(self._least_split, bound)
            if math.isinf(value):
                continue
            if self.incumbent is None or comes_before(one, self.incumbent, self.goal):
                self.incumbent = one
