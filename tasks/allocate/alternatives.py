"""Alternatives to the plan, and why each is worse."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from trainwright.tasks.allocate.plan.confidence import TOLERANCE
from trainwright.tasks.allocate.plan.configuration import Configuration, Goal
from trainwright.tasks.allocate.plan.device_counts import device_counts
from trainwright.tasks.allocate.plan.search_request import SearchResult
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.runs.artefacts import Alternative

_SHOWN = 10
_NAMES = {"time": "duration", "energy": "energy", "cost": "cost"}


def alternatives(
    problem: PlanningProblem, chosen: SearchResult, neighbours: Sequence[Configuration]
) -> list[Alternative]:
    """The best configurations evaluated at the plan's global batch, and its neighbours."""
    result = chosen.best
    assert result is not None
    ranked = sorted(
        [*chosen.seen, *neighbours],
        key=lambda one: (
            one.excess(problem.limits),
            one.value(problem.goal),
            one.size,
            one.batch,
            one.counts,
        ),
    )
    known = {_shown_as(result)}
    found: list[Alternative] = []
    for one in ranked:
        if len(found) == _SHOWN:
            break
        if _shown_as(one) not in known:
            known.add(_shown_as(one))
            found.append(_lost(problem, one, result))
    return found


def _shown_as(one: Configuration) -> object:
    """A configuration as users see it: ranks by kind of device, batch, accumulation."""
    counts: Counter[object] = Counter()
    for share in one.shares:
        curve = share.kind.curve
        counts[curve.device_type, curve.cores, curve.speed] += share.ranks
    return (frozenset(counts.items()), one.batch, one.accumulation)


def _lost(problem: PlanningProblem, one: Configuration, best: Configuration) -> Alternative:
    name = _NAMES[problem.job.objective.minimize]
    mine, least = one.value(problem.goal), best.value(problem.goal)
    over = one.excess(problem.limits)
    if over > 0:
        slow = _slow_collectives(one, best)
        reason = _missed(problem, one) + (slow and f"; {slow}")
    elif mine <= least * (1 + TOLERANCE):
        reason = f"the same {name}, {'more' if one.size > best.size else 'other'} devices"
    else:
        ratio = mine / least if least > 0 else math.inf
        reason = f"{_more(ratio, name)}{_because(one, best, problem.goal)}"
    return Alternative(
        devices=device_counts(device for device, _ in one.devices()),
        global_batch_size=one.batch,
        accumulation=one.accumulation,
        predicted=one.cost.prediction(),
        feasible=over == 0,
        reason=reason,
    )


def _more(ratio: float, name: str) -> str:
    percent = f"{100 * (ratio - 1):.2g} % more {name}"
    return percent if ratio < 1.995 else f"{ratio:.3g} x the {name}"


def _because(one: Configuration, best: Configuration, goal: Goal) -> str:
    mine, least = one.cost.step_s.median, best.cost.step_s.median
    if slow := _slow_collectives(one, best):
        return f": {slow}"
    if one.size > best.size and goal != "time" and mine <= least:
        saved = 100 * (1 - mine / least)
        return f": {one.size / best.size:.2g} x the devices for {saved:.2g} % less time"
    if mine > least and (one.size < best.size or goal != "time"):
        return f": a step takes {mine / least:.2g} x as long"
    return ""


def _slow_collectives(one: Configuration, best: Configuration) -> str:
    """Why more devices are slower; for a configuration with the best one's devices and more.

    Empty for others: their devices may simply be slower.
    """
    mine, theirs = (device_counts(device for device, _ in each.devices()) for each in (one, best))
    more = one.size > best.size and all(
        mine.get(kind, 0) >= count for kind, count in theirs.items()
    )
    slower = more and one.cost.step_s.median > best.cost.step_s.median
    return "all-reduces take longer than the extra devices save" if slower else ""


def _missed(problem: PlanningProblem, one: Configuration) -> str:
    """Which limit it misses, and by how much."""
    limits, cost = problem.limits, one.cost
    misses = [
        (cost.upper_duration_s, limits.deadline_s, "the deadline"),
        (cost.upper_cost, limits.budget, "the budget"),
        (cost.upper_duration_s, one.available_s(), "a host's window"),
    ]
    ratio, name = max(
        (have / limit if limit > 0 else math.inf, name)
        for have, limit, name in misses
        if limit < math.inf
    )
    if math.isinf(ratio):
        return f"is outside {name}"
    much = f"takes {ratio:.3g} x {name}"
    if ratio < 1.995:
        much = f"misses {name} by {100 * (ratio - 1):.2g} %"
    return f"{much} at confidence {problem.job.objective.confidence:g}"
