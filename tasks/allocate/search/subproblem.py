"""A node of the branch-and-bound tree: an interval for every choice, and its bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from trainwright.tasks.allocate.search.collective_bound import CollectiveBound


@dataclass(frozen=True)
class Subproblem:
    """The configurations whose choices lie in these intervals."""

    accumulation: tuple[int, int]
    """Least and most micro-batches of a step. Branched on first."""
    collectives: CollectiveBound
    """Bounds the collectives, for an interval of widths (most ranks on a machine)."""
    levels: tuple[int, int]
    """First and last time of the slowest rank, as positions in the levels of `accumulation`."""
    ranks: tuple[int, int]
    low: Any
    """Fewest ranks by group: a numpy array."""
    high: Any
    """Most ranks by group: a numpy array."""
    kinds: tuple[Any, Any]
    """Fewest and most ranks by kind: numpy arrays. Groups of one kind are branched on only once
    the number of ranks of the kind is fixed."""

    @property
    def kinds_fixed(self) -> bool:
        """Whether the number of ranks of every kind is fixed."""
        return bool((self.kinds[0] == self.kinds[1]).all())


class Looseness(NamedTuple):
    """The share of the bound by which each interval loosens it; decides what to branch on."""

    levels: float = 0.0
    ranks: float = 0.0
    kinds: float = 0.0


class Relaxation(NamedTuple):
    """A lower bound of a subproblem, and the relaxed solution (real numbers) that attains it."""

    bound: float
    subproblem: Subproblem
    """the subproblem after tightening"""
    counts: Any
    """Ranks by kind."""
    samples: Any = None
    """Samples of a rank of each kind. None: the numbers by kind are fixed."""
    loose: Looseness = Looseness()
    most_accumulation: int | None = None
    """More micro-batches can't pay in this subproblem. None: not computed."""
    packed: Any = None
    """Ranks by group on the fewest machines that hold the batch."""
