"""Laws that every plan keeps, checked on random pools, jobs and limits through `make_plan`.

    python tests/benchmarks/planner/laws.py [--cases N] [--seed N]

More freedom never makes a plan worse: another device, a looser limit, all devices instead of any
subset of them. What a plan states is true: its own "at most" as a limit keeps it, a nearest
feasible limit is feasible and 0.5 % less is not, its front shows no dominated point. What does not
matter changes nothing: devices that the plan does not use, the order and the names of hosts, a
count of n instead of n entries. Prints the number of checks and of violations.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from planner_cases import NOW, Case, small_cases

from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.errors import Infeasible
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.pool import Pool

SLACK = 1e-7
"""Relative differences up to this are rounding."""
Planned = Plan | Infeasible


def planned(case: Case) -> Planned:
    """The plan, or why there is none."""
    try:
        return make_plan(
            case.job,
            case.pool,
            case.estimate,
            case.data,
            now=NOW,
            most_accumulation=case.most_accumulation,
        )
    except Infeasible as error:
        return error


def value(found: Planned, goal: str) -> float:
    """The objective's median; infinite if nothing is feasible."""
    if isinstance(found, Infeasible):
        return math.inf
    predicted = found.predicted
    interval = {
        "time": predicted.duration_s,
        "energy": predicted.energy_j,
        "cost": predicted.cost,
    }[goal]
    return math.inf if interval is None else interval.median


def with_devices(case: Case, **chosen: Any) -> Case:
    """The same case with other fields of `devices`."""
    devices = case.job.devices.model_copy(update=chosen)
    return replace(case, job=case.job.model_copy(update={"devices": devices}))


def with_pool(case: Case, change: Callable[[dict[str, Any]], None]) -> Case:
    """The same case with a changed pool document."""
    document = case.pool.model_dump(mode="json", exclude_unset=True)
    change(document)
    return replace(case, pool=Pool.model_validate(document))


def no_worse(name: str, free: Planned, bound: Planned, goal: str) -> Iterator[str]:
    """A violation if the plan with more freedom is worse than its gap allows."""
    mine, theirs = value(free, goal), value(bound, goal)
    gap = 0.0 if isinstance(free, Infeasible) else free.gap
    if mine > theirs * (1 + SLACK) / (1 - min(gap, 0.999)):
        yield f"{name}: {goal} {mine!r} instead of {theirs!r} (gap {gap:g})"


def violations(case: Case, pick: float) -> Iterator[str]:
    """Every law that this case breaks, in words."""
    goal, found = case.job.objective.minimize, planned(case)
    sizes = case.job.train.global_batch_size != "auto"
    if sizes:  # with `auto`, the global batch may change, and is part of no promise
        yield from subsets(case, found, goal)
        yield from limits(case, found, goal)
        yield from one_more(case, found, goal)
    if isinstance(found, Plan):
        yield from unused(case, found, goal)
        yield from front(found)
    else:
        yield from nearest(case, found)
    yield from renamed(case, found, goal)


def subsets(case: Case, found: Planned, goal: str) -> Iterator[str]:
    """No subset of the devices has a better plan; up to five devices."""
    ids = [device.id for device in case.pool.devices()]
    if len(ids) > 5:
        return
    for count in range(1, len(ids)):
        for some in itertools.combinations(ids, count):
            if case.job.devices.min_count <= count:
                yield from no_worse(
                    f"only {', '.join(some)}",
                    found,
                    planned(with_devices(case, ids=list(some))),
                    goal,
                )


def limits(case: Case, found: Planned, goal: str) -> Iterator[str]:
    """Limits at the plan's own "at most" keep it; without limits it is no worse."""
    objective = case.job.objective
    loose = planned(case.within(math.inf, math.inf))
    yield from no_worse("without limits", loose, found, goal)
    if isinstance(found, Plan) and found.not_exceeded is not None:
        most = found.not_exceeded
        budget = math.inf if most.cost is None else most.cost
        yield from no_worse(
            "at its own limits",
            planned(
                case.within(
                    most.duration_s,
                    budget if objective.budget is not None and budget > 0 else math.inf,
                )
            ),
            found,
            goal,
        )
        tight = planned(case.within(most.duration_s * 0.9, math.inf))
        yield from (
            no_worse("a longer deadline", found, tight, goal) if objective.budget is None else ()
        )


def one_more(case: Case, found: Planned, goal: str) -> Iterator[str]:
    """A copy of the last host, as another machine, makes nothing worse."""

    def add(document: dict[str, Any]) -> None:
        last = document["hosts"][-1]
        document["hosts"].append(last | {"name": "another", "address": "10.9.9.9"})

    yield from no_worse("one more host", planned(with_pool(case, add)), found, goal)


def unused(case: Case, found: Plan, goal: str) -> Iterator[str]:
    """Without the devices that it does not use, the plan has the same value."""
    ids = [device.id for device in found.devices]
    train = case.job.train.model_copy(update={"global_batch_size": found.global_batch_size})
    only = replace(
        with_devices(case, ids=ids),
        job=with_devices(case, ids=ids).job.model_copy(update={"train": train}),
    )
    again = value(planned(only), goal)
    if not math.isclose(again, value(found, goal), rel_tol=SLACK + found.gap):
        yield f"without unused devices: {goal} {again!r} instead of {value(found, goal)!r}"


def front(found: Plan) -> Iterator[str]:
    """No point of the front dominates another one."""
    points = [
        tuple(math.inf if one is None else one for one in (point.time, point.energy, point.cost))
        for point in found.front
    ]
    for one, other in itertools.permutations(points, 2):
        as_good = all(a <= b * (1 + SLACK) for a, b in zip(one, other, strict=True))
        if as_good and any(a < b * (1 - SLACK) for a, b in zip(one, other, strict=True)):
            yield f"the front's point {other} is dominated by {one}"


def nearest(case: Case, found: Infeasible) -> Iterator[str]:
    """The nearest limits are feasible, and 0.5 % less is not."""
    objective, details = case.job.objective, found.details
    deadline_s = math.inf if objective.deadline is None else objective.deadline
    budget = math.inf if objective.budget is None else objective.budget
    near_s, near = details.get("nearest_deadline_s"), details.get("nearest_budget")
    together = near_s is not None and near is not None
    pairs = []
    if together and "deadline_s" in details and "budget" in details:
        pairs = [(near_s, near, 0)]
    else:
        pairs += [(near_s, budget, 1)] if near_s is not None else []
        pairs += [(deadline_s, near, 2)] if near is not None else []
    for at_s, at, tight in pairs:
        if at == 0:
            continue
        if isinstance(planned(case.within(at_s, at)), Infeasible):
            yield f"nearest ({at_s}, {at}) is not feasible"
        less = (at_s * 0.995, at) if tight == 1 else (at_s, at * 0.995)
        if tight and isinstance(planned(case.within(*less)), Plan):
            yield f"less than the nearest ({at_s}, {at}) is feasible"


def renamed(case: Case, found: Planned, goal: str) -> Iterator[str]:
    """Hosts in another order, with other names, and counts as entries: the same value."""

    def change(document: dict[str, Any]) -> None:
        for number, host in enumerate(document["hosts"]):
            host["name"] = f"z{9 - number}"
            kinds = Counter(device["type"] for device in host["devices"])
            if all(set(device) <= {"type", "count"} for device in host["devices"]) and all(
                device.get("count", 1) == 1 for device in host["devices"]
            ):
                host["devices"] = [
                    {"type": name, "count": count} for name, count in sorted(kinds.items())
                ]
        document["hosts"].reverse()

    other = value(planned(with_pool(case, change)), goal)
    if not math.isclose(other, value(found, goal), rel_tol=SLACK) and other != value(found, goal):
        yield f"renamed: {goal} {other!r} instead of {value(found, goal)!r}"


@st.composite
def limited_cases(draw: Any) -> tuple[Case, float]:
    """Cases without limits, and with limits around what their plan needs."""
    case = draw(small_cases())
    found = planned(case)
    if isinstance(found, Plan) and found.not_exceeded is not None:
        most = found.not_exceeded
        shares = st.sampled_from([None, None, 0.3, 0.7, 0.99, 1.5])
        share, other = draw(shares), draw(shares)
        case = case.within(
            math.inf if share is None else most.duration_s * share,
            math.inf if other is None or not most.cost else most.cost * other,
        )
    return case, draw(st.floats(0, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    broken: list[str] = []
    cases = gaps = 0

    @seed(chosen.seed)
    @settings(
        max_examples=chosen.cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(limited_cases())
    def run(drawn: tuple[Case, float]) -> None:
        nonlocal cases, gaps
        cases += 1
        found = planned(drawn[0])
        gaps += isinstance(found, Plan) and found.gap > 0
        broken.extend(violations(*drawn))

    run()
    print(f"cases         {cases}, of which {gaps} with a gap")
    print(f"violations    {len(broken)}")
    for line in broken[:20]:
        print(line)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
