"""The optimal plan by enumeration: every set of devices, micro-batch count and split of the batch.

Simple rather than fast. It has the formulas of a configuration's cost once more, and shares with
the planner only the time of collectives: not the groups of alike devices, the split, the placement,
the bounds, or the search.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainwright.estimator.devices import DEVICE_TYPES, LINK_LATENCY_S, LINK_SHARE, summing_type
from trainwright.estimator.quantiles import NINETY, normal_quantile
from trainwright.tasks.allocate.plan.collectives import INNER, RingShape
from trainwright.tasks.allocate.plan.cost import START_S, CostModel
from trainwright.tasks.allocate.plan.kinds import Kind
from trainwright.tasks.allocate.plan.topology import PAYLOAD, Topology, machine_of
from trainwright.tasks.spec.pool import Device


@dataclass(frozen=True)
class Tried:
    """Some devices with some micro-batches: all splits, one by row of each array."""

    devices: tuple[Device, ...]
    accumulation: int
    batches: Any
    values: dict[str, Any]
    """By goal."""
    available_s: float

    def least(self, goal: str, deadline_s: float = math.inf, budget: float = math.inf) -> float:
        """The least value of a goal within the limits and the hosts' windows."""
        kept = self.values["upper_time"] <= min(deadline_s, self.available_s)
        if not math.isinf(budget):
            kept = kept & (self.values["upper_cost"] <= budget)
        found = self.values[goal][kept]
        return float(found.min()) if len(found) else math.inf


def every_configuration(
    model: CostModel,
    devices: list[Device],
    batch: int,
    least: int,
    most: int,
    most_accumulation: int | None,
) -> Iterator[Tried]:
    """All configurations for a global batch."""
    topology = Topology(model, devices)
    for count in range(least, min(most, len(devices), batch) + 1):
        splits = np.array(
            [
                np.diff((0, *cuts, batch))
                for cuts in itertools.combinations(range(1, batch), count - 1)
            ]
        )
        for chosen in itertools.combinations(devices, count):
            for accumulation in range(1, min(most_accumulation or batch, batch) + 1):
                one = tried(model, topology, devices, chosen, splits, accumulation)
                if one is not None:
                    yield one


def slowest(
    model: CostModel, machines: Iterable[str], *, inner: bool, summing: str | None = None
) -> tuple[float, float] | None:
    """The lowest bandwidth for data, and the highest latency, of all hosts of these machines."""
    pool, found = model.pool, []
    of, machine = pool.networks(), {device.host: machine_of(device) for device in pool.devices()}
    for host in pool.hosts:
        if machine[host.name] in machines:
            between = (of[host.name].bandwidth, of[host.name].latency)
            link = None if summing is None else DEVICE_TYPES[summing].link_bytes_per_s
            inside = (
                (
                    host.inner.bandwidth or LINK_SHARE * link,
                    host.inner.latency or LINK_LATENCY_S,
                )
                if link
                else (
                    host.inner.bandwidth or max(INNER[0], between[0]),
                    host.inner.latency or min(INNER[1], between[1]),
                )
            )
            data = (between[0] * PAYLOAD, between[1])
            found.append(inside if inner else data)
    return (min(one[0] for one in found), max(one[1] for one in found)) if found else None


def fits(model: CostModel, kind: Kind, batch: int, accumulation: int, sharing: int) -> bool:
    """Whether a rank with this share fits in its part of the memory."""
    limit = kind.curve.memory_limit_bytes
    micro = math.ceil(batch / accumulation)
    most = kind.curve.most_batch_size
    if most is not None and micro > most:
        return False
    return limit is None or model.memory_bytes(kind, batch, accumulation) <= limit / sharing


def tried(
    model: CostModel,
    topology: Topology,
    devices: list[Device],
    chosen: tuple[Device, ...],
    splits: Any,
    accumulation: int,
) -> Tried | None:
    """All splits that fit in memory; None if none does."""
    kinds, batch = [model.kind(device) for device in chosen], int(splits[0].sum())
    on_machine = Counter(
        machine_of(device) for device, kind in zip(chosen, kinds, strict=True) if kind.shares_memory
    )
    # Ranks of a kind have the same part of the memory: the smallest one on all their machines.
    sharing: dict[int, int] = {}
    for device, kind in zip(chosen, kinds, strict=True):
        ranks = on_machine[machine_of(device)] if kind.shares_memory else 1
        sharing[kind.index] = max(ranks, sharing.get(kind.index, 1))
    most = np.array(
        [
            max(
                (
                    size
                    for size in range(1, batch + 1)
                    if fits(model, kind, size, accumulation, sharing[kind.index])
                ),
                default=0,
            )
            for kind in kinds
        ]
    )
    splits = splits[(splits <= most).all(axis=1)]
    if not len(splits):
        return None
    machines = Counter(machine_of(device) for device in chosen)
    network = slowest(model, set(machines), inner=False) if len(machines) > 1 else None
    several = {name for name, ranks in machines.items() if ranks > 1}
    summing = summing_type([kind.device_type for kind in kinds])
    if model.estimate.local_link is not None and summing is None:
        several.discard("this machine")
    inner = slowest(model, several, inner=True, summing=summing)
    here = machines.pop("this machine", 0)
    ring = RingShape(
        len(machines) + (here > 0),
        max(machines.values(), default=0),
        here,
        len(chosen),
        network,
        inner,
        summing is not None,
    )
    total, tail, overlap = topology.collectives.time(ring)
    sizes = range(1, batch + 1)
    curves = [[kind.curve.median_s(size, accumulation) for size in sizes] for kind in kinds]
    times = np.column_stack(curves)[splits - 1, np.arange(len(kinds))]
    steps, per_j = model.steps(batch), model.energy_price_per_j or 0.0
    price = sum(kind.price_per_s or 0.0 for kind in kinds)
    idle_w = sum(kind.idle_w or 0.0 for kind in kinds)
    extra_w = np.array([(kind.load_w or 0.0) - (kind.idle_w or 0.0) for kind in kinds])

    def at(z: float) -> tuple[Any, Any, Any]:
        factors = np.array([kind.curve.high_factor**z for kind in kinds])
        slowest_s = (times * factors).max(axis=1)
        hidden_s = slowest_s * overlap * max(0.0, 1 - z) / accumulation
        step_s = slowest_s + np.maximum(tail.at(z), total.at(z) - hidden_s)
        duration_s = steps * step_s + START_S.at(z)
        spread = max(1 + kind.curve.power_spread for kind in kinds) ** z
        work_j = factors.max() * (times @ extra_w)
        energy_j = spread * (steps * work_j + idle_w * duration_s)
        return duration_s, energy_j, price * duration_s + per_j * energy_j

    median, upper = at(0.0), at(normal_quantile(model.job.objective.confidence) / NINETY)
    values = dict(
        zip(
            ("time", "energy", "cost", "upper_time", "upper_cost"),
            (*median, upper[0], upper[2]),
            strict=True,
        )
    )
    return Tried(chosen, accumulation, splits, values, min(kind.available_s for kind in kinds))
