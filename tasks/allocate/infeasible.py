"""Explains why no plan exists: the binding limit, the nearest feasible one, one more device."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from trainwright.tasks.allocate.plan.configuration import Configuration, Goal, Limits
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.plan.device_counts import as_text, device_counts
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.errors import Infeasible

_MAX_KINDS = 8


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


def infeasible(problem: PlanningProblem) -> Infeasible:
    """The error that explains why no configuration is feasible.

    Its `details` hold `binding` and, if they apply, `nearest_deadline_s`, `nearest_budget` and
    `one_more`: for each kind of device, the nearest feasible limit with one more such device.
    `one_more` is empty if no kind helps.
    """
    fastest = problem.least("upper_time", Limits())
    if fastest is None:
        return _nothing_at_all(problem)
    why = _explain(problem, fastest)
    one_more = _one_more(problem, why.goal, why.within, why.nearest)
    if one_more:
        kind, value = min(one_more.items(), key=lambda pair: pair[1])
        could = (
            f"a deadline of {value:g} s" if why.goal == "upper_time" else f"a budget of {value:g}"
        )
        why.sentences.append(f"with one more {kind}, {could} would be feasible")
    else:
        tried = len({device.variant for device in problem.devices})
        of = f"the first {_MAX_KINDS} kinds" if tried > _MAX_KINDS else "any kind"
        why.sentences.append(f"one more device of {of} in the pool would not help")
    confidence = problem.job.objective.confidence
    return Infeasible(
        f"no feasible plan: {'; '.join(why.sentences)} (at confidence {confidence:g}; {why.shape})",
        feasible=False,
        binding=why.binding,
        confidence=confidence,
        **why.details,
        one_more=one_more,
    )


def _explain(problem: PlanningProblem, fastest: Configuration) -> _Explanation:
    """Explain which of deadline and budget binds, or both together."""
    limits = problem.limits
    late = _deadline(limits, fastest)
    cheapest = problem.least("upper_cost", Limits()) if limits.budget < math.inf else None
    expensive = None if cheapest is None else _budget(limits, cheapest)
    if late is not None and expensive is not None:
        late.sentences += expensive.sentences
        late.details |= expensive.details
    return late or expensive or _together(problem)


def _deadline(limits: Limits, fastest: Configuration) -> _Explanation | None:
    if fastest.cost.upper_duration_s <= limits.deadline_s:
        return None
    nearest = rounded_up(fastest.cost.upper_duration_s)
    return _Explanation(
        "deadline",
        "upper_time",
        Limits(),
        nearest,
        f"fastest: {_shape(fastest)}",
        [
            f"the deadline of {limits.deadline_s:g} s binds: "
            f"the nearest that is feasible is {nearest:g} s"
        ],
        {"nearest_deadline_s": nearest, "deadline_s": limits.deadline_s},
    )


def _budget(limits: Limits, cheapest: Configuration) -> _Explanation | None:
    if cheapest.cost.upper_cost <= limits.budget:
        return None
    nearest = rounded_up(cheapest.cost.upper_cost)
    return _Explanation(
        "budget",
        "upper_cost",
        Limits(),
        nearest,
        f"cheapest: {_shape(cheapest)}",
        [f"the budget of {limits.budget:g} binds: the nearest that is feasible is {nearest:g}"],
        {"nearest_budget": nearest, "budget": limits.budget},
    )


def _together(problem: PlanningProblem) -> _Explanation:
    """Each limit can be met alone, but not both together."""
    limits = problem.limits
    within = Limits(deadline_s=limits.deadline_s)
    in_time = problem.least("upper_cost", within)
    affordable = problem.least("upper_time", Limits(budget=limits.budget))
    assert in_time is not None
    assert affordable is not None
    nearest = rounded_up(in_time.cost.upper_cost)
    nearest_s = rounded_up(affordable.cost.upper_duration_s)
    return _Explanation(
        "budget",
        "upper_cost",
        within,
        nearest,
        f"cheapest in time: {_shape(in_time)}",
        [
            "deadline and budget bind together: meeting the deadline takes a budget of "
            f"{nearest:g}, keeping the budget takes a deadline of {nearest_s:g} s"
        ],
        {"nearest_budget": nearest, "nearest_deadline_s": nearest_s},
    )


def _one_more(
    problem: PlanningProblem, goal: Goal, limits: Limits, nearest: float
) -> dict[str, float]:
    """By kind: the nearest feasible limit with one more device on the host of the first one.

    Contains only kinds that help.
    """
    first = list({device.variant: device for device in reversed(problem.devices)}.values())[::-1]
    found = {}
    for device in first[:_MAX_KINDS]:
        best = problem.with_one_more(device).least(goal, limits)
        if best is not None and (value := rounded_up(best.value(goal))) < nearest:
            found[next(iter(device_counts([device])))] = value
    return found


def _shape(one: Configuration) -> str:
    return as_text(device_counts(device for device, _ in one.devices()))


def _nothing_at_all(problem: PlanningProblem) -> Infeasible:
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
        return Infeasible(_memory(problem), feasible=False, binding="memory")
    longest = max(kind.available_s for kind in problem.topology.kinds)
    needed = rounded_up(fastest.cost.upper_duration_s)
    return Infeasible(
        f"no feasible plan: availability binds: training takes {needed:g} s at confidence "
        f"{job.objective.confidence:g}, and no suitable hosts are available for so long "
        f"(the longest window has {longest:.0f} s left; windows, UTC: {_windows(problem)})",
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


def _memory(problem: PlanningProblem) -> str:
    """Why nothing fits, with the figures of the device with the most memory."""
    least, kinds = problem.sizes[0], problem.topology.kinds
    count = problem.job.devices.min_count
    if least < count:
        return (
            f"no feasible plan: a global batch of {least} is too small for {count} devices "
            "(each needs at least one sample)"
        )
    roomiest = max((kind.curve for kind in kinds), key=lambda curve: curve.memory_limit_bytes or 0)
    need = roomiest.device_memory_bytes(1) / 2**30
    have = (roomiest.memory_limit_bytes or 0) / 2**30
    shared = ", which its ranks share" if any(kind.shares_memory for kind in kinds) else ""
    measured = "".join(
        f"; in earlier runs, {kind.device_type} could hold {kind.curve.most_batch_size} at once"
        for kind in kinds
        if kind.curve.most_batch_size is not None
    )
    return (
        f"no feasible plan: memory binds: a global batch of {least} does not fit; one sample takes "
        f"{need:.2f} GiB, {roomiest.device_type} has {have:.2f} GiB{shared}{measured}"
    )


def rounded_up(value: float) -> float:
    """The value rounded up to three significant digits."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.ceil(value / unit) * unit
