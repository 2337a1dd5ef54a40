"""The Pareto front of duration against energy and cost, at the plan's global batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from trainwright.tasks.allocate.plan.confidence import TOLERANCE
from trainwright.tasks.allocate.plan.configuration import Configuration, Goal, Limits
from trainwright.tasks.allocate.plan.device_counts import device_counts
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.allocate.strategies import best
from trainwright.tasks.runs.artefacts.layout import DATA_PARALLEL
from trainwright.tasks.runs.artefacts.plan import FrontPoint

_DURATIONS = 4
"""Number of deadlines to search between the fastest and the most economical configuration."""
_MAX_NODES = 20
_RESOLUTION = 0.01
"""A point is searched for only if it is better by this share than those known."""
_NO_LIMITS = Limits()


def explored(
    problem: PlanningProblem, result: Configuration, neighbours: Sequence[Configuration]
) -> list[Configuration]:
    """Configurations with the result's batch that are good in time, energy or cost.

    Found by searches for the least of each, within several deadlines.
    """
    known = [*neighbours, result]
    goals: list[Goal] = [goal for goal in ("energy", "cost") if result.value(goal) < math.inf]
    request = replace(problem.request(result.batch), max_nodes=_MAX_NODES)

    def search(goal: Goal, limits: Limits = _NO_LIMITS) -> Configuration:
        """The best known configuration, after a search for one that is clearly better."""
        within = [one for one in known if one.excess(limits) <= 0]
        least = min((one.value(goal) for one in within), default=math.inf)
        cutoff = least * (1 - _RESOLUTION)
        known.extend(best(replace(request, goal=goal, limits=limits, cutoff=cutoff)).seen)
        return min(
            (one for one in known if one.excess(limits) <= 0),
            key=lambda one: (one.value(goal), one.cost.upper_duration_s),
            default=result,
        )

    first = search("time").cost.upper_duration_s
    for goal in goals:
        last = search(goal).cost.upper_duration_s
        if last <= first:
            continue
        for place in range(_DURATIONS):
            search(goal, Limits(first * (last / first) ** (place / _DURATIONS)))
    return [one for one in known if one.excess(_NO_LIMITS) <= 0]


def front(
    problem: PlanningProblem, known: Sequence[Configuration], result: Configuration
) -> list[FrontPoint]:
    """The configurations that no other dominates, fastest first, and the plan itself."""
    kept = undominated([*known, result], result, problem.limits)
    return [point(problem, one, chosen=one is result) for one in kept]


def point(problem: PlanningProblem, one: Configuration, *, chosen: bool) -> FrontPoint:
    """A configuration as a point of a front."""
    return FrontPoint(
        time=one.value("time"),
        energy=one.value("energy") if one.cost.energy_j else None,
        cost=one.value("cost") if one.cost.cost else None,
        devices=device_counts(device for device, _ in one.devices()),
        global_batch_size=one.batch,
        accumulation=one.accumulation,
        feasible=one.excess(problem.limits) <= 0,
        layout=one.layout.name if one.layout is not None else DATA_PARALLEL,
        chosen=chosen,
    )


def undominated(
    known: Iterable[Configuration], keep: Configuration, limits: Limits
) -> list[Configuration]:
    """The Pareto-optimal configurations, and `keep` in any case; fastest first.

    One configuration dominates another if it is as good in time, energy and cost, and better in
    one of them. One that misses a limit is left out if it dominates one that keeps all limits.
    """

    def values(one: Configuration) -> tuple[float, float, float]:
        return (one.value("time"), one.value("energy"), one.value("cost"))

    def as_good(one: Configuration, other: Configuration) -> bool:
        pairs = zip(values(one), values(other), strict=True)
        return all(a <= b * (1 + TOLERANCE) for a, b in pairs)

    kept: list[Configuration] = []
    # Dominating configurations come first, but none that misses a limit before one that does not.
    order = sorted(known, key=lambda one: (values(one), one.size, one.counts))
    for one in sorted(order, key=lambda one: one.excess(limits) > 0):
        if not any(as_good(other, one) or as_good(one, other) for other in kept):
            kept.append(one)
    if not any(one is keep for one in kept):
        kept = [one for one in kept if values(one) != values(keep)] + [keep]
    return sorted(kept, key=values)
