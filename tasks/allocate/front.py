"""What else there was: alternatives with the reason each lost, and the Pareto front of time against energy and cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from trainwright.tasks.allocate.plan.configuration import (
    EXACT,
    Configuration,
    Found,
    Goal,
    Limits,
    Space,
)
from trainwright.tasks.allocate.strategies import best
from trainwright.tasks.runs.artefacts import Alternative, FrontPoint
from trainwright.tasks.spec.pool import Device

if TYPE_CHECKING:
    from trainwright.tasks.allocate.planner import Planner

_SHOWN = 10
_DURATIONS = 6  # between the quickest and the most frugal
_FRONT_NODES = 60
_NAMES = {"time": "duration", "energy": "energy", "cost": "cost"}


def kinds_of(devices: Iterable[Device]) -> dict[str, int]:
    """Devices counted by kind, as a person reads it."""
    counts: dict[str, int] = {}
    for device in devices:
        cores = (
            f" ({device.cores:g} core{'s' if device.cores != 1 else ''})"
            if device.cores is not None
            else ""
        )
        speed = f" (speed {device.speed:g}, emulated)" if device.speed is not None else ""
        counts[device.type + cores + speed] = counts.get(device.type + cores + speed, 0) + 1
    return counts


def alternatives(planner: Planner, chosen: Found) -> list[Alternative]:
    """The best of what was looked at and lost at the plan's global batch: a device more or less, and other counts."""
    result = chosen.best
    assert result is not None
    looked_at = [*chosen.seen, *neighbours(planner, result)]
    ranked = sorted(
        looked_at,
        key=lambda one: (
            one.excess(planner.limits),
            one.value(planner.goal),
            one.size,
            one.batch,
            one.counts,
        ),
    )
    shown: dict[object, Alternative] = {
        _what(result): Alternative(devices={}, global_batch_size=0, feasible=True, reason="")
    }
    for one in ranked:
        if len(shown) > _SHOWN:
            break
        if _what(one) not in shown:
            shown[_what(one)] = _lost(planner, one, result)
    return list(shown.values())[1:]


def _what(one: Configuration) -> object:
    counts: Counter[object] = Counter()
    for share in one.shares:
        counts[share.kind.curve.device_type, share.kind.curve.cores, share.kind.curve.speed] += (
            share.ranks
        )
    return (frozenset(counts.items()), one.batch, one.accumulation)


def neighbours(planner: Planner, result: Configuration) -> list[Configuration]:
    """The same batch and accumulation with a rank more or less of one group, or of the same number of another."""
    request = planner.request(result.batch, planner.goal, planner.limits)
    space = Space(
        result.layout, result.batch, request.least, request.most, planner.most_accumulation
    )
    counts, found = list(result.counts), []
    for place, group in enumerate(result.layout.groups):
        changes = [{place: counts[place] + 1}, {place: counts[place] - 1}]
        if counts[place] == 0:
            changes.append(
                {other: 0 for other, count in enumerate(counts) if count} | {place: result.size}
            )
        for change in changes:
            tried = [change.get(other, count) for other, count in enumerate(counts)]
            if 0 <= tried[place] <= group.count and any(tried):
                found += space.configure(tried, result.accumulation)[:1]
        if len(found) > 40 * _SHOWN:
            break
    return found


def _lost(planner: Planner, one: Configuration, best: Configuration) -> Alternative:
    name = _NAMES[planner.job.objective.minimize]
    mine, theirs, goal = one.value(planner.goal), best.value(planner.goal), planner.goal
    over = one.excess(planner.limits)
    if over > 0:
        reason = _missed(planner, one) + (_sums(one, best) and f"; {_sums(one, best)}")
    elif mine <= theirs * (1 + EXACT):
        reason = f"the same {name}, {'more' if one.size > best.size else 'other'} devices"
    else:
        reason = (
            f"{_more(mine / theirs if theirs > 0 else math.inf, name)}{_because(one, best, goal)}"
        )
    return Alternative(
        devices=kinds_of(device for device, _ in one.devices()),
        global_batch_size=one.batch,
        accumulation=one.accumulation,
        predicted=one.cost.prediction(),
        feasible=over == 0,
        reason=reason,
    )


def _more(ratio: float, name: str) -> str:
    return (
        f"{100 * (ratio - 1):.2g} % more {name}" if ratio < 1.995 else f"{ratio:.3g} x the {name}"
    )


def _sums(one: Configuration, best: Configuration) -> str:
    """Why the best's devices and more take longer, where they do; other devices may just be slower."""
    mine, theirs = (kinds_of(device for device, _ in each.devices()) for each in (one, best))
    more = one.size > best.size and all(
        mine.get(kind, 0) >= count for kind, count in theirs.items()
    )
    slower = more and one.cost.step_s.median > best.cost.step_s.median
    return "sums cost more than the extra devices save" if slower else ""


def _because(one: Configuration, best: Configuration, goal: Goal) -> str:
    mine, theirs = one.cost.step_s.median, best.cost.step_s.median
    if sums := _sums(one, best):
        return f": {sums}"
    if one.size > best.size and goal != "time" and mine <= theirs:
        return f": {one.size / best.size:.2g} x the devices for {100 * (1 - mine / theirs):.2g} % less time"
    if mine > theirs and (one.size < best.size or goal != "time"):
        return f": a step takes {mine / theirs:.2g} x as long"
    return ""


def _missed(planner: Planner, one: Configuration) -> str:
    limits, cost = planner.limits, one.cost
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
    much = (
        f"misses {name} by {100 * (ratio - 1):.2g} %"
        if ratio < 1.995
        else f"takes {ratio:.3g} x {name}"
    )
    return f"{much} at confidence {planner.model.confidence:g}"


def front(planner: Planner, result: Configuration) -> list[FrontPoint]:
    """Configurations of the plan's global batch that none is better than in time, energy and cost at once, quickest first."""
    known = [*neighbours(planner, result), result]
    goals: list[Goal] = [goal for goal in ("energy", "cost") if result.value(goal) < math.inf]
    request = replace(planner.request(result.batch, "time", Limits()), most_nodes=_FRONT_NODES)

    def ask(goal: Goal, deadline: float = math.inf) -> Configuration | None:
        found = best(replace(request, goal=goal, limits=Limits(deadline)))
        known.extend(found.seen)
        return found.best

    quickest = ask("time")
    for goal in goals:
        frugal = ask(goal)
        if (
            quickest is None
            or frugal is None
            or frugal.cost.upper_duration_s <= quickest.cost.upper_duration_s
        ):
            continue
        first, last = quickest.cost.upper_duration_s, frugal.cost.upper_duration_s
        for place in range(_DURATIONS):
            ask(goal, first * (last / first) ** (place / _DURATIONS))
    known = [one for one in known if one.excess(Limits()) <= 0]
    return [point(planner, one, chosen=one is result) for one in undominated(known, result)]


def point(planner: Planner, one: Configuration, *, chosen: bool) -> FrontPoint:
    """A configuration as a point of a front."""
    return FrontPoint(
        time=one.value("time"),
        energy=one.value("energy") if one.cost.energy_j else None,
        cost=one.value("cost") if one.cost.cost else None,
        devices=kinds_of(device for device, _ in one.devices()),
        global_batch_size=one.batch,
        accumulation=one.accumulation,
        feasible=one.excess(planner.limits) <= 0,
        chosen=chosen,
    )


def undominated(known: Iterable[Configuration], keep: Configuration) -> list[Configuration]:
    """Those that no other is as good as in time, energy and cost, and better in one; `keep` always, quickest first."""

    def values(one: Configuration) -> tuple[float, float, float]:
        return (one.value("time"), one.value("energy"), one.value("cost"))

    ordered = sorted(known, key=lambda one: (values(one), one.size, one.counts))
    kept: list[Configuration] = []
    for one in ordered:  # whatever dominates it comes before it
        mine = values(one)
        if not any(
            all(a <= b * (1 + EXACT) for a, b in zip(values(other), mine, strict=True))
            for other in kept
        ):
            kept.append(one)
    if not any(one is keep for one in kept):
        kept = [one for one in kept if values(one) != values(keep)] + [keep]
    return sorted(kept, key=values)
