"""The optimal plan by enumeration of every set of devices, global batch and accumulation.

Simple rather than fast. It shares with the planner only the cost of one configuration (`CostModel`,
the time of collectives): not the groups of alike devices, the split, the placement, the bounds, or
the search.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trainwright.tasks.allocate.plan.collectives import RingShape
from trainwright.tasks.allocate.plan.cost import Cost, CostModel
from trainwright.tasks.allocate.plan.kinds import Share
from trainwright.tasks.allocate.plan.topology import Topology, machine_of
from trainwright.tasks.spec.pool import Device


@dataclass(frozen=True)
class Tried:
    """One configuration, and how long its devices stay available."""

    devices: tuple[Device, ...]
    batches: tuple[int, ...]
    accumulation: int
    cost: Cost
    available_s: float

    def value(self, goal: str) -> float:
        """The value of the goal; infinite if it is unknown."""
        cost = self.cost
        if goal == "upper_time":
            return cost.upper_duration_s
        if goal == "upper_cost":
            return cost.upper_cost
        found = {"time": cost.duration_s, "energy": cost.energy_j, "cost": cost.cost}[goal]
        return found.median if found is not None else math.inf

    def keeps(self, deadline_s: float, budget: float) -> bool:
        """Whether it meets the limits and its hosts' windows."""
        in_time = self.cost.upper_duration_s <= min(deadline_s, self.available_s)
        return in_time and (math.isinf(budget) or self.cost.upper_cost <= budget)


def every_configuration(
    model: CostModel,
    devices: list[Device],
    batch: int,
    least: int,
    most: int,
    most_accumulation: int,
) -> Iterator[Tried]:
    """All configurations for a global batch."""
    topology = Topology(model, devices)
    ordered = sorted(devices, key=lambda device: model.kind(device).index)
    for count in range(least, min(most, len(devices), batch) + 1):
        for chosen in itertools.combinations(ordered, count):
            for accumulation in accumulations(model, devices, batch, most_accumulation):
                one = configuration(model, topology, devices, chosen, batch, accumulation)
                if one is not None:
                    yield one


def accumulations(model: CostModel, devices: list[Device], batch: int, most: int) -> list[int]:
    """1, 2, 4, … up to the first at which memory limits no device."""
    tried, accumulation = [], 1
    while accumulation <= min(most, batch):
        tried.append(accumulation)
        kinds = [model.kind(device) for device in devices]
        if all(
            not kind.shares_memory and len(model.times(kind, batch, accumulation)) == batch
            for kind in kinds
        ):
            break
        accumulation *= 2
    return tried


def slowest_network(
    model: CostModel, devices: list[Device], machines: Iterable[str]
) -> tuple[float, float]:
    """The lowest bandwidth and the highest latency of all hosts of these machines."""
    of = model.pool.networks()
    networks = [of[device.host] for device in devices if machine_of(device) in machines]
    return min(one.bandwidth for one in networks), max(one.latency for one in networks)


def configuration(
    model: CostModel,
    topology: Topology,
    devices: list[Device],
    chosen: tuple[Device, ...],
    batch: int,
    accumulation: int,
) -> Tried | None:
    """These devices' shares: each sample goes to the device that finishes one more sample first."""
    kinds = [model.kind(device) for device in chosen]
    times = [model.times(kind, batch, accumulation) for kind in kinds]
    batches = [1] * len(chosen)
    if any(len(one) < 1 for one in times):
        return None
    heap = [(one[1], rank) for rank, one in enumerate(times) if len(one) > 1]
    heapq.heapify(heap)
    for _ in range(batch - len(chosen)):
        if not heap:
            return None
        _, rank = heapq.heappop(heap)
        batches[rank] += 1
        if batches[rank] < len(times[rank]):
            heapq.heappush(heap, (times[rank][batches[rank]], rank))
    largest = {
        kind.index: max(b for k, b in zip(kinds, batches, strict=True) if k is kind)
        for kind in kinds
    }
    for machine in {machine_of(device) for device in chosen}:
        sharing = [
            kind
            for device, kind in zip(chosen, kinds, strict=True)
            if machine_of(device) == machine and kind.shares_memory
        ]
        needed = sum(
            model.memory_bytes(kind, largest[kind.index], accumulation) for kind in sharing
        )
        if any(needed > (kind.curve.memory_limit_bytes or math.inf) for kind in sharing):
            return None
    machines = Counter(machine_of(device) for device in chosen)
    network = slowest_network(model, devices, set(machines)) if len(machines) > 1 else None
    here = machines.pop("this machine", 0)
    total = sum(machines.values()) + here
    ring = RingShape(
        len(machines) + (here > 0), max(machines.values(), default=0), here, total, network
    )
    shares = [
        Share(kind, size, count)
        for (kind, size), count in Counter(zip(kinds, batches, strict=True)).items()
    ]
    cost = model.cost(shares, topology.collectives.time(ring), batch, accumulation)
    return Tried(
        chosen, tuple(batches), accumulation, cost, min(kind.available_s for kind in kinds)
    )
