"""How a node is cut into parts: where its bound is loosest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from trainwright.tasks.allocate.floor import CollectiveFloor
from trainwright.tasks.allocate.node import Bounds, Node
from trainwright.tasks.allocate.packing import pack

_LEVEL = 0.05  # levels and ranks are cut first while they loosen the bound by more than this share of one rank
_FEW = 24  # counts are tried one by one where there are no more of them


def every(node: Node, by_kind: Any) -> Iterator[tuple[int, ...]] | None:
    """All counts by group of a node, where they are few; None where they are many. `by_kind` adds them up by kind."""
    import numpy as np

    if np.log(node.high - node.low + 1).sum() > math.log(_FEW):
        return None
    choices = [range(int(low), int(high) + 1) for low, high in zip(node.low, node.high, strict=True)]

    def inside(counts: tuple[int, ...]) -> bool:
        found = by_kind(counts)
        return bool(
            (node.kinds[0] <= found).all()
            and (found <= node.kinds[1]).all()
            and node.ranks[0] <= sum(counts) <= node.ranks[1]
        )

    return (counts for counts in itertools.product(*choices) if inside(counts))


class Branching:
    """Cuts nodes. Parts of a width are made once."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds, self._space = bounds, bounds.space
        self._layout = bounds.space.layout
        self._parts: dict[CollectiveFloor, list[CollectiveFloor]] = {}

    def parts(self, node: Node, plan: Any) -> Iterator[Node]:
        """The parts of a node, near whose bound lie these counts by kind."""
        if not node.settled:
            yield from self._levels_or_ranks(node, plan) or self._kinds(node, plan)
        elif node.floor.width[0] < node.floor.width[1]:
            for floor in self._parts.get(node.floor) or self._narrowed(node.floor):
                yield replace(node, floor=floor, high=node.high.clip(max=floor.room))
        else:
            yield from self._groups(node)

    def _narrowed(self, floor: CollectiveFloor) -> list[CollectiveFloor]:
        self._parts[floor] = floor.parts()
        return self._parts[floor]

    def _levels_or_ranks(self, node: Node, plan: Any) -> list[Node]:
        """Halves by level or by number of ranks; none where the counts loosen the bound more."""
        import numpy as np

        low, high = node.levels
        times = self._space.levels[node.accumulation]
        step = float(times[low]) + node.floor.at(max(1, node.ranks[0]), node.low, node.kinds[0]).median
        loose_level = (float(times[high]) - float(times[low])) / step
        floor = node.floor.median
        top = min(node.ranks[1], len(floor) - 1)
        loose_ranks = (min(float(floor[top]), 1e300) - float(floor[node.ranks[0]])) / step
        # Counts matter to the time only through the level that they reach.
        loose_count = 0.0 if self._bounds.goal in ("time", "upper_time") else 1.0 / max(1.0, float(plan.sum()))
        if low < high and loose_level >= max(loose_ranks, _LEVEL * loose_count):
            # Half of the ratio, not of the difference: short steps are told apart as finely as long ones.
            middle = int(np.searchsorted(times, math.sqrt(float(times[low]) * float(times[high])), "right")) - 1
            middle = min(max(middle, low), high - 1)
            return [replace(node, levels=(low, middle)), replace(node, levels=(middle + 1, high))]
        if node.ranks[0] < node.ranks[1] and loose_ranks >= _LEVEL * loose_count:
            middle = int(math.sqrt(node.ranks[0] * node.ranks[1]))
            middle = min(max(middle, node.ranks[0]), node.ranks[1] - 1)
            return [replace(node, ranks=(node.ranks[0], middle)), replace(node, ranks=(middle + 1, node.ranks[1]))]
        return []

    def _kinds(self, node: Node, plan: Any) -> Iterator[Node]:
        """Halves by the number of one kind: one of which the bound has a part, and the most."""
        import numpy as np

        part = np.abs(plan - np.round(plan))
        least, most = node.kinds
        at = max(
            np.flatnonzero(most > least),
            key=lambda one: (part[one] > 1e-6, plan[one] > least[one], most[one] - least[one], -one),
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

        counts = pack(
            node.kinds[0], node.low, node.high, node.floor.holds, self._layout.site_of, self._layout.kind_of
        )
        if counts is None:
            return
        at = int(np.argmax(node.high - node.low))
        cut = min(max(counts[at], node.low[at]), node.high[at] - 1)
        for low_count, high_count in ((node.low[at], cut), (cut + 1, node.high[at])):
            lows, highs = node.low.copy(), node.high.copy()
            lows[at], highs[at] = low_count, high_count
            yield replace(node, low=lows, high=highs)
