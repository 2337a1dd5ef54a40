"""A part of the space that is searched: an interval of everything that is chosen.

A node is an accumulation, a width (the most ranks on a machine), an interval of water levels, one of the number of ranks, and
one of each count, by kind of device and by group. What its configurations take at least: `bounds`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from trainwright.tasks.allocate.search.collective_floor import CollectiveFloor


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


class Looseness(NamedTuple):
    """By what share of the value each of a node's intervals loosens its bound."""

    levels: float = 0.0
    ranks: float = 0.0
    kinds: float = 0.0


class Bounded(NamedTuple):
    """What a node's configurations take at least, and what comes near it (real numbers)."""

    value: float
    node: Node
    """Cut to size."""
    counts: Any
    """By kind."""
    samples: Any = None
    """Of a rank of each kind. None: the counts are settled."""
    loose: Looseness = Looseness()
    packed: Any = None
    """Counts by group on the fewest machines."""
