"""Why there is no plan: which limit binds, the nearest deadline and budget that would do, what one more device would change."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainwright.tasks.allocate.front import kinds_of
from trainwright.tasks.allocate.plan.configuration import Configuration, Goal, Limits
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.errors import Infeasible

if TYPE_CHECKING:
    from trainwright.tasks.allocate.planner import Planner

_MOST_KINDS = 8


def infeasible(planner: Planner) -> Infeasible:
    """The error that says so. `details` has `binding`, `nearest_deadline_s`, `nearest_budget`, `one_more` where they
    apply: `one_more` is empty where no device more of a type of the pool brings the limit nearer."""
    objective, limits = planner.job.objective, planner.limits
    quickest = planner.least("upper_time", Limits())
    if quickest is None:
        return _nothing_at_all(planner)
    details: dict[str, object] = {"confidence": objective.confidence}
    words = []
    shape = f"quickest: {_shape(quickest)}"
    late = quickest.cost.upper_duration_s > limits.deadline_s
    cheapest = planner.least("upper_cost", Limits()) if limits.budget < math.inf else None
    dear = cheapest is not None and cheapest.cost.upper_cost > limits.budget
    binding: str
    goal: Goal
    if late:
        binding, goal, within = "deadline", "upper_time", Limits()
        nearest = rounded_up(quickest.cost.upper_duration_s)
        words.append(
            f"the deadline of {limits.deadline_s:g} s binds: the nearest that is feasible is {nearest:g} s"
        )
        details |= {"nearest_deadline_s": nearest, "deadline_s": limits.deadline_s}
    if dear and cheapest is not None:
        nearest_budget = rounded_up(cheapest.cost.upper_cost)
        words.append(
            f"the budget of {limits.budget:g} binds: the nearest that is feasible is {nearest_budget:g}"
        )
        details |= {"nearest_budget": nearest_budget, "budget": limits.budget}
        if not late:
            binding, goal, within, nearest = "budget", "upper_cost", Limits(), nearest_budget
            shape = f"cheapest: {_shape(cheapest)}"
    if not words:
        binding, goal, within = "budget", "upper_cost", Limits(deadline_s=limits.deadline_s)
        in_time, affordable = (
            planner.least(goal, within),
            planner.least("upper_time", Limits(budget=limits.budget)),
        )
        assert in_time is not None
        assert affordable is not None
        nearest, nearest_s = (
            rounded_up(in_time.cost.upper_cost),
            rounded_up(affordable.cost.upper_duration_s),
        )
        words.append(
            f"deadline and budget bind together: within the deadline it takes a budget of {nearest:g}, within the budget a "
            f"deadline of {nearest_s:g} s"
        )
        details |= {"nearest_budget": nearest, "nearest_deadline_s": nearest_s}
        shape = f"cheapest in time: {_shape(in_time)}"
    more = _one_more(planner, goal, within, nearest)
    details["one_more"] = more
    if not more:
        tried = len({device.variant for device in planner.devices})
        of = (
            "of a kind of the pool"
            if tried <= _MOST_KINDS
            else f"of the first {_MOST_KINDS} kinds of the pool"
        )
        words.append(f"no device more {of} brings that nearer")
    else:
        kind, value = min(more.items(), key=lambda pair: pair[1])
        could = f"a deadline of {value:g} s" if goal == "upper_time" else f"a budget of {value:g}"
        words.append(f"with one more {kind}, {could} would be feasible")
    return Infeasible(
        f"no feasible plan: {'; '.join(words)} (at confidence {objective.confidence:g}; {shape})",
        feasible=False,
        binding=binding,
        **details,
    )


def _one_more(planner: Planner, goal: Goal, limits: Limits, nearest: float) -> dict[str, float]:
    """By kind, the nearest feasible limit with one more device of it, on the host of the first of them; where that is nearer."""
    found = {}
    for device in list({device.variant: device for device in reversed(planner.devices)}.values())[
        ::-1
    ][:_MOST_KINDS]:
        best = planner.with_one_more(device).least(goal, limits)
        if best is not None and (value := rounded_up(best.value(goal))) < nearest:
            found[next(iter(kinds_of([device])))] = value
    return found


def _shape(one: Configuration) -> str:
    return ", ".join(
        f"{count} x {kind}"
        for kind, count in kinds_of(device for device, _ in one.devices()).items()
    )


def _nothing_at_all(planner: Planner) -> Infeasible:
    model, job = planner.model, planner.job
    always = type(planner)(
        job,
        CostModel(job, model.pool, model.estimate, model.data),
        planner.devices,
        planner.most_accumulation,
    )
    quickest = always.least("upper_time", Limits())
    if quickest is not None:
        longest = max(kind.available_s for kind in planner.layout.kinds)
        needed = rounded_up(quickest.cost.upper_duration_s)
        return Infeasible(
            f"no feasible plan: availability binds: it takes {needed:g} s at confidence {job.objective.confidence:g}, and "
            f"no hosts that would do are available for so long (the longest window has {longest:.0f} s left; "
            f"windows, UTC: {_windows(planner)})",
            feasible=False,
            binding="availability",
            needed_s=needed,
            longest_window_s=longest,
        )
    return Infeasible(_memory(planner), feasible=False, binding="memory")


def _windows(planner: Planner) -> str:
    """The daily windows of the hosts that the job may use."""
    hosts = {device.host for device in planner.devices}
    found = [
        f"{host.name} {host.available}"
        for host in planner.model.pool.hosts
        if host.name in hosts and host.available
    ]
    return ", ".join(found[:_MOST_KINDS]) + (
        f" and {len(found) - _MOST_KINDS} more" if len(found) > _MOST_KINDS else ""
    )


def _memory(planner: Planner) -> str:
    """Why nothing fits: a sentence with the figures of the roomiest device."""
    least = planner.sizes[0]
    if least < planner.job.devices.min_count:
        return f"no feasible plan: a global batch of {least} for {planner.job.devices.min_count} devices (a sample each at least)"
    roomiest = max(
        (kind.curve for kind in planner.layout.kinds),
        key=lambda curve: curve.memory_limit_bytes or 0,
    )
    need = roomiest.device_memory_bytes(1) / 2**30
    have = (roomiest.memory_limit_bytes or 0) / 2**30
    shared = (
        ", which its ranks share"
        if any(kind.shares_memory for kind in planner.layout.kinds)
        else ""
    )
    seen = [kind.curve for kind in planner.layout.kinds if kind.curve.most_batch_size is not None]
    held = "".join(
        f"; {one.device_type} was seen to hold {one.most_batch_size} at once" for one in seen
    )
    return (
        f"no feasible plan: memory binds: a global batch of {least} does not fit; one sample takes {need:.2f} GiB, "
        f"{roomiest.device_type} has {have:.2f} GiB{shared}{held}"
    )


def rounded_up(value: float) -> float:
    """Three significant digits, never less."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.ceil(value / unit) * unit
