"""Alternatives to the plan, and why each is worse."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from trainwright.tasks.allocate.layouts.planning import LayoutCandidate
from trainwright.tasks.allocate.plan.confidence import TOLERANCE
from trainwright.tasks.allocate.plan.configuration import Configuration, Goal
from trainwright.tasks.allocate.plan.device_counts import as_text, device_counts, kind_name
from trainwright.tasks.allocate.plan.kinds import Share
from trainwright.tasks.allocate.plan.search_request import SearchResult
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.runs.artefacts.layout import DATA_PARALLEL
from trainwright.tasks.runs.artefacts.plan import Alternative
from trainwright.tasks.units import plain, seconds

_SHOWN = 10
_NAMES = {"time": "duration", "energy": "energy", "cost": "cost"}


def alternatives(
    problem: PlanningProblem,
    chosen: SearchResult,
    neighbours: Sequence[Configuration],
    others: Sequence[LayoutCandidate] = (),
) -> list[Alternative]:
    """The best configurations evaluated at the plan's global batch, and its neighbours.

    All are data parallel; those among `others` are left out.
    """
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
    listed = (one.configuration for one in others)
    known |= {_shown_as(one) for one in listed if one.strategy == DATA_PARALLEL}
    found: list[Alternative] = []
    for one in ranked:
        if len(found) == _SHOWN:
            break
        if _shown_as(one) not in known:
            known.add(_shown_as(one))
            found.append(_lost(problem, one, result))
    return found


def other_layouts(
    problem: PlanningProblem, others: Sequence[LayoutCandidate], best: Configuration
) -> list[Alternative]:
    """Other layouts, each with its words, and its devices if they are others; best first."""

    def key(one: LayoutCandidate) -> tuple[float, float, float]:
        return (*one.misses(problem.limits), one.configuration.value(problem.goal))

    found = []
    for candidate in sorted(others, key=key):
        one = candidate.configuration
        slower = one.cost.step_s.median / best.cost.step_s.median
        how = f"a step takes {plain(slower)} times as long"
        if slower > 1 and _has_stages(best) and not _has_stages(one):
            share = min(1.0, _slowest(one)[0] / one.cost.step_s.median)
            how += f", of which devices compute for at most {_percent(share)}"
        fits = candidate.shortage is None
        if not fits:
            how = f"too little memory: {candidate.shortage}"
        elif one.value(problem.goal) < best.value(problem.goal):
            given = problem.job.train.layout != "auto"
            how += "; train.layout chose another" if given else ", too little less to rely on"
        lost = _lost(problem, one, best)
        how = how if lost.feasible else f"{lost.reason}; {how}"
        update = {
            "layout": one.strategy,
            "layout_in_words": candidate.words + _elsewhere(one, best),
            "reason": how,
            "feasible": lost.feasible and fits,
        }
        found.append(lost.model_copy(update=update))
    return found


def _elsewhere(one: Configuration, best: Configuration) -> str:
    """Its devices and its global batch, if they are not the plan's."""
    mine, theirs = (device_counts(device for device, _ in each.devices()) for each in (one, best))
    devices = "" if mine == theirs else f"; {as_text(mine)}"
    return devices + ("" if one.batch == best.batch else f"; global batch {one.batch}")


def _has_stages(one: Configuration) -> bool:
    return one.layout is not None and one.layout.has_stages


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
        slow = _why_slower(one, best) if _extends(one, best) else ""
        reason = _missed(problem, one) + (slow and f"; {slow}")
    elif mine < least * (1 - TOLERANCE) and one.strategy != best.strategy:
        fixed = problem.job.train.layout != "auto"
        less = f"{_percent(1 - mine / least)} less {name}, {one.strategy}"
        reason = less + (
            "; train.layout chose another" if fixed else ", too little less to rely on"
        )
    elif mine <= least * (1 + TOLERANCE):
        reason = f"the same {name}, {'more' if one.size > best.size else 'other'} devices"
    else:
        because = _because(one, best, problem.goal)
        reason = _more(mine, least, name) + (because and f": {because}")
    return Alternative(
        devices=device_counts(device for device, _ in one.devices()),
        global_batch_size=one.batch,
        accumulation=one.accumulation,
        predicted=one.cost.prediction(),
        feasible=over == 0,
        reason=reason,
    )


def _more(mine: float, least: float, name: str) -> str:
    if least <= 0:
        return f"a {name} of {plain(mine)}, not 0"
    if mine < 1.995 * least:
        return f"{_percent(mine / least - 1)} more {name}"
    return f"{plain(mine / least)} times the {name}"


def _percent(share: float) -> str:
    return "less than 0.01 %" if share < 1e-4 else f"{plain(100 * share, 2)} %"


def _because(one: Configuration, best: Configuration, goal: Goal) -> str:
    mine, least = one.cost.step_s.median, best.cost.step_s.median
    if goal == "time" or mine > least * (1 + TOLERANCE):
        return _why_slower(one, best)
    ratio = one.value("time") / best.value("time")
    time = "the same time" if ratio > 0.9999 else f"{_percent(1 - ratio)} less time"
    if one.size > best.size:
        return f"{plain(one.size / best.size)} times the devices for {time}"
    if best.value(goal) <= 0:
        return ""
    rate = one.value(goal) / best.value(goal) / ratio
    return f"{plain(rate)} times the {'power' if goal == 'energy' else 'cost per hour'} for {time}"


def _why_slower(one: Configuration, best: Configuration) -> str:
    """Why a step takes longer than the best one's; empty if it does not.

    A step is the work of its slowest device, then the part of the all-reduces that is left.
    """
    mine, least = one.cost.step_s.median, best.cost.step_s.median
    if mine <= least * (1 + TOLERANCE):
        return ""
    (work_s, slowest), (best_work_s, _) = _slowest(one), _slowest(best)
    if _extends(one, best):
        if work_s <= best_work_s:
            return "all-reduces take longer than the extra devices save"
        if all(share.kind.curve != slowest.kind.curve for share in best.shares):
            curve = slowest.kind.curve
            name = kind_name(curve.device_type, curve.cores, curve.speed)
            samples = f"{slowest.batch} sample{'s' if slowest.batch > 1 else ''}"
            return (
                f"{name} is too slow: it takes {seconds(work_s)} for {samples}, "
                f"a step of the plan {seconds(least)}"
            )
    longer = f"a step takes {plain(mine / least)} times as long"
    return longer if work_s > best_work_s else f"{longer}, as all-reduces do"


def _slowest(one: Configuration) -> tuple[float, Share]:
    """The share that takes longest, and its seconds."""
    return max(
        ((share.kind.curve.median_s(share.batch, one.accumulation), share) for share in one.shares),
        key=lambda pair: pair[0],
    )


def _extends(one: Configuration, best: Configuration) -> bool:
    """Whether a configuration has the best one's devices, and more."""
    mine, theirs = (device_counts(device for device, _ in each.devices()) for each in (one, best))
    return one.size > best.size and all(
        mine.get(kind, 0) >= count for kind, count in theirs.items()
    )


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
    much = f"takes {plain(ratio)} times {name}"
    if ratio < 1.995:
        much = f"misses {name} by {_percent(ratio - 1)}"
    return f"{much} at confidence {problem.job.objective.confidence:g}"
