"""Chooses the global batch of a plan.

A larger batch often trains faster, but learns less from each sample. If the job states its gradient
noise scale B_noise, the plan minimises the goal times w(B): the number of samples to reach the same
loss, relative to the smallest batch B_0,

    w(B) = (1 + B / B_noise) / (1 + B_0 / B_noise)

(S. McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, equation 2.7). Otherwise
it takes the smallest batch whose goal is within 1 / `GOOD_ENOUGH` of the best of all batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from trainwright.tasks.allocate.plan.confidence import TOLERANCE
from trainwright.tasks.allocate.plan.configuration import Configuration
from trainwright.tasks.allocate.plan.search_request import EXACT_NODES, MAX_NODES, SearchResult
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.allocate.strategies import best
from trainwright.tasks.units import plain

GOOD_ENOUGH = 0.9
_FIRST_NODES = 60
"""Maximum number of nodes in the short first search of each batch."""


def choose_batch(problem: PlanningProblem) -> tuple[SearchResult | None, list[SearchResult]]:
    """The best result for the global batch that the rule picks, and the best for each batch.

    The first is None if no batch is feasible. A short search of each batch gives a candidate batch.
    Then the search of a smaller batch ends when it is certainly too far from the best, that of a
    larger one when it certainly can't replace the candidate; the candidate's runs to the end.
    """
    return _BatchSearches(problem).made()


def batch_rule(problem: PlanningProblem) -> str:
    """Why the plan has its global batch, in words."""
    train, sizes = problem.job.train, ", ".join(map(str, problem.sizes))
    if train.global_batch_size != "auto":
        return "given"
    rows, first = problem.model.data.train_rows, problem.sizes[0]
    if train.batch_bounds[0] > rows:
        return (
            f"all {rows} training rows: batch_bounds start above that, at {train.batch_bounds[0]}"
        )
    if _prefers_small(problem) or len(problem.sizes) == 1:
        return (
            f"the smallest of {sizes} whose best {problem.goal} is within a factor of "
            f"{1 / GOOD_ENOUGH:.2f} of the best: a larger batch learns less per sample, "
            "and how much less is not known (train.noise_scale)"
        )
    noise = plain(train.noise_scale or math.inf)
    return (
        f"the least {problem.goal} times samples to the same loss, "
        f"(1 + B / {noise}) / (1 + {first} / {noise}), of {sizes}"
    )


def preferred(problem: PlanningProblem, some: Sequence[Configuration]) -> Configuration:
    """The configuration that the rule picks among some, of any global batches."""

    def value(one: Configuration) -> float:
        return one.value(problem.goal) * weight(problem, one.batch)

    least = min(map(value, some))
    allowed = least / GOOD_ENOUGH if _prefers_small(problem) else least
    good = [one for one in some if value(one) <= allowed]
    return min(good, key=lambda one: (one.batch, value(one)))


def weight(problem: PlanningProblem, batch: int) -> float:
    """w(B): samples to the same loss, relative to the smallest batch."""
    noise, first = problem.job.train.noise_scale, problem.sizes[0]
    return 1.0 if noise is None else (1 + batch / noise) / (1 + first / noise)


def _prefers_small(problem: PlanningProblem) -> bool:
    return problem.job.train.noise_scale is None and len(problem.sizes) > 1


class _BatchSearches:
    """The searches of all batches, each with its best result and lower bound so far."""

    def __init__(self, problem: PlanningProblem) -> None:
        self._problem = problem
        self._within = 1 / GOOD_ENOUGH if _prefers_small(problem) else 1.0
        self._found: dict[int, SearchResult] = {}
        self._exhausted: set[int] = set()

    def made(self) -> tuple[SearchResult | None, list[SearchResult]]:
        """Search until the rule's batch is known and its search is complete."""
        first = _FIRST_NODES if len(self._problem.sizes) > 1 else MAX_NODES
        for size in sorted(self._problem.sizes, reverse=True):
            self._search(size, first, self._within * self._least())
        while True:
            allowed = self._within * self._least()
            chosen = min(
                (
                    size
                    for size, one in self._found.items()
                    if one.best is not None and self._high(size) <= allowed
                ),
                default=None,
            )
            ceilings = self._ceilings(chosen, allowed)
            pending = [
                size
                for size, ceiling in ceilings.items()
                if size not in self._exhausted and self._low(size) < ceiling * (1 - 2 * TOLERANCE)
            ]
            if not pending:
                by_size = [self._found[size] for size in sorted(self._found, reverse=True)]
                kept = [one for one in by_size if one.best is not None]
                return (None if chosen is None else self._found[chosen]), kept
            size = min(pending, key=lambda one: (one == chosen, self._low(one)))
            self._search(size, MAX_NODES, ceilings[size])

    def _ceilings(self, chosen: int | None, allowed: float) -> dict[int, float]:
        """For each batch, the weighted value below which it could still change the choice."""
        if chosen is None:
            return dict.fromkeys(self._found, allowed)
        value = self._high(chosen)
        return {
            size: allowed if size < chosen else value / (self._within if size > chosen else 1.0)
            for size in self._found
        }

    def _search(self, size: int, max_nodes: int, ceiling: float) -> None:
        """Search a batch for configurations below this weighted value."""
        cutoff = ceiling / self._weight(size) * (1 + TOLERANCE)
        request = replace(self._problem.request(size, cutoff=cutoff), max_nodes=max_nodes)
        one = best(request)
        before = self._found.get(size)
        self._found[size] = one if before is None else before.merged(one, self._problem.goal)
        best_value = math.inf if one.best is None else one.best.value(self._problem.goal)
        is_open = one.bound < min(cutoff, best_value) * (1 - TOLERANCE)
        if one.nodes >= EXACT_NODES or (max_nodes == MAX_NODES and is_open):
            self._exhausted.add(size)  # another search would find the same

    def _least(self) -> float:
        return min(map(self._high, self._found), default=math.inf)

    def _low(self, size: int) -> float:
        """Lower bound of a batch's weighted value."""
        return self._found[size].bound * self._weight(size)

    def _high(self, size: int) -> float:
        """The lowest weighted value found for a batch."""
        one = self._found[size].best
        return math.inf if one is None else one.value(self._problem.goal) * self._weight(size)

    def _weight(self, size: int) -> float:
        return weight(self._problem, size)
