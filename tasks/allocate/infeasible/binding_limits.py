"""Explains why no plan exists: the binding limit, the nearest feasible one, one more device."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from trainwright.estimator.machine import MOST_DRIFT, busy
from trainwright.tasks.allocate.infeasible.binding_memory import nothing_fits
from trainwright.tasks.allocate.layouts.planning import LayoutCandidate
from trainwright.tasks.allocate.plan.configuration import Configuration, Goal, Limits
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.plan.device_counts import as_text, device_counts
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.allocate.recompute_search import leanest_problem
from trainwright.tasks.errors import Infeasible
from trainwright.tasks.units import plain

_MAX_KINDS = 8
_ONE_MORE_NODES = 100
"""Nodes of a search that only shows what one more device would help."""


@dataclass
class _Explanation:
    """The binding limit. One more device helps if it improves `goal` beyond `nearest`."""

    binding: str
    goal: Goal
    within: Limits
    nearest: float
    shape: str
    sentences: list[str]
    details: dict[str, object] = field(default_factory=dict)


def infeasible(
    problem: PlanningProblem, other: LayoutCandidate | None = None, more: str = ""
) -> Infeasible:
    """The error that explains why no configuration is feasible.

    `other` is the best of layouts that the search for configurations does not know, `more` a
    sentence on what would help.

    Its `details` hold `binding` and, if they apply, `nearest_deadline_s`, `nearest_budget` and
    `one_more`: for each kind of device, the nearest feasible limit with one more such device.
    `one_more` is empty if no kind helps. Each nearest limit is feasible together with the other
    limit as given; if no such limit exists for either, the two nearest ones are feasible together.
    """
    lean, fastest = fastest_of_all(problem)
    if fastest is None:
        return _nothing_at_all(lean, recomputes=lean is not problem)
    problem = lean
    why = _explain(problem, fastest)
    if other is not None:
        _compare(problem, why, other)
    one_more = _one_more(problem, why.goal, why.within, why.nearest)
    if one_more:
        kind, value = min(one_more.items(), key=lambda pair: pair[1])
        could = (
            f"a deadline of {plain(value, 4)} s"
            if why.goal == "upper_time"
            else f"a budget of {plain(value, 4)}"
        )
        why.sentences.append(f"with one more {kind}, {could} would be feasible")
    else:
        tried = len({device.variant for device in problem.devices})
        of = f"the first {_MAX_KINDS} kinds" if tried > _MAX_KINDS else "any kind"
        why.sentences.append(f"one more device of {of} in the pool: no nearer limit was found")
    why.sentences += [more] if more else []
    drift = max((curve.speed_drift for curve in problem.model.estimate.curves), default=0.0)
    if drift > MOST_DRIFT:
        why.sentences.append(
            f"{busy(drift)}, so this is rough; after ten minutes a command measures it again"
        )
    confidence = problem.job.objective.confidence
    return Infeasible(
        f"no feasible plan: {'; '.join(why.sentences)} (at confidence {confidence:g}; {why.shape})",
        feasible=False,
        binding=why.binding,
        confidence=confidence,
        **why.details,
        one_more=one_more,
    )


def fastest_of_all(problem: PlanningProblem) -> tuple[PlanningProblem, Configuration | None]:
    """The fastest data parallel configuration if there were no limits, and its problem.

    If none fits into memory otherwise, its devices recompute all that saves memory. None: none fits
    even so, or the hosts' windows are too short.
    """
    fastest = problem.least("upper_time", Limits())
    if fastest is None and (lean := leanest_problem(problem)) is not problem:
        return lean, lean.least("upper_time", Limits())
    return problem, fastest


def _compare(problem: PlanningProblem, why: _Explanation, other: LayoutCandidate) -> None:
    """Note another layout, if it comes nearer to the limit that binds."""
    one = other.configuration
    late = why.goal == "upper_time"
    nearest = rounded_up(one.cost.upper_duration_s if late else one.cost.upper_cost)
    if other.shortage is not None or one.excess(why.within) > 0 or nearest >= why.nearest:
        return
    field_name = "nearest_deadline_s" if late else "nearest_budget"
    if field_name not in why.details or why.binding != ("deadline" if late else "budget"):
        return
    why.sentences.append(f"with layout {one.strategy}, {plain(nearest, 4)}{' s' if late else ''}")
    why.nearest = why.details[field_name] = nearest


def _explain(problem: PlanningProblem, fastest: Configuration) -> _Explanation:
    """Explain which of deadline and budget binds, or both together."""
    limits = problem.limits
    affordable = (
        problem.least("upper_time", Limits(budget=limits.budget))
        if limits.budget < math.inf
        else fastest
    )
    in_time = (
        problem.least("upper_cost", Limits(limits.deadline_s)) if limits.budget < math.inf else None
    )
    if affordable is not None and in_time is not None:
        return _together(limits, affordable, in_time)
    if affordable is not None:
        return _deadline(limits, affordable)
    if in_time is not None:
        return _budget(limits, in_time)
    return _both(problem, fastest)


def _deadline(limits: Limits, fastest: Configuration) -> _Explanation:
    """No budget meets the deadline; `fastest` keeps the budget."""
    nearest = rounded_up(fastest.cost.upper_duration_s)
    within = "" if math.isinf(limits.budget) else f" within the budget of {plain(limits.budget, 6)}"
    return _Explanation(
        "deadline",
        "upper_time",
        Limits(budget=limits.budget),
        nearest,
        f"fastest{within}: {_shape(fastest)}",
        [
            f"the deadline of {plain(limits.deadline_s, 6)} s binds: "
            f"the nearest that is feasible{within} is {plain(nearest, 4)} s"
        ],
        {"nearest_deadline_s": nearest, "deadline_s": limits.deadline_s},
    )


def _budget(limits: Limits, cheapest: Configuration) -> _Explanation:
    """No deadline allows the budget; `cheapest` keeps the deadline."""
    nearest = rounded_up(cheapest.cost.upper_cost)
    within = "" if math.isinf(limits.deadline_s) else f" within {plain(limits.deadline_s, 6)} s"
    return _Explanation(
        "budget",
        "upper_cost",
        Limits(limits.deadline_s),
        nearest,
        f"cheapest{within}: {_shape(cheapest)}",
        [
            f"the budget of {plain(limits.budget, 6)} binds: "
            f"the nearest that is feasible{within} is {plain(nearest, 4)}"
        ],
        {"nearest_budget": nearest, "budget": limits.budget},
    )


def _together(limits: Limits, affordable: Configuration, in_time: Configuration) -> _Explanation:
    """Each limit can be met alone, but not both together."""
    nearest = rounded_up(in_time.cost.upper_cost)
    nearest_s = rounded_up(affordable.cost.upper_duration_s)
    return _Explanation(
        "budget",
        "upper_cost",
        Limits(limits.deadline_s),
        nearest,
        f"cheapest in time: {_shape(in_time)}",
        [
            "deadline and budget bind together: meeting the deadline takes a budget of "
            f"{plain(nearest, 4)}, keeping the budget takes a deadline of {plain(nearest_s, 4)} s"
        ],
        {"nearest_budget": nearest, "nearest_deadline_s": nearest_s},
    )


def _both(problem: PlanningProblem, fastest: Configuration) -> _Explanation:
    """Neither limit can be met, whatever the other one is."""
    limits, nearest_s = problem.limits, rounded_up(fastest.cost.upper_duration_s)
    cheapest = problem.least("upper_cost", Limits(nearest_s))
    assert cheapest is not None
    nearest = rounded_up(cheapest.cost.upper_cost)
    return _Explanation(
        "deadline",
        "upper_time",
        Limits(),
        nearest_s,
        f"fastest: {_shape(fastest)}",
        [
            f"neither the deadline of {plain(limits.deadline_s, 6)} s nor the budget of "
            f"{plain(limits.budget, 6)} can be met: feasible together are a deadline of "
            f"{plain(nearest_s, 4)} s and a budget of {plain(nearest, 4)}"
        ],
        {
            "nearest_deadline_s": nearest_s,
            "deadline_s": limits.deadline_s,
            "nearest_budget": nearest,
            "budget": limits.budget,
        },
    )


def _one_more(
    problem: PlanningProblem, goal: Goal, limits: Limits, nearest: float
) -> dict[str, float]:
    """By kind: the nearest feasible limit with one more device on the host of the first one.

    Contains only kinds that help.
    """
    first = list({device.variant: device for device in reversed(problem.devices)}.values())[::-1]
    found: dict[str, float] = {}
    for device in first[:_MAX_KINDS]:
        better = problem.with_one_more(device).least(goal, limits, _ONE_MORE_NODES)
        if better is not None and (value := rounded_up(better.value(goal))) < nearest:
            name = next(iter(device_counts([device])))
            found[name] = min(value, found.get(name, math.inf))
    return found


def _shape(one: Configuration) -> str:
    return as_text(device_counts(device for device, _ in one.devices()))


def _nothing_at_all(problem: PlanningProblem, *, recomputes: bool = False) -> Infeasible:
    """The error if even without deadline and budget, availability or memory prevents a plan."""
    model, job = problem.model, problem.job
    always = PlanningProblem.of(
        job,
        CostModel(job, model.pool, model.estimate, model.data),
        problem.devices,
        problem.max_accumulation,
    )
    fastest = always.least("upper_time", Limits())
    if fastest is None:
        return nothing_fits(problem, recomputes=recomputes)
    longest = max(kind.available_s for kind in problem.topology.kinds)
    needed = rounded_up(fastest.cost.upper_duration_s)
    return Infeasible(
        f"no feasible plan: availability binds: training takes {plain(needed, 4)} s at confidence "
        f"{job.objective.confidence:g}, and no suitable hosts are available for so long "
        f"(the longest window has {plain(longest, 4)} s left; windows, UTC: {_windows(problem)})",
        feasible=False,
        binding="availability",
        needed_s=needed,
        longest_window_s=longest,
    )


def _windows(problem: PlanningProblem) -> str:
    """The daily windows of the hosts that the job may use."""
    hosts = {device.host for device in problem.devices}
    found = [
        f"{host.name} {host.available}"
        for host in problem.model.pool.hosts
        if host.name in hosts and host.available
    ]
    more = f" and {len(found) - _MAX_KINDS} more" if len(found) > _MAX_KINDS else ""
    return ", ".join(found[:_MAX_KINDS]) + more


def rounded_up(value: float) -> float:
    """The value rounded up to four significant digits."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 3)
    return math.ceil(value / unit) * unit
