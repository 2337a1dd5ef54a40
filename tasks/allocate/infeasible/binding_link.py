"""Which bandwidth between machines would let a plan meet its limits."""

from __future__ import annotations

from collections.abc import Callable

from trainwright.tasks.allocate.plan.topology import machine_of
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.units import plain

_MOST_POWER = 7
"""Up to 2^7 times the bandwidth is tried."""
_MOST_DEVICES = 16
"""Of more devices, faster links are not tried: each try is a plan."""


def enough_bandwidth(problem: PlanningProblem, meets: Callable[[PlanningProblem], bool]) -> str:
    """The bandwidth between machines with which the job's limits could be met, in words.

    `meets` says whether a problem has a feasible plan. Empty: bandwidth does not help, or it is not
    tried.
    """
    hosts = {device.host for device in problem.devices}
    if len({machine_of(device) for device in problem.devices}) < 2:
        return ""
    if len(problem.devices) > _MOST_DEVICES or not meets(problem.with_bandwidth(2**_MOST_POWER)):
        return ""
    low, high = 0, _MOST_POWER  # powers of two: too slow, fast enough
    while high - low > 1:
        middle = (low + high) // 2
        if meets(problem.with_bandwidth(2**middle)):
            high = middle
        else:
            low = middle
    networks = problem.model.pool.networks()
    slowest = min(networks[name].bandwidth for name in hosts)
    return f"{plain(8e-9 * 2**high * slowest)} Gbit/s between machines would be enough"
