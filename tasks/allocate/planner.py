"""The plan: which devices, which global batch, which share for each. Arithmetic on values; no clock but for its own.

Devices of a kind (type, cores, speed) on a host are alike, so a configuration is a count for each. All are tried where there are
few enough of them; otherwise devices are added greedily, and the plan says so.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from trainwright.estimator.communication import Link, all_reduce, on_cycle
from trainwright.estimator.curves import DeviceCurve, Interval
from trainwright.estimator.devices import HOST_MEMORY_TYPES
from trainwright.estimator.energy import power_of
from trainwright.tasks.allocate.split import split_batch
from trainwright.tasks.artefacts import Alternative, DataSchema, Estimate, Plan, PlannedDevice, Prediction
from trainwright.tasks.errors import BadInput, Infeasible
from trainwright.tasks.job import DeviceFilter, Job
from trainwright.tasks.pool import Device, Pool

EXACT_LIMIT = 20_000
_SHOWN = 10
_START_S = Interval(median=6.0, low=3.0, high=20.0)  # processes start, data is read: a prior
# Between two ranks of one machine, as a prior where nobody has measured it.
_LOOPBACK = Link(bandwidth_bytes_per_s=0.5e9, latency_s=2e-3, spread=0.0)
_UNMEASURED_LOW, _UNMEASURED_HIGH = 1 / 2, 3.0  # of what a prior, or the pool file's network, makes of a collective
_MACHINE = "this machine"  # whatever the pool's hosts call its address
_GOOD_ENOUGH = 0.9  # of the best throughput
_NORMAL = NormalDist()


@dataclass(frozen=True)
class _Configuration:
    """Devices with their shares, and what that is predicted to take."""

    devices: tuple[Device, ...]
    batches: tuple[int, ...]
    prediction: Prediction
    upper: dict[str, float]

    @property
    def global_batch_size(self) -> int:
        return sum(self.batches)


def usable(pool: Pool, chosen: DeviceFilter) -> list[Device]:
    """The pool's devices that the job's restrictions leave. Raises BadInput where a name is unknown or too few are left."""
    devices = pool.devices()
    known = {
        "types": {device.type for device in devices},
        "hosts": {device.host for device in devices},
        "ids": {device.id for device in devices},
    }
    for field, names in (("types", chosen.types), ("hosts", chosen.hosts), ("ids", chosen.ids)):
        for name in names:
            if name not in known[field]:
                raise BadInput(f"devices.{field}: got {name!r}; pool {pool.name} has {', '.join(sorted(known[field]))}")
    for name in chosen.exclude:
        if not any(name in names for names in known.values()):
            raise BadInput(f"devices.exclude: got {name!r}; pool {pool.name} has no such type, host or id")
    left = [
        device
        for device in devices
        if (not chosen.types or device.type in chosen.types)
        and (not chosen.hosts or device.host in chosen.hosts)
        and (not chosen.ids or device.id in chosen.ids)
        and not {device.type, device.host, device.id} & set(chosen.exclude)
    ]
    if len(left) < chosen.min_count:
        raise BadInput(
            f"devices.min_count: got {chosen.min_count}; pool {pool.name} has {len(left)} device(s) that the job may use"
        )
    return left


def make_plan(job: Job, pool: Pool, estimate: Estimate, data: DataSchema, free: Sequence[Device] | None = None) -> Plan:
    """The plan that minimises the job's objective within its limits at its confidence.

    `free` are the devices to choose from (default: all that the job may use). Raises Infeasible, with the limit that binds and
    the nearest deadline and budget that would do.
    """
    started = time.perf_counter()
    devices = usable(pool, job.devices) if free is None else list(free)
    if len(devices) < job.devices.min_count:
        raise Infeasible(
            f"devices: {len(devices)} free, at least {job.devices.min_count} needed (devices.min_count)",
            binding="devices",
        )
    size = job.train.global_batch_size
    if size != "auto" and size > data.train_rows:
        raise BadInput(f"train.global_batch_size: got {size}; allowed: at most the {data.train_rows} rows to train on")
    planner = _Planner(job, pool, estimate, data)
    groups = _groups(devices)
    search: Literal["exact", "greedy"] = (
        "exact" if math.prod(len(group) + 1 for group in groups) <= EXACT_LIMIT else "greedy"
    )
    picks = _every_pick(groups, job.devices) if search == "exact" else planner.greedy_picks(groups)
    found = [configuration for pick in picks if (configuration := planner.configure(pick)) is not None]
    if not found:
        raise Infeasible(planner.memory_reason(devices), binding="memory")
    ranked = sorted(found, key=lambda one: (planner.excess(one), planner.objective(one), len(one.devices)))
    best = ranked[0]
    if planner.excess(best) > 0:
        raise planner.infeasible(found)
    return Plan(
        feasible=True,
        objective=job.objective.minimize,
        devices=[
            PlannedDevice(
                **device.model_dump(),
                batch_size=batch,
                step_time_s=estimate.curve(device).step_time(batch),
                peak_memory_bytes=estimate.curve(device).device_memory_bytes(batch),
                power=power_of(estimate.curve(device)),
            )
            for device, batch in zip(best.devices, best.batches, strict=True)
        ],
        global_batch_size=best.global_batch_size,
        steps_per_epoch=planner.steps_per_epoch(best.global_batch_size),
        epochs=job.train.epochs,
        strategy={"name": "data-parallel", "collective": "ring all-reduce"},
        predicted=best.prediction,
        deadline_s=job.objective.deadline,
        alternatives=[planner.alternative(one, best) for one in ranked[1 : _SHOWN + 1]],
        search=search,
        solve_time_s=time.perf_counter() - started,
    )


class _Planner:
    def __init__(self, job: Job, pool: Pool, estimate: Estimate, data: DataSchema) -> None:
        self.job, self.pool, self.estimate, self.data = job, pool, estimate, data
        self.gradient_bytes = estimate.gradient_bytes
        self.network = Link(bandwidth_bytes_per_s=pool.network.bandwidth, latency_s=pool.network.latency, spread=0.0)

    def steps_per_epoch(self, batch: int) -> int:
        return math.ceil(self.data.train_rows / batch)

    def configure(self, devices: Sequence[Device]) -> _Configuration | None:
        """The best batch and split for these devices; None where none fits in memory."""
        size = self.job.train.global_batch_size
        if size != "auto":
            return self._with_batch(devices, size)
        low, high = self.job.train.batch_bounds
        low, high = min(low, self.data.train_rows), min(high, self.data.train_rows)
        sizes = sorted({low, high} | {2**power for power in range(21) if low <= 2**power <= high})
        found = [one for size in sizes if (one := self._with_batch(devices, size)) is not None]
        if not found:
            return None
        # A larger batch learns less per sample: take the smallest that uses the devices well and meets the limits. Where none
        # does both, the smallest of those that meet them, or else the one that misses them least.
        rates = [one.global_batch_size / one.prediction.step_time_s.median for one in found]
        good = [one for one, rate in zip(found, rates, strict=True) if rate >= _GOOD_ENOUGH * max(rates)]
        return next((one for one in good if self.excess(one) <= 0), None) or min(found, key=self.excess)

    def _with_batch(self, devices: Sequence[Device], size: int) -> _Configuration | None:
        curves = [self.estimate.curve(device) for device in devices]
        limits = [_largest_batch(curve, size) for curve in curves]
        batches = split_batch(size, [curve.step_time_s for curve in curves], limits)
        if batches is None or not self._fits_hosts(devices, batches):
            return None
        times = [curve.step_time(batch) for curve, batch in zip(curves, batches, strict=True)]
        step = Interval(
            median=max(one.median for one in times),
            low=max(one.low for one in times),
            high=max(one.high for one in times),
        )
        step = _sum(step, self._all_reduce_s(devices))
        steps = self.steps_per_epoch(size) * self.job.train.epochs
        duration = _sum(step * steps, _START_S)
        powers = [self._powers(device) for device in devices]
        energy = None
        if all(power is not None for power in powers):
            # A device draws its load while it computes and its idle power while it waits for the others.
            busy = sum(load * one.median for (_, load), one in zip(filter(None, powers), times, strict=True))
            idle = sum(
                watts * (step.median - one.median) for (watts, _), one in zip(filter(None, powers), times, strict=True)
            )
            scale = steps * (busy + idle) / step.median
            energy = _sum(step * scale, _START_S * sum(watts for watts, _ in filter(None, powers)))
            off = 1 + max(curve.power_spread for curve in curves)
            energy = Interval(median=energy.median, low=energy.low / off, high=energy.high * off)
        cost = self._cost(devices, duration, energy)
        prediction = Prediction(step_time_s=step, duration_s=duration, energy_j=energy, cost=cost)
        upper = {
            "time": _at(duration, self.job.objective.confidence),
            "energy": _at(energy, self.job.objective.confidence) if energy else math.inf,
            "cost": _at(cost, self.job.objective.confidence) if cost else math.inf,
        }
        return _Configuration(tuple(devices), tuple(batches), prediction, upper)

    def _fits_hosts(self, devices: Sequence[Device], batches: Sequence[int]) -> bool:
        """Whether ranks that share their host's memory fit into it together."""
        needed: dict[str, float] = {}
        limits: dict[str, float] = {}
        for device, batch in zip(devices, batches, strict=True):
            curve = self.estimate.curve(device)
            if device.type in HOST_MEMORY_TYPES and curve.memory_limit_bytes is not None:
                needed[device.address] = needed.get(device.address, 0.0) + curve.device_memory_bytes(batch)
                limits[device.address] = curve.memory_limit_bytes
        return all(needed[address] <= limits[address] for address in needed)

    def _all_reduce_s(self, devices: Sequence[Device]) -> Interval:
        """Ring all-reduces of the gradients: within each machine, the slowest counts, and then between machines."""
        ranks = Counter(_MACHINE if device.local else device.address for device in devices)
        within = [self._within_s(count, here=address == _MACHINE) for address, count in ranks.items()]
        between = _unmeasured(all_reduce(self.network, self.gradient_bytes, len(ranks)))
        return _sum(max(within, key=lambda one: one.median), between)

    def _within_s(self, ranks: int, *, here: bool) -> Interval:
        """By the link that was measured, which is this machine's; elsewhere by the prior."""
        if ranks > 1 and here and self.estimate.local_link is not None:
            return on_cycle(all_reduce(self.estimate.local_link, self.gradient_bytes, ranks), self.estimate.cycle_s)
        return _unmeasured(all_reduce(_LOOPBACK, self.gradient_bytes, ranks))

    def _powers(self, device: Device) -> tuple[float, float] | None:
        curve = self.estimate.curve(device)
        return None if curve.idle_w is None or curve.load_w is None else (curve.idle_w, curve.load_w)

    def _cost(self, devices: Sequence[Device], duration: Interval, energy: Interval | None) -> Interval | None:
        """Rent of the devices by the hour, and energy by the kWh; None where the pool names no prices."""
        prices = self.pool.prices
        rent = [prices.get(device.type) for device in devices]
        if all(price is None for price in rent) and ("energy" not in prices or energy is None):
            return None
        total = duration * (sum(price or 0.0 for price in rent) / 3600)
        if "energy" in prices and energy is not None:
            power = energy * (prices["energy"] / 3.6e6)
            total = _sum(total, power)
        return total

    def objective(self, one: _Configuration) -> float:
        value = {"time": one.prediction.duration_s, "energy": one.prediction.energy_j, "cost": one.prediction.cost}[
            self.job.objective.minimize
        ]
        if value is None:
            raise BadInput(
                f"objective.minimize: got {self.job.objective.minimize!r}; pool {self.pool.name} "
                + (
                    "names no prices"
                    if self.job.objective.minimize == "cost"
                    else "has a device whose power is not known"
                )
            )
        return value.median

    def excess(self, one: _Configuration) -> float:
        """By how much the limits are missed, as a share; 0 where they hold at the job's confidence."""
        over = 0.0
        deadline, budget = self.job.objective.deadline, self.job.objective.budget
        if deadline is not None:
            over = max(over, one.upper["time"] / deadline - 1)
        if budget is not None:
            over = max(over, one.upper["cost"] / budget - 1)
        return over

    def infeasible(self, found: Sequence[_Configuration]) -> Infeasible:
        """Which limit binds, and what would do."""
        objective = self.job.objective
        quickest = min(found, key=lambda one: one.upper["time"])
        cheapest = min(found, key=lambda one: one.upper["cost"])
        details: dict[str, object] = {"confidence": objective.confidence}
        words = []
        late = objective.deadline is not None and quickest.upper["time"] > objective.deadline
        dear = objective.budget is not None and cheapest.upper["cost"] > objective.budget
        if late:
            nearest = _rounded_up(quickest.upper["time"])
            words.append(
                f"the deadline of {objective.deadline:g} s binds: the nearest that is feasible is {nearest:g} s"
            )
            details |= {"nearest_deadline_s": nearest, "deadline_s": objective.deadline}
        if dear:
            if math.isinf(cheapest.upper["cost"]):
                raise BadInput(
                    f"objective.budget: got {objective.budget:g}; the cost is not known: pool {self.pool.name} names no prices, "
                    "or a price of energy and no power"
                )
            nearest = _rounded_up(cheapest.upper["cost"])
            words.append(f"the budget of {objective.budget:g} binds: the nearest that is feasible is {nearest:g}")
            details |= {"nearest_budget": nearest, "budget": objective.budget}
        if not words:
            in_time = min(
                (one for one in found if objective.deadline is None or one.upper["time"] <= objective.deadline),
                key=lambda one: one.upper["cost"],
            )
            nearest = _rounded_up(in_time.upper["cost"])
            words.append(f"deadline and budget bind together: within the deadline it takes a budget of {nearest:g}")
            details |= {"nearest_budget": nearest}
        binding = "deadline" if late else "budget"
        shape = ", ".join(f"{count} x {kind}" for kind, count in _kinds(quickest.devices).items())
        return Infeasible(
            f"no feasible plan: {' and '.join(words)} (at confidence {objective.confidence:g}; quickest: {shape})",
            feasible=False, binding=binding, **details,
        )  # fmt: skip

    def memory_reason(self, devices: Sequence[Device]) -> str:
        """Why nothing fits: a sentence with the figures of the roomiest device."""
        size = self.job.train.global_batch_size
        least = size if size != "auto" else min(self.job.train.batch_bounds[0], self.data.train_rows)
        if least < self.job.devices.min_count:
            count = self.job.devices.min_count
            return f"no feasible plan: a global batch of {least} for {count} devices (one sample each at least)"
        curves = [self.estimate.curve(device) for device in devices]
        roomiest = max(curves, key=lambda curve: curve.memory_limit_bytes or 0)
        need = roomiest.device_memory_bytes(1) / 2**30
        have = (roomiest.memory_limit_bytes or 0) / 2**30
        shared = ", which its ranks share" if roomiest.device_type in HOST_MEMORY_TYPES else ""
        return (
            f"no feasible plan: memory binds: a global batch of {least} does not fit; one sample takes {need:.2f} GiB, "
            f"{roomiest.device_type} has {have:.2f} GiB{shared}"
        )

    def alternative(self, one: _Configuration, best: _Configuration) -> Alternative:
        name, unit = {"time": ("duration", "s"), "energy": ("energy", "J"), "cost": ("cost", "")}[
            self.job.objective.minimize
        ]
        if self.excess(one) > 0:
            reason = f"misses a limit by {100 * self.excess(one):.0f} %"
        else:
            mine, theirs = self.objective(one), self.objective(best)
            more = (
                f"{100 * (mine / theirs - 1):.0f} % more {name}" if mine > theirs else f"the same {name}, more devices"
            )
            reason = f"{more} ({mine:.4g} {unit} instead of {theirs:.4g} {unit})".replace(" )", ")")
        return Alternative(
            devices=_kinds(one.devices),
            global_batch_size=one.global_batch_size,
            predicted=one.prediction,
            feasible=self.excess(one) == 0,
            reason=reason,
        )

    def greedy_picks(self, groups: Sequence[Sequence[Device]]) -> Iterator[list[Device]]:
        """Add one device at a time, each time the one that helps most; every stage is a pick."""
        left = [list(group) for group in groups]
        chosen: list[Device] = []
        most = self.job.devices.max_count or sum(map(len, groups))
        while len(chosen) < most and any(left):
            stages = []
            for group in filter(None, left):
                one = self.configure([*chosen, group[0]])
                if one is not None:
                    stages.append((self.excess(one), self.objective(one), group))
            group = min(stages, key=lambda stage: stage[:2])[2] if stages else next(filter(None, left))
            chosen.append(group.pop(0))
            if len(chosen) >= self.job.devices.min_count:
                yield list(chosen)


def _groups(devices: Sequence[Device]) -> list[list[Device]]:
    by_kind: dict[object, list[Device]] = {}
    for device in devices:
        by_kind.setdefault((device.host, device.variant), []).append(device)
    return list(by_kind.values())


def _every_pick(groups: Sequence[Sequence[Device]], chosen: DeviceFilter) -> Iterator[list[Device]]:
    most = chosen.max_count or sum(map(len, groups))
    for counts in itertools.product(*(range(len(group) + 1) for group in groups)):
        if chosen.min_count <= sum(counts) <= most:
            yield [device for group, count in zip(groups, counts, strict=True) for device in group[:count]]


def _largest_batch(curve: DeviceCurve, size: int) -> int | None:
    if curve.memory_limit_bytes is None:
        return None
    return bisect.bisect_right(range(1, size + 1), curve.memory_limit_bytes, key=curve.device_memory_bytes)


def _kinds(devices: Sequence[Device]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for device in devices:
        cores = f" ({device.cores:g} core{'s' if device.cores != 1 else ''})" if device.cores is not None else ""
        speed = f" (speed {device.speed:g}, emulated)" if device.speed is not None else ""
        counts[device.type + cores + speed] = counts.get(device.type + cores + speed, 0) + 1
    return counts


def _unmeasured(collective: Interval) -> Interval:
    median = collective.median
    return Interval(median=median, low=median * _UNMEASURED_LOW, high=median * _UNMEASURED_HIGH)


def _sum(one: Interval, other: Interval) -> Interval:
    """The interval of a sum whose parts err together, which is the widest it can be."""
    return Interval(median=one.median + other.median, low=one.low + other.low, high=one.high + other.high)


def _at(interval: Interval, confidence: float) -> float:
    """The value not exceeded with this probability, log-normal between the median and the 95 % point."""
    if interval.high <= interval.median:
        return interval.high
    sigma = math.log(interval.high / interval.median) / _NORMAL.inv_cdf(0.95)
    return interval.median * math.exp(sigma * _NORMAL.inv_cdf(confidence))


def _rounded_up(value: float) -> float:
    """Three significant digits, never less."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.ceil(value / unit) * unit
