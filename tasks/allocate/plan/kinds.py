"""Kinds of devices for a plan's cost: step time, memory, power, price and availability."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainwright.estimator.curves import DeviceCurve
from trainwright.estimator.devices import HOST_MEMORY_TYPES
from trainwright.tasks.errors import BadInput


@dataclass(frozen=True, eq=False)
class Kind:
    """Devices that differ, for a plan's cost, only in their host."""

    index: int
    device_type: str
    curve: DeviceCurve
    idle_w: float | None
    load_w: float | None
    price_per_s: float | None
    available_s: float
    """How long the devices stay available from now; infinite if their host has no window."""

    @property
    def extra_w(self) -> float:
        """Power that a device draws in addition while it computes; infinite if not known."""
        if self.load_w is None or self.idle_w is None:
            return math.inf
        return self.load_w - self.idle_w

    def factor(self, z: float) -> float:
        """A rank's time at the quantile z, relative to the median."""
        return math.pow(self.curve.high_factor if z >= 0 else self.curve.low_factor, abs(z))

    @property
    def shares_memory(self) -> bool:
        """Whether ranks of this kind share their host's memory."""
        return self.device_type in HOST_MEMORY_TYPES and self.curve.memory_limit_bytes is not None

    @property
    def knots(self) -> tuple[int, ...]:
        """Samples between which the time is a straight line."""
        return self.curve.time_knots.sizes if self.curve.time_knots else ()

    @functools.cached_property
    def micro_knots(self) -> list[float]:
        """Sizes of a micro-batch between which its time is a straight line."""
        time_s, rates = self.curve.time_knots or self.curve.step_time_s, self.curve.rates()
        found: list[float] = list(self.knots)
        edges = [1.0, *(float(knot) for knot in self.knots if knot > 1), math.inf]
        for left, right in itertools.pairwise(edges):
            # Between knots, the time is the larger of the curve's line and s times this rate.
            rate = max(rate for at, rate in rates if at >= right)
            slope = time_s(left + 1) - time_s(left) if right - left >= 1 else rate
            if slope != rate and left < (
                at := left + (time_s(left) - rate * left) / (rate - slope)
            ):
                found += [at] * (at < right)
        return found

    def ranks_that_fit(self, need_bytes: float) -> float:
        """How many ranks with this need fit into one machine's memory.

        Infinite if each device has its own memory.
        """
        limit = self.curve.memory_limit_bytes
        return (
            math.floor(limit / need_bytes) if self.shares_memory and limit is not None else math.inf
        )


class Share(NamedTuple):
    """`ranks` ranks of a kind with `batch` samples each."""

    kind: Kind
    batch: int
    ranks: int


def largest_batch(curve: DeviceCurve, most: int, kept_bytes: float = 0.0, sharing: int = 1) -> int:
    """The largest batch up to `most` that fits into the device's memory; 0 if no sample does.

    `kept_bytes` are needed in addition to the batch. `sharing` ranks have equal parts of the
    memory.
    """
    limit = curve.memory_limit_bytes
    limit = None if limit is None else limit / sharing
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
        fits = curve.device_memory_bytes(middle) + kept_bytes <= limit
        low, high = (middle, high) if fits else (low, middle)
    return low


def median_times(curve: DeviceCurve, sizes: Any) -> Any:
    """`curve.step_time` at the median, for a numpy array of batch sizes."""
    import numpy as np

    knots = curve.time_knots
    if knots is None:
        return curve.step_time_s.fixed + curve.step_time_s.per_sample * sizes
    at, value = np.array(knots.sizes), np.array(knots.values)
    place = np.clip(np.searchsorted(at, sizes, "right") - 1, 0, len(at) - 2)
    left, right, low, high = at[place], at[place + 1], value[place], value[place + 1]
    least = np.where(sizes < at[0], value[0] * sizes / at[0], 0.0)
    return np.maximum(least, low + (high - low) * (sizes - left) / (right - left))


def micro_batch_times(curve: DeviceCurve, sizes: Any) -> Any:
    """`curve.micro_batch_s` for a numpy array of sizes."""
    import numpy as np

    at, rates = np.array(curve.rates()).T
    highest = np.maximum.accumulate(rates[::-1])[::-1]
    own = median_times(curve, sizes) / sizes
    return sizes * np.maximum(own, highest[np.searchsorted(at, sizes, "left")])


def check_curve(curve: DeviceCurve) -> None:
    """Raises BadInput if the step time falls or is zero, or if idle power exceeds load power."""
    name = curve.device_type
    values = (
        curve.time_knots.values
        if curve.time_knots
        else (curve.step_time_s(1), curve.step_time_s(2))
    )
    for place, (one, two) in enumerate(itertools.pairwise(values)):
        if two < one:
            size = curve.time_knots.sizes[place + 1] if curve.time_knots else 2
            raise BadInput(
                f"estimate: the step time of {name} falls to {two:.4g} s at a batch of {size}; "
                "allowed: a time that never falls"
            )
    if not curve.step_time(1).median > 0:
        raise BadInput(
            f"estimate: {name} takes {curve.step_time(1).median:g} s for a sample; "
            "allowed: more than 0 s"
        )
    if curve.idle_w is not None and curve.load_w is not None and curve.load_w < curve.idle_w:
        raise BadInput(
            f"power: {name} draws {curve.idle_w:g} W idle and {curve.load_w:g} W at work; "
            "allowed: idle_w up to load_w"
        )
