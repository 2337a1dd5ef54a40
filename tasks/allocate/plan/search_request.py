"""The request to a strategy, and its result."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from trainwright.tasks.allocate.plan.confidence import TOLERANCE
from trainwright.tasks.allocate.plan.configuration import Configuration, Goal, Limits
from trainwright.tasks.allocate.plan.search_space import SearchSpace
from trainwright.tasks.allocate.plan.topology import Topology

MAX_NODES = 3_000
"""Nodes after which a search ends, proven optimal or not."""
EXACT_NODES = 1_000
"""Nodes after which a search accepts an incumbent that is optimal up to a small tolerance."""


@dataclass(frozen=True)
class SearchRequest:
    """Asks for the best configuration for one global batch that is better than `cutoff`."""

    topology: Topology
    batch: int
    min_ranks: int
    max_ranks: int
    goal: Goal
    limits: Limits
    cutoff: float = math.inf
    max_accumulation: int | None = None
    max_nodes: int = MAX_NODES

    def space(self) -> SearchSpace:
        """The configurations to choose from."""
        return SearchSpace(
            self.topology, self.batch, self.min_ranks, self.max_ranks, self.max_accumulation
        )


@dataclass(frozen=True)
class SearchResult:
    """The best configuration found, and a lower bound of the goal's value for all others."""

    best: Configuration | None
    bound: float
    nodes: int
    """Nodes of the search tree that were expanded."""
    seen: list[Configuration] = field(default_factory=list)
    """Every configuration whose cost was computed, within the limits or not."""

    def merged(self, other: SearchResult, goal: Goal) -> SearchResult:
        """The combined result of two searches for the same request."""
        best = min(
            (one for one in (self.best, other.best) if one is not None),
            key=lambda one: one.value(goal),
            default=None,
        )
        bound = max(self.bound, other.bound)
        if best is not None:
            bound = min(bound, best.value(goal))
        return SearchResult(best, bound, self.nodes + other.nodes, self.seen + other.seen)

    def gap(self, goal: Goal) -> float:
        """The optimality gap: the share by which another configuration can be better at most."""
        if self.best is None:
            return 0.0 if math.isinf(self.bound) else math.inf
        value = self.best.value(goal)
        if value > 0 and self.bound < value * (1 - TOLERANCE):
            return max(0.0, 1 - self.bound / value)
        return 0.0
