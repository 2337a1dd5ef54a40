"""The best configuration for a global batch: branch and bound over accumulation, width, water level, ranks and counts.

A node (`node`) whose bound (`bounds`) is not below the best that was found is dropped; the others are cut (`branching`). What is
found when no node is left is the best there is; where the work is cut short, `Found.bound` says how much better anything else can
be. The work is counted in nodes, not in seconds: the same question has the same answer.
"""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Any

from trainwright.tasks.allocate.plan.configuration import (
    EXACT,
    Configuration,
    Found,
    Goal,
    Limits,
    Space,
)
from trainwright.tasks.allocate.search.bounds import Bounds
from trainwright.tasks.allocate.search.branching import Branching, every
from trainwright.tasks.allocate.search.packing import pack
from trainwright.tasks.allocate.search.subproblem import Bounded, Node

MOST_NODES = 3_000
EXACT_NODES = 1_000
"""Beyond these, what is found may be worse than the best there is by a share of `_CLOSE`."""
_CLOSE = 1e-3


class Search:
    """One search: what is minimised within which limits, and what was found so far."""

    def __init__(self, space: Space, goal: Goal, limits: Limits, cutoff: float = math.inf) -> None:
        self.space, self.goal, self.limits, self.cutoff = space, goal, limits, cutoff
        self.best: Configuration | None = None
        self.seen: dict[object, list[Configuration]] = {}
        self._tried: set[object] = set()
        self._bounds = Bounds(space, goal, limits)
        self._branching = Branching(self._bounds)

    def run(self, most_nodes: int = MOST_NODES) -> Found:
        """Search until nothing can be better, or this many nodes were looked at."""
        heap: list[tuple[float, int, Bounded]] = []
        ticket = itertools.count()

        def push(node: Node, floor: float) -> None:
            bounded = self._bounds.of(node, self._ceiling())
            if bounded is not None and (bound := max(floor, bounded.value)) < self._ceiling():
                self._try(bounded)
                if bounded.packed is not None:
                    self._look(tuple(bounded.packed.astype(int).tolist()), node.accumulation)
                if bound < self._ceiling():
                    heapq.heappush(heap, (bound, -next(ticket), bounded))

        for node in self._roots():
            push(node, 0.0)
        nodes = 0
        while heap and self._matters(heap[0][0], nodes) and nodes < most_nodes:
            bound, _, bounded = heapq.heappop(heap)
            node = bounded.node
            nodes += 1
            few = every(node, self.space.layout.by_kind)
            if few is not None:
                for counts in few:
                    self._look(counts, node.accumulation)
                continue
            for child in self._branching.parts(bounded):
                push(child, bound)
        bound = min(heap[0][0] if heap else math.inf, self._ceiling())
        if self.best is not None:
            bound = min(bound, self.best.value(self.goal))
        return Found(
            self.best, bound, nodes, list(itertools.chain.from_iterable(self.seen.values()))
        )

    def _roots(self) -> list[Node]:
        """A node for each width and accumulation."""
        import numpy as np

        space, layout = self.space, self.space.layout
        if space.least > space.most:
            return []
        widest = max((site.size for site in layout.sites if not site.local), default=0)
        local = any(site.local for site in layout.sites)
        found = []
        for width in [(0, 0)] * local + [(1, min(widest, space.most))] * bool(widest):
            floor = self._bounds.floor(width)
            for accumulation in space.accumulations:
                levels = len(space.levels[accumulation])
                usable = np.array(
                    [len(space.tables[accumulation][kind.index]) > 0 for kind in layout.kinds]
                )
                if levels:
                    high = np.where(usable[layout.kind_of], floor.room, 0.0)
                    ranks = (max(space.least, width[0]), int(min(space.most, high.sum())))
                    kinds = (layout.by_kind(0 * high), layout.by_kind(high))
                    found.append(
                        Node(accumulation, floor, (0, levels - 1), ranks, 0 * high, high, kinds)
                    )
        return found

    def _ceiling(self) -> float:
        """What a bound must be below for its node to matter."""
        best = self.best.value(self.goal) if self.best else math.inf
        return min(best * (1 - EXACT), self.cutoff)

    def _matters(self, bound: float, nodes: int) -> bool:
        """Whether a node with this bound is looked at, after so many."""
        close = _CLOSE if self.best is not None and nodes >= EXACT_NODES else 0.0
        return bound < self._ceiling() * (1 - close)

    def _try(self, bounded: Bounded) -> None:
        """Look at whole counts near a bound's."""
        import numpy as np

        node, plan, samples = bounded.node, bounded.counts, bounded.samples
        if samples is None:
            self._pack(node, plan)
            return
        down = np.floor(plan + 1e-9)
        parts = np.flatnonzero(plan - down > 1e-9)
        up = down.copy()
        up[parts] += 1
        missing = self.space.batch - float(samples @ down)
        one_more = down.copy()
        if missing > 0 and len(parts):
            enough = [one for one in parts if samples[one] >= missing] or [
                max(parts, key=lambda one: samples[one])
            ]
            one_more[min(enough, key=lambda one: (samples[one], one))] += 1
        self._pack(node, one_more)
        self._pack(node, up)

    def _pack(self, node: Node, by_kind: Any) -> None:
        """Look at these counts by kind on few machines, and on many."""
        import numpy as np

        narrowest = self._bounds.floor((node.floor.width[0], node.floor.width[0]))
        for floor in (node.floor, narrowest):
            high = np.minimum(node.high, floor.room)
            key = (
                tuple(by_kind),
                node.accumulation,
                floor.width,
                node.low.tobytes(),
                high.tobytes(),
            )
            if key not in self._tried and (node.low <= high).all():
                self._tried.add(key)
                counts = pack(by_kind, node.low, high, floor)
                if counts is not None:
                    self._look(tuple(counts.astype(int).tolist()), node.accumulation)

    def _look(self, counts: tuple[int, ...], accumulation: int) -> None:
        key = (counts, accumulation)
        if key in self.seen:
            return
        self.seen[key] = self.space.configure(counts, accumulation)
        for one in self.seen[key]:
            value = one.value(self.goal)
            if math.isinf(value) or one.excess(self.limits) > 0:
                continue
            if (
                self.best is None
                or value < self.best.value(self.goal)
                or _comes_before(one, self.best, value, self.goal)
            ):
                self.best = one


def _comes_before(one: Configuration, other: Configuration, value: float, goal: Goal) -> bool:
    """Of two with the same value: fewer ranks, less accumulation, earlier groups."""
    if value > other.value(goal):
        return False

    def key(it: Configuration) -> tuple[Any, ...]:
        return (it.size, it.accumulation, tuple(-count for count in it.counts), it.seating)

    return key(one) < key(other)
