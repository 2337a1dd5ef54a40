"""What a plan says of itself: prices, windows, shares of a step, and what it was compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainwright.tasks.allocate.plan.configuration import Configuration
from trainwright.tasks.allocate.plan.device_counts import device_counts
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.allocate.strategies import STRATEGIES
from trainwright.tasks.runs.artefacts.plan import (
    Plan,
    PlannedDevice,
    Prediction,
    SearchedChoices,
    StepShares,
)
from trainwright.tasks.spec.eligibility import without_price
from trainwright.tasks.spec.pool import Pool

_MOST_SETS = 10**15


def described(plan: Plan, pool: Pool) -> Plan:
    """The plan, with these fields filled from its prediction and its pool."""
    predicted = plan.predicted
    assert predicted is not None
    windows = {host.name: host.available for host in pool.hosts}
    step_s = predicted.step_time_s.median
    slowest_s = max(device.step_time_s.median for device in plan.devices)
    staged = plan.layout is not None and plan.layout.has_stages
    last_s = step_s if staged else slowest_s  # a stage waits until the step ends
    devices = [
        device.model_copy(
            update={
                "step_shares": _shares(device.step_time_s.median, last_s, step_s),
                "price_per_hour": _price(pool, device.type),
                "available": windows[device.host],
            }
        )
        for device in plan.devices
    ]
    return plan.model_copy(
        update={
            "devices": devices,
            "predicted": _with_parts(predicted, devices, pool),
            "currency": pool.currency,
        }
    )


def _shares(own_s: float, slowest_s: float, step_s: float) -> StepShares:
    return StepShares(
        compute=own_s / step_s,
        wait=(slowest_s - own_s) / step_s,
        communicate=max(0.0, step_s - slowest_s) / step_s,
    )


def _price(pool: Pool, device_type: str) -> float | None:
    """Per hour. In a pool that prices only energy, devices are free."""
    rented = any(name != "energy" for name in pool.prices)
    return pool.prices.get(device_type) if rented or not pool.prices else 0.0


def _with_parts(predicted: Prediction, devices: list[PlannedDevice], pool: Pool) -> Prediction:
    """rent = Σ_r price_r · duration, and energy's cost = price of energy · energy."""
    if predicted.cost is None:
        return predicted
    per_hour = sum(device.price_per_hour or 0.0 for device in devices)
    energy, per_kwh = predicted.energy_j, pool.prices.get("energy")
    return predicted.model_copy(
        update={
            "rent": predicted.duration_s * (per_hour / 3600),
            "energy_cost": energy * (per_kwh / 3.6e6) if energy and per_kwh else None,
        }
    )


def searched(
    problem: PlanningProblem, chosen: Configuration, layouts: Sequence[str] = ()
) -> SearchedChoices:
    """The choices that the plan of a problem was compared with."""
    job, space = problem.job, problem.request(chosen.batch).space()
    rooms = [group.count for group in problem.topology.groups]
    most = min(job.devices.max_count or len(problem.devices), max(problem.sizes))
    return SearchedChoices(
        devices=len(problem.devices),
        device_sets=_sets(rooms, job.devices.min_count, most),
        global_batch_sizes=problem.sizes,
        most_micro_batches=space.accumulations[-1][1],
        layouts=list(dict.fromkeys([*STRATEGIES, *layouts])),
        without_price=device_counts(without_price(problem.model.pool, job)),
    )


def _sets(rooms: Sequence[int], least: int, most: int) -> int | None:
    """How many choices of 0 to `rooms[i]` devices of each group i have `least` to `most` in all.

    None if there are more than `_MOST_SETS`.
    """
    total = sum(rooms)
    if least <= 1 and most >= total:
        every = math.prod(room + 1 for room in rooms) - 1
        return every if every <= _MOST_SETS else None
    ways = [1] + [0] * min(most, total)  # by number of devices
    for room in rooms:
        window, before = 0, ways
        ways = []
        for number, more in enumerate(before):
            window += more - (before[number - room - 1] if number > room else 0)
            ways.append(window)
        if sum(ways[least:]) > _MOST_SETS:
            return None
    return sum(ways[least:])
