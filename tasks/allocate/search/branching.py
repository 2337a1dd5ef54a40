"""Branching: divides a subproblem where its bound is loosest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trainwright.tasks.allocate.search.lower_bounds import LowerBounds
from trainwright.tasks.allocate.search.packing import pack
from trainwright.tasks.allocate.search.subproblem import Relaxation, Subproblem

_FEW = 24  # a subproblem with at most this many counts is enumerated


def enumerated(node: Subproblem, by_kind: Any) -> Iterator[tuple[int, ...]] | None:
    """All counts by group of a subproblem; None if they are too many. `by_kind` sums by kind."""
    import numpy as np

    one = node.accumulation[0] == node.accumulation[1]
    if not one or np.log(node.high - node.low + 1).sum() > math.log(_FEW):
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
    """Divides the subproblems of one search."""

    def __init__(self, bounds: LowerBounds) -> None:
        self._bounds = bounds
        self._topology = bounds.space.topology

    def children(self, relaxed: Relaxation) -> Iterator[Subproblem]:
        """The parts of a subproblem: they are disjoint, and together they are all of it."""
        node = relaxed.subproblem
        low, high = node.collectives.width
        if node.accumulation[0] < node.accumulation[1]:
            yield from self._by_accumulation(node, relaxed.most_accumulation)
            return
        if node.kinds_fixed and low == high:
            yield from self._by_group(node)
            return
        divisible = {
            "ranks": node.ranks[0] < node.ranks[1],
            "kinds": not node.kinds_fixed,
            "levels": node.levels[0] < node.levels[1],
            "width": low < high,  # last, because it limits only the placement
        }
        loose = {what: getattr(relaxed.loose, what, 0.0) for what, can in divisible.items() if can}
        loosest = max(loose, key=lambda what: loose[what])
        if node.kinds_fixed or loosest == "width":
            yield from self._by_width(node)
        elif loosest == "levels":
            yield from self._by_level(node)
        elif loosest == "ranks":
            yield from self._by_ranks(node, relaxed.counts)
        else:
            yield from self._by_kind(node, relaxed.counts)

    def _by_accumulation(self, node: Subproblem, most: int | None) -> Iterator[Subproblem]:
        """Halves by the logarithm of the number of micro-batches, up to this many."""
        low, high = node.accumulation
        high = max(low, high if most is None else min(high, most))
        middle = math.isqrt(low * high)
        # The last one is searched first: of a tie, the fewest micro-batches.
        for accumulation in ((middle + 1, high), (low, middle)):
            if accumulation[0] > accumulation[1]:
                continue
            levels = len(self._bounds.levels(accumulation))
            if levels:
                yield replace(node, accumulation=accumulation, levels=(0, levels - 1))

    def _by_width(self, node: Subproblem) -> Iterator[Subproblem]:
        """Halves by the most ranks on a machine."""
        low, high = node.collectives.width
        middle = (low + high) // 2
        for width in ((low, middle), (middle + 1, high)):
            room = self._bounds.collectives(width)
            ranks = (max(node.ranks[0], width[0]), node.ranks[1])
            yield replace(node, collectives=room, ranks=ranks, high=node.high.clip(max=room.room))

    def _by_level(self, node: Subproblem) -> Iterator[Subproblem]:
        """Halves by the logarithm of the slowest rank's time: short times as finely as long."""
        import numpy as np

        low, high = node.levels
        times = self._bounds.levels(node.accumulation)
        geometric_mean = math.sqrt(float(times[low]) * float(times[high]))
        middle = int(np.searchsorted(times, geometric_mean, "right")) - 1
        middle = min(max(middle, low), high - 1)
        yield replace(node, levels=(low, middle))
        yield replace(node, levels=(middle + 1, high))

    def _by_ranks(self, node: Subproblem, counts: Any) -> Iterator[Subproblem]:
        """Two parts: fewer ranks than the relaxed solution, and as many or more."""
        first, last = node.ranks
        size = math.ceil(float(counts.sum()) - 1e-6)
        middle = (
            size - 1
            if first < size <= last
            else min(max(int(math.sqrt(first * last)), first), last - 1)
        )
        yield replace(node, ranks=(first, middle))
        yield replace(node, ranks=(middle + 1, last))

    def _by_kind(self, node: Subproblem, counts: Any) -> Iterator[Subproblem]:
        """Halves by the ranks of one kind: a fractional one, with the widest interval."""
        import numpy as np

        fraction = np.abs(counts - np.round(counts))
        least, most = node.kinds
        at = max(
            np.flatnonzero(most > least),
            key=lambda one: (
                fraction[one] > 1e-6,
                counts[one] > least[one],
                most[one] - least[one],
                -one,
            ),
        )
        cut = min(max(math.floor(counts[at] + 1e-9), least[at]), most[at] - 1)
        places = np.flatnonzero(self._topology.kind_of == at)
        for low_count, high_count in ((least[at], cut), (cut + 1, most[at])):
            lows, highs = least.copy(), most.copy()
            lows[at], highs[at] = low_count, high_count
            low, high = node.low.copy(), node.high.copy()
            high[places] = high[places].clip(max=high_count)
            if len(places) == 1:  # the only group of its kind
                low[places] = low[places].clip(min=low_count)
            yield replace(node, low=low, high=high, kinds=(lows, highs))

    def _by_group(self, node: Subproblem) -> Iterator[Subproblem]:
        """Halves by the ranks of the group with the widest interval."""
        import numpy as np

        counts = pack(node.kinds[0], node.low, node.high, node.collectives)
        if counts is None:
            return
        at = int(np.argmax(node.high - node.low))
        cut = min(max(counts[at], node.low[at]), node.high[at] - 1)
        for low_count, high_count in ((node.low[at], cut), (cut + 1, node.high[at])):
            lows, highs = node.low.copy(), node.high.copy()
            lows[at], highs[at] = low_count, high_count
            yield replace(node, low=lows, high=highs)
