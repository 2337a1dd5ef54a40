"""One configuration: ranks, their shares and their placement; and the limits that it must meet."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from trainwright.tasks.allocate.plan.cheapest_split import ValueFunction
from trainwright.tasks.allocate.plan.confidence import TOLERANCE
from trainwright.tasks.allocate.plan.cost import Cost, RanksCost
from trainwright.tasks.allocate.plan.kinds import Share
from trainwright.tasks.allocate.plan.placement import Placement, placed_devices
from trainwright.tasks.allocate.plan.topology import Topology
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.spec.pool import Device

Goal = Literal["time", "energy", "cost", "upper_time", "upper_cost"]
"""The quantity to minimise: a median, or (`upper_…`) a bound at the job's confidence."""

_FIELDS: dict[Goal, str] = {
    "time": "duration_s",
    "energy": "energy_j",
    "cost": "cost",
    "upper_time": "duration_s",
    "upper_cost": "cost",
}


@dataclass(frozen=True)
class Limits:
    """The limits of a configuration at the job's confidence. Infinite: no limit."""

    deadline_s: float = math.inf
    budget: float = math.inf


def value_of(
    costs: RanksCost, goal: Goal, limits: Limits, available_s: float, z: float
) -> ValueFunction:
    """The goal as a function of T, U and X (`plan.cheapest_split`); infinite outside the limits.

    The ranks' devices are available for `available_s`; limits hold at z.
    """
    end_s = min(limits.deadline_s, available_s) * (1 + TOLERANCE)
    budget = limits.budget * (1 + TOLERANCE)
    field = _FIELDS[goal]

    def value(slowest_s: Any, upper_s: Any, work_j: Any) -> Any:
        import numpy as np

        upper = is_upper(goal)
        found = costs.figures(z if upper else 0.0, upper_s if upper else slowest_s, work_j)
        values = getattr(found, field)
        if end_s < math.inf or budget < math.inf:
            most = found if upper else costs.figures(z, upper_s, work_j)
            over = (most.duration_s > end_s) | (most.cost > budget)
            values = np.where(over, math.inf, values)
        return values

    return value


def is_upper(goal: Goal) -> bool:
    """Whether the goal is a bound at the job's confidence."""
    return goal in ("upper_time", "upper_cost")


@dataclass(frozen=True)
class Configuration:
    """Ranks with their shares and placement, and the cost of training on them."""

    topology: Topology
    counts: tuple[int, ...]
    """Ranks of each group of the topology."""
    placement: Placement
    shares: tuple[Share, ...]
    batch: int
    accumulation: int
    cost: Cost
    strategy: str = "data-parallel"
    layout: Layout | None = None
    """None: data parallel"""
    placed: tuple[tuple[Device, int], ...] | None = None
    """devices with their samples, in the order of the layout; None: as the placement says"""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(self.counts)

    def value(self, goal: Goal) -> float:
        """The value of the goal; infinite if it is unknown."""
        cost = self.cost
        if goal == "time":
            return cost.duration_s.median
        if goal == "energy":
            return cost.energy_j.median if cost.energy_j else math.inf
        if goal == "cost":
            return cost.cost.median if cost.cost else math.inf
        return cost.upper_duration_s if goal == "upper_time" else cost.upper_cost

    def available_s(self) -> float:
        """How long all its devices stay available."""
        return min(share.kind.available_s for share in self.shares)

    def excess(self, limits: Limits) -> float:
        """The relative excess over limits and hosts' windows; 0 if it meets them all."""
        cost = self.cost
        over = max(
            _over(cost.upper_duration_s, min(limits.deadline_s, self.available_s())),
            _over(cost.upper_cost, limits.budget),
        )
        return over if over > TOLERANCE else 0.0

    def devices(self) -> list[tuple[Device, int]]:
        """Devices and their shares, in the order of the pool or of the layout's stages."""
        if self.placed is not None:
            return list(self.placed)
        batches: dict[int, Iterator[int]] = {}
        for kind in {share.kind.index for share in self.shares}:
            mine = [share for share in self.shares if share.kind.index == kind]
            batches[kind] = iter([share.batch for share in mine for _ in range(share.ranks)])
        model = self.topology.model
        return [
            (device, next(batches[model.kind(device).index]))
            for device in placed_devices(self.topology, self.counts, self.placement)
        ]


def _over(value: float, limit: float) -> float:
    """By what share a value is above a limit; 0 or less if it is not."""
    if math.isinf(limit) or value <= limit:
        return 0.0
    return value / limit - 1 if limit > 0 else math.inf


def comes_before(one: Configuration, other: Configuration, goal: Goal) -> bool:
    """Whether a configuration is better for a goal.

    The other objectives break ties: time, energy, cost; then fewer ranks, fewer micro-batches, and
    at last the names of the devices, so that the order of hosts does not matter.
    """
    goals: tuple[Goal, ...] = (goal, "time", "energy", "cost")
    for each in goals:
        mine, theirs = one.value(each), other.value(each)
        if mine != theirs and not math.isclose(mine, theirs, rel_tol=TOLERANCE):
            return mine < theirs

    def key(it: Configuration) -> tuple[int, int, list[tuple[str, str]]]:
        names = sorted((device.type, device.id) for device, _ in it.devices())
        return (it.size, it.accumulation, names)

    return key(one) < key(other)
