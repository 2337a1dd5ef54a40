"""What one configuration takes: time, energy and cost of training on these ranks with these shares, each with its interval.

With b_r the share of rank r in a global batch B, t_r its time for it, C the time of the collectives
one after another, S the number of steps:

    step      = T + max(C', C − HIDDEN · T / A)   with T = max_r t_r(b_r)
    duration  = S · step + start
    energy    = Σ_r S · (load_r · t_r + idle_r · (step − t_r)) + start · idle_r
    cost      = Σ_r price_r · duration + price of energy · energy

Gradients travel while the backward pass of the slowest rank goes on; C' is what comes after it: its last bucket, and the sum of
the step's figures. At the high end of the interval nothing is hidden.

The interval of the energy is that of the duration, wider by what the powers are unsure of.

A device that is leased draws its load while it computes, and its idle power while it waits. With an accumulation of A, a rank
takes its share in min(A, b_r) micro-batches, as even as whole samples allow: t = A · t(b / A) for a curve that is straight
between whole numbers; memory is then that of a micro-batch, and the gradients' more, which stay between micro-batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainwright.estimator.curves import DeviceCurve, Interval
from trainwright.estimator.devices import HOST_MEMORY_TYPES
from trainwright.estimator.quantiles import NINETY, normal_quantile
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts import DataSchema, Estimate, NotExceeded, Prediction
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Device, Pool
from trainwright.tasks.spec.windows import seconds_left


class Triple(NamedTuple):
    """Median, and the ends of the 90 % interval."""

    median: float
    low: float
    high: float

    def interval(self) -> Interval:
        """The same as an artefact holds it."""
        return Interval(median=self.median, low=self.low, high=self.high)


HIDDEN = 2 / 3
"""Of a step's work, the backward pass: twice the arithmetic of the forward pass."""


class Collectives(NamedTuple):
    """What the sums of a step take: all of them, and those that come after the backward pass of the slowest rank."""

    whole: Triple
    after: Triple

    def step_s(self, busy_s: Any, accumulation: int = 1) -> Any:
        """The step of ranks of which the slowest works for so long, at the median: a number, or a numpy array of them.

        Gradients travel in the last micro-batch alone.
        """
        import numpy as np

        return busy_s + np.maximum(
            self.after.median, self.whole.median - busy_s * HIDDEN / accumulation
        )


START_S = Triple(median=6.0, low=3.0, high=20.0)
"""Processes start, data is read: a prior."""


@dataclass(frozen=True, eq=False)
class Kind:
    """Devices that differ in nothing that a plan's cost depends on, but for their host."""

    index: int
    device_type: str
    curve: DeviceCurve
    idle_w: float | None
    load_w: float | None
    price_per_s: float | None
    available_s: float
    """For how long from now; infinite where nothing ends it."""

    @property
    def shares_memory(self) -> bool:
        """Whether ranks of this kind share their host's memory."""
        return self.device_type in HOST_MEMORY_TYPES and self.curve.memory_limit_bytes is not None

    def together(self, need_bytes: float) -> float:
        """How many ranks that need so much one machine's memory holds; infinite where it is each device's own."""
        limit = self.curve.memory_limit_bytes
        return (
            math.floor(limit / need_bytes) if self.shares_memory and limit is not None else math.inf
        )


class Share(NamedTuple):
    """So many ranks of a kind with so many samples each."""

    kind: Kind
    batch: int
    ranks: int


class Cost(NamedTuple):
    """What a configuration takes; `upper_…` is not exceeded at the job's confidence. None where a price or power is not known."""

    step_s: Triple
    duration_s: Triple
    energy_j: Triple | None
    cost: Triple | None
    upper_duration_s: float
    upper_cost: float

    def prediction(self) -> Prediction:
        """As an artefact."""
        return Prediction(
            step_time_s=self.step_s.interval(),
            duration_s=self.duration_s.interval(),
            energy_j=self.energy_j.interval() if self.energy_j else None,
            cost=self.cost.interval() if self.cost else None,
        )

    def not_exceeded(self, confidence: float) -> NotExceeded:
        """What the limits are held against, as an artefact; `confidence` is the job's."""
        return NotExceeded(
            confidence=confidence,
            duration_s=self.upper_duration_s,
            cost=self.upper_cost if self.cost else None,
        )


class CostModel:
    """The costs of a job on the devices of a pool. `now` is the hour of the hosts' windows, UTC; None: nobody asks."""

    def __init__(
        self, job: Job, pool: Pool, estimate: Estimate, data: DataSchema, now: Any = None
    ) -> None:
        self.job, self.pool, self.estimate, self.data = job, pool, estimate, data
        self.confidence = job.objective.confidence
        self.energy_price_per_j = pool.prices["energy"] / 3.6e6 if "energy" in pool.prices else None
        self._windows = {host.name: seconds_left(host.available, now) for host in pool.hosts}
        self._kinds: dict[object, Kind] = {}
        self._rented = any(name != "energy" for name in pool.prices)

    def kind(self, device: Device) -> Kind:
        """The device's kind. Raises BadInput where its curve falls, or it would draw more idle than at work."""
        key = (device.variant, self._windows.get(device.host, math.inf))
        if key not in self._kinds:
            curve = self.estimate.curve(device)
            _check(curve)
            price = self.pool.prices.get(device.type) if self._rented else 0.0
            self._kinds[key] = Kind(
                index=len(self._kinds),
                device_type=device.type,
                curve=curve,
                idle_w=curve.idle_w,
                load_w=curve.load_w,
                price_per_s=None if price is None else price / 3600,
                available_s=key[1],
            )
        return self._kinds[key]

    def steps(self, batch: int) -> int:
        """Steps of the whole training."""
        return math.ceil(self.data.train_rows / batch) * self.job.train.epochs

    def times(self, kind: Kind, batch: int, accumulation: int) -> Any:
        """Median seconds for 1, 2, … samples, up to `batch` or as far as memory goes: a numpy array."""
        import numpy as np

        micro = largest_batch(kind.curve, batch, self._kept_bytes(accumulation))
        sizes = np.arange(1, min(batch, accumulation * micro) + 1)
        in_micro = np.maximum(1.0, sizes / accumulation)
        return np.minimum(sizes, accumulation) * _medians(kind.curve, in_micro)

    def memory_bytes(self, kind: Kind, batch: int, accumulation: int) -> float:
        """Bytes that a rank with this share stays below."""
        return kind.curve.device_memory_bytes(math.ceil(batch / accumulation)) + self._kept_bytes(
            accumulation
        )

    def _kept_bytes(self, accumulation: int) -> float:
        return self.estimate.gradient_bytes if accumulation > 1 else 0.0

    def cost(
        self, shares: Sequence[Share], sums: Collectives, batch: int, accumulation: int = 1
    ) -> Cost:
        """What it takes. Does not look at memory, limits or windows."""
        steps = self.steps(batch)
        times = [share.kind.curve.median_s(share.batch, accumulation) for share in shares]
        low_s = max(
            time * share.kind.curve.low_factor for time, share in zip(times, shares, strict=True)
        )
        step = Triple(
            float(sums.step_s(max(times), accumulation)),
            low_s + max(sums.after.low, sums.whole.low - low_s * HIDDEN / accumulation),
            max(
                time * share.kind.curve.high_factor
                for time, share in zip(times, shares, strict=True)
            )
            + sums.whole.high,
        )
        duration = Triple(*(steps * one + start for one, start in zip(step, START_S, strict=True)))
        energy, cost = None, None
        if all(share.kind.idle_w is not None and share.kind.load_w is not None for share in shares):
            idle_w = math.fsum(share.ranks * (share.kind.idle_w or 0.0) for share in shares)
            working_j = math.fsum(
                share.ranks
                * (
                    (share.kind.load_w or 0.0) * time
                    + (share.kind.idle_w or 0.0) * (step.median - time)
                )
                for time, share in zip(times, shares, strict=True)
            )
            power_w = working_j / step.median
            median, low, high = (
                steps * one * power_w + start * idle_w
                for one, start in zip(step, START_S, strict=True)
            )
            off = 1 + max(share.kind.curve.power_spread for share in shares)
            energy = Triple(median, low / off, high * off)
        known = all(share.kind.price_per_s is not None for share in shares)
        if known and self.pool.prices and (energy is not None or self.energy_price_per_j is None):
            rent = math.fsum(share.ranks * (share.kind.price_per_s or 0.0) for share in shares)
            per_j = self.energy_price_per_j or 0.0
            joules = energy or Triple(0.0, 0.0, 0.0)
            cost = Triple(
                *(rent * time + per_j * one for time, one in zip(duration, joules, strict=True))
            )
        return Cost(
            step,
            duration,
            energy,
            cost,
            upper(duration, self.confidence),
            upper(cost, self.confidence) if cost else math.inf,
        )


def upper(one: Triple, confidence: float) -> float:
    """The value not exceeded with this probability, log-normal between the median and the 95 % point."""
    if one.high <= one.median:
        return one.high
    return one.median * math.exp(math.log(one.high / one.median) * deviations(confidence))


def deviations(confidence: float) -> float:
    """How many times as far from the median, on the logarithm's scale, as the 95 % point."""
    return normal_quantile(confidence) / NINETY


def largest_batch(curve: DeviceCurve, most: int, kept_bytes: float = 0.0) -> int:
    """The largest batch, up to `most`, that stays within the device's memory; 0 where one sample does not."""
    limit = curve.memory_limit_bytes
    if curve.most_batch_size is not None:
        most = min(most, curve.most_batch_size)
    if limit is None or most == 0:
        return most
    low, high = 0, 1
    while curve.device_memory_bytes(high) + kept_bytes <= limit:
        if high == most:
            return most
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (
            (middle, high)
            if curve.device_memory_bytes(middle) + kept_bytes <= limit
            else (low, middle)
        )
    return low


def _medians(curve: DeviceCurve, sizes: Any) -> Any:
    """`curve.step_time` for many sizes at once."""
    import numpy as np

    knots = curve.time_knots
    if knots is None:
        return curve.step_time_s.fixed + curve.step_time_s.per_sample * sizes
    at, value = np.array(knots.sizes), np.array(knots.values)
    place = np.clip(np.searchsorted(at, sizes, "right") - 1, 0, len(at) - 2)
    left, right, low, high = at[place], at[place + 1], value[place], value[place + 1]
    least = np.where(sizes < at[0], value[0] * sizes / at[0], 0.0)
    return np.maximum(least, low + (high - low) * (sizes - left) / (right - left))


def _check(curve: DeviceCurve) -> None:
    """A curve that falls, or has no time, is no curve to plan with."""
    values = (
        curve.time_knots.values
        if curve.time_knots
        else (curve.step_time_s(1), curve.step_time_s(2))
    )
    for place, (one, two) in enumerate(itertools.pairwise(values)):
        if two < one:
            size = curve.time_knots.sizes[place + 1] if curve.time_knots else 2
            raise BadInput(
                f"estimate: the step time of {curve.device_type} falls to {two:.4g} s at a batch of {size}; allowed: a time that "
                "never falls"
            )
    if not curve.step_time(1).median > 0:
        raise BadInput(
            f"estimate: {curve.device_type} takes {curve.step_time(1).median:g} s for a sample; allowed: more than 0 s"
        )
    if curve.idle_w is not None and curve.load_w is not None and curve.load_w < curve.idle_w:
        raise BadInput(
            f"power: {curve.device_type} draws {curve.idle_w:g} W idle and {curve.load_w:g} W at work; "
            "allowed: idle_w up to load_w"
        )
