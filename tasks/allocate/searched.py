"""States which choices a plan was compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainwright.tasks.allocate.plan.configuration import Configuration
from trainwright.tasks.allocate.plan.device_counts import device_counts
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.allocate.strategies import STRATEGIES
from trainwright.tasks.runs.artefacts import Searched
from trainwright.tasks.spec.eligibility import without_price

_MOST_SETS = 10**15


def searched(problem: PlanningProblem, chosen: Configuration) -> Searched:
    """The choices that the plan of a problem was compared with."""
    job, space = problem.job, problem.request(chosen.batch).space()
    rooms = [group.count for group in problem.topology.groups]
    most = min(job.devices.max_count or len(problem.devices), max(problem.sizes))
    return Searched(
        devices=len(problem.devices),
        device_sets=_sets(rooms, job.devices.min_count, most),
        global_batch_sizes=problem.sizes,
        micro_batches=space.accumulations,
        layouts=list(STRATEGIES),
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
