"""How a node is cut into parts: where its bound is loosest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trainwright.tasks.allocate.search.bounds import Bounds
from trainwright.tasks.allocate.search.packing import pack
from trainwright.tasks.allocate.search.subproblem import Bounded, Node

_FEW = 24  # counts are tried one by one where there are no more of them


def every(node: Node, by_kind: Any) -> Iterator[tuple[int, ...]] | None:
    """All counts by group of a node, where they are few; None where they are many. `by_kind` adds them up by kind."""
    import numpy as np

    if np.log(node.high - node.low + 1).sum() > math.log(_FEW):
        return None
    choices = [
        range(int(low), int(high) + 1) for low, high in zip(node.low, node.high, strict=True)
    ]

    def inside(counts: tuple[int, ...]) -> bool:
        found = by_kind(counts)
        return bool(
            (node.kinds[0] <= found).all()
            and (found <= node.kinds[1]).all()
            and node.ranks[0] <= sum(counts) <= node.ranks[1]
        )

    return (counts for counts in itertools.product(*choices) if inside(counts))


class Branching:
    """Cuts nodes."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds, self._space = bounds, bounds.space
        self._layout = bounds.space.layout

    def parts(self, bounded: Bounded) -> Iterator[Node]:
        """The parts of a node."""
        node, plan = bounded.node, bounded.counts
        low, high = node.floor.width
        if node.settled and low == high:
            yield from self._groups(node)
            return
        can_be_cut = {
            "levels": node.levels[0] < node.levels[1],
            "ranks": node.ranks[0] < node.ranks[1],
            "kinds": not node.settled,
            "width": low < high,  # it bounds which seats there are, not what a sum takes
        }
        loose = {what: getattr(bounded.loose, what, 0.0) for what, can in can_be_cut.items() if can}
        loosest = max(loose, key=lambda what: loose[what])
        if node.settled or loosest == "width":
            middle = (low + high) // 2
            for width in ((low, middle), (middle + 1, high)):
                floor = self._bounds.floor(width)
                ranks = (max(node.ranks[0], width[0]), node.ranks[1])
                yield replace(node, floor=floor, ranks=ranks, high=node.high.clip(max=floor.room))
        elif loosest == "levels":
            yield from self._levels(node)
        elif loosest == "ranks":
            first, last = node.ranks
            size = math.ceil(float(plan.sum()) - 1e-6)
            middle = (
                size - 1
                if first < size <= last
                else min(max(int(math.sqrt(first * last)), first), last - 1)
            )
            yield replace(node, ranks=(first, middle))
            yield replace(node, ranks=(middle + 1, last))
        else:
            yield from self._kinds(node, plan)

    def _levels(self, node: Node) -> Iterator[Node]:
        """Halves of the ratio, not of the difference: short steps are told apart as finely as long ones."""
        import numpy as np

        low, high = node.levels
        times = self._space.levels[node.accumulation]
        middle = (
            int(np.searchsorted(times, math.sqrt(float(times[low]) * float(times[high])), "right"))
            - 1
        )
        middle = min(max(middle, low), high - 1)
        yield replace(node, levels=(low, middle))
        yield replace(node, levels=(middle + 1, high))

    def _kinds(self, node: Node, plan: Any) -> Iterator[Node]:
        """Halves by the number of one kind: one of which the bound has a part, and the most."""
        import numpy as np

        part = np.abs(plan - np.round(plan))
        least, most = node.kinds
        at = max(
            np.flatnonzero(most > least),
            key=lambda one: (
                part[one] > 1e-6,
                plan[one] > least[one],
                most[one] - least[one],
                -one,
            ),
        )
        cut = min(max(math.floor(plan[at] + 1e-9), least[at]), most[at] - 1)
        places = np.flatnonzero(self._layout.kind_of == at)
        for low_count, high_count in ((least[at], cut), (cut + 1, most[at])):
            lows, highs = least.copy(), most.copy()
            lows[at], highs[at] = low_count, high_count
            low, high = node.low.copy(), node.high.copy()
            high[places] = high[places].clip(max=high_count)
            if len(places) == 1:  # the only group of its kind
                low[places] = low[places].clip(min=low_count)
            yield replace(node, low=low, high=high, kinds=(lows, highs))

    def _groups(self, node: Node) -> Iterator[Node]:
        """Halves by the count of one group, where the numbers by kind are settled."""
        import numpy as np

        counts = pack(node.kinds[0], node.low, node.high, node.floor)
        if counts is None:
            return
        at = int(np.argmax(node.high - node.low))
        cut = min(max(counts[at], node.low[at]), node.high[at] - 1)
        for low_count, high_count in ((node.low[at], cut), (cut + 1, node.high[at])):
            lows, highs = node.low.copy(), node.high.copy()
            lows[at], highs[at] = low_count, high_count
            yield replace(node, low=lows, high=highs)
