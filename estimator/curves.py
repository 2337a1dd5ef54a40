"""The cost of a training step on a device as a function of the batch size: what the planner sees.

Arithmetic on values: t(b) = a + s·b, m(b) = m0 + m1·b, energy = time · power.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from trainwright.estimator.frozen_model import FrozenModel

Mode = Literal["calibrated", "few-shot", "datasheet"]


class Interval(FrozenModel):
    """A prediction with its 90 % interval, low <= median <= high."""

    median: float = Field(description="half of the values are below")
    low: float = Field(description="5 % of the values are below")
    high: float = Field(description="5 % of the values are above")

    def __mul__(self, factor: float) -> Interval:
        """The interval of a quantity `factor` (>= 0) times as large."""
        return Interval(median=self.median * factor, low=self.low * factor, high=self.high * factor)


class Affine(FrozenModel):
    """fixed + per_sample · batch size."""

    fixed: float = Field(description="at a batch of zero")
    per_sample: float = Field(description="for each sample more")

    def __call__(self, batch_size: float) -> float:
        return self.fixed + self.per_sample * batch_size


class Knots(FrozenModel):
    """A curve through points at some batch sizes, linear between them and beyond.

    Before the first point it is at least proportional to the batch size: a step with fewer samples
    never takes less time per sample.
    """

    sizes: tuple[Annotated[int, Field(ge=1, le=2**63)], ...] = Field(
        min_length=2, description="batch sizes"
    )
    values: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        description="at these sizes; straight between them"
    )

    @model_validator(mode="after")
    def _a_value_at_each_size(self) -> Knots:
        if len(self.values) != len(self.sizes) or any(
            two <= one for one, two in itertools.pairwise(self.sizes)
        ):
            raise ValueError("rising sizes, and a value for each")
        return self

    def __call__(self, batch_size: float) -> float:
        place = min(max(bisect.bisect_right(self.sizes, batch_size) - 1, 0), len(self.sizes) - 2)
        left, right = self.sizes[place], self.sizes[place + 1]
        low, high = self.values[place], self.values[place + 1]
        least = self.values[0] * batch_size / self.sizes[0] if batch_size < self.sizes[0] else 0.0
        return max(least, low + (high - low) * (batch_size - left) / (right - left))

    def bends(self, by: float = 0.25) -> list[int]:
        """The batch sizes at which the slope changes by more than this share."""
        slopes = [
            (self.values[place + 1] - self.values[place])
            / (self.sizes[place + 1] - self.sizes[place])
            for place in range(len(self.sizes) - 1)
        ]
        pairs = itertools.pairwise(slopes)
        return [
            self.sizes[place + 1]
            for place, (one, two) in enumerate(pairs)
            if abs(two - one) > by * max(abs(one), abs(two))
        ]


class Basis(FrozenModel):
    """The inputs of a calibrated prediction. `predict.correction` finds similar runs by them."""

    model: str = Field(description="the structure's fingerprint")
    shares: dict[str, float] = Field(
        description="shares of the predicted step time, by family of operations"
    )
    calibration: str = Field(description="the calibration's sha256")
    processor: str = Field(description="on which it was measured")
    torch: str = Field(description="version with which it was measured")


class LayerCost(FrozenModel):
    """Seconds of a layer in a step, by phase, as lines over the batch size.

    In proportion to those of the other layers: `DeviceCurve.layer_seconds` scales them.
    """

    name: str = Field(description="of the layer")
    forward: Affine
    input_gradient: Affine
    weight_gradient: Affine


class LayerSeconds(NamedTuple):
    """Seconds of a layer's phases in a step on a device."""

    forward: float
    input_gradient: float
    weight_gradient: float


class DeviceCurve(FrozenModel):
    """A model's training step on one kind of device: type, cores, speed, and whose memory it uses.

    `step_time_s` and `peak_memory_bytes` are lines over the batch size; `time_knots` and
    `memory_knots`, if known, are exact. The 90 % interval of the time is the median times
    `low_factor` and `high_factor`.

    Memory is the step's own. Expected: tensors alive at once. Safe: resident memory above what the
    process held before the model was built. `process_bytes` is the rest of a rank: interpreter,
    torch, Horovod, readers of data, the buffer in which gradients are summed, copies for
    checkpoints. `device_memory_bytes` is all of it, to compare with the device's memory.
    """

    device_type: str = Field(description="of the device")
    cores: float | None = Field(default=None, description="of a CPU device")
    threads: int | None = Field(
        default=None,
        ge=1,
        description="with which a CPU computes, as measured; None: one for each whole core",
    )
    speed: float | None = Field(default=None, description="of an emulated device")
    local: bool | None = Field(
        default=None,
        description="for devices that use their host's memory: whether the host is this machine; "
        "None: any host",
    )
    host_memory_bytes: float | None = Field(
        default=None, description="stated memory of the host, if the device uses it"
    )
    mode: Mode = Field(description="calibrated, few-shot or datasheet")
    coverage: float = Field(
        ge=0, le=1, description="share of the step's cost in operations seen in calibration"
    )
    unknown: tuple[str, ...] = Field(
        default=(), description="the operations that calibration has not seen, most expensive first"
    )
    step_time_s: Affine
    time_knots: Knots | None = None
    loop_s: Affine | None = Field(
        default=None,
        description="the part of `step_time_s` that the training loop adds to the model's step; "
        "None: not included",
    )
    low_factor: float = Field(description="low end of the interval over the median")
    high_factor: float = Field(description="high end of the interval over the median")
    peak_memory_bytes: Affine
    memory_knots: Knots | None = None
    safe_memory_knots: Knots | None = None
    memory_safe_factor: float = Field(
        default=1.0,
        ge=1,
        description="without `safe_memory_knots`, `safe` is the expected memory times this",
    )
    process_bytes: float = Field(default=0.0, description="memory of a rank besides its step")
    kept_bytes: float = Field(
        default=0.0,
        description="the part of `process_bytes` that depends on the model's size: summed "
        "gradients, copies for checkpoints",
    )
    memory_limit_bytes: float | None = Field(
        default=None, description="memory of the device; None: not known"
    )
    most_batch_size: int | None = Field(
        default=None,
        ge=0,
        description="the largest batch known to fit, after such a device ran out of memory",
    )
    idle_w: float | None = Field(default=None, description="power while it waits")
    load_w: float | None = Field(default=None, description="power while it computes")
    power_spread: float = Field(
        default=0.0, ge=0, description="relative half width of the 90 % interval of the power"
    )
    energy_source: Literal["measured", "datasheet"] | None = Field(
        default=None, description="measured, or datasheet"
    )
    speed_drift: float = Field(
        default=0.0,
        ge=0,
        description="how far the machine's speed spread while the device was calibrated, "
        "(p90 - p10) / median",
    )
    notes: tuple[str, ...] = Field(default=(), description="notes for users about this prediction")
    basis: Basis | None = Field(default=None, description="None: not from a calibration")
    learned_from: int = Field(default=0, description="number of finished runs that corrected it")
    layers: tuple[LayerCost, ...] = Field(
        default=(), description="in the order of the forward pass; empty: not known"
    )
    update: Affine = Field(
        default=Affine(fixed=0.0, per_sample=0.0),
        description="seconds of the optimizer, in proportion to `layers`",
    )
    calibrated_time_knots: Knots | None = Field(
        default=None, description="`time_knots` before finished runs corrected them"
    )

    def slowed(self, factor: float) -> DeviceCurve:
        """The curve of a device that takes `factor` times as long."""
        changes: dict[str, Any] = {
            name: line.model_copy(
                update={"fixed": factor * line.fixed, "per_sample": factor * line.per_sample}
            )
            for name, line in (("step_time_s", self.step_time_s), ("loop_s", self.loop_s))
            if line is not None
        }
        if (knots := self.time_knots) is not None:
            values = tuple(factor * value for value in knots.values)
            changes["time_knots"] = knots.model_copy(update={"values": values})
        return self.model_copy(update=changes)

    def median_s(self, batch_size: int, micro_batches: int = 1) -> float:
        """Median seconds of a step of b samples in A micro-batches.

        t(b) for A = 1, else p · t'(b / p) with p = min(A, b) and `micro_batch_s` as t'.
        """
        if micro_batches == 1:
            return (self.time_knots or self.step_time_s)(batch_size)
        pieces = min(micro_batches, batch_size)
        return pieces * self.micro_batch_s(batch_size / pieces)

    def layer_seconds(self, batch_size: int) -> tuple[list[LayerSeconds], float]:
        """Median seconds of each layer in a step of b samples, and of the optimizer.

        Together, they are `median_s` without the training loop's part.
        """
        parts = [
            (
                one.forward(batch_size),
                one.input_gradient(batch_size),
                one.weight_gradient(batch_size),
            )
            for one in self.layers
        ]
        update = self.update(batch_size)
        total = update + sum(map(sum, parts))
        step_s = self.median_s(batch_size) - (self.loop_part_s(batch_size) or 0.0)
        scale = max(0.0, step_s) / total if total > 0 else 0.0
        return [LayerSeconds(*(scale * one for one in part)) for part in parts], scale * update

    def micro_batch_s(self, size: float) -> float:
        """Median seconds of a micro-batch: a sample takes no less time than in a larger one.

        Otherwise, noise in the measured curve would make many small micro-batches look fast.
        """
        curve = self.time_knots or self.step_time_s
        larger = [(at, rate) for at, rate in self.rates() if at >= size]
        return size * max(curve(size) / size, *(rate for _, rate in larger))

    def rates(self) -> list[tuple[float, float]]:
        """Seconds for each sample at the knots, and at infinity, as (batch size, seconds)."""
        knots = self.time_knots
        if knots is None:
            return [(math.inf, self.step_time_s.per_sample)]
        (left, right), (low, high) = knots.sizes[-2:], knots.values[-2:]
        found = [
            (size, value / size) for size, value in zip(knots.sizes, knots.values, strict=True)
        ]
        return [*found, (math.inf, (high - low) / (right - left))]

    def step_time(self, batch_size: int, micro_batches: int = 1) -> Interval:
        """Seconds of one step of `batch_size` samples in `accumulation` micro-batches."""
        median = self.median_s(batch_size, micro_batches)
        return Interval(median=median, low=median * self.low_factor, high=median * self.high_factor)

    def loop_part_s(self, batch_size: int, micro_batches: int = 1) -> float | None:
        """The part of `median_s` that the training loop adds; None if it is not included.

        It is the calibration's: finished runs do not correct it.
        """
        pieces = max(1, min(micro_batches, batch_size))
        return None if self.loop_s is None else pieces * self.loop_s(batch_size / pieces)

    def memory_bytes(self, batch_size: int) -> float:
        """Expected peak bytes of live tensors in a step with this batch size."""
        return (self.memory_knots or self.peak_memory_bytes)(batch_size)

    def safe_memory_bytes(self, batch_size: int) -> float:
        """A bound on the resident bytes that a step with this batch size adds to the process."""
        if self.safe_memory_knots is not None:
            return max(self.memory_bytes(batch_size), self.safe_memory_knots(batch_size))
        return self.memory_bytes(batch_size) * self.memory_safe_factor

    def device_memory_bytes(self, batch_size: int) -> float:
        """A bound on the bytes of a rank with this step, its process included."""
        return self.safe_memory_bytes(batch_size) + self.process_bytes

    def memory_line(self, batch_size: int, need_bytes: float, micro_batches: int = 1) -> Affine:
        """The memory up to a batch size at which it is `need_bytes`, as a line.

        It rises as `device_memory_bytes` does between both ends. Neither part is below zero: a
        stage of a pipeline needs less than the whole model, of which the curve is.
        """
        pieces = max(1, min(micro_batches, batch_size))
        most = max(2, math.ceil(batch_size / pieces))
        least_bytes, most_bytes = self.device_memory_bytes(1), self.device_memory_bytes(most)
        slope = max(0.0, most_bytes - least_bytes) / (most - 1) / pieces
        slope = min(slope, need_bytes / batch_size)
        return Affine(fixed=max(0.0, need_bytes - slope * batch_size), per_sample=slope)


def line_through(sizes: Sequence[int], seconds: Sequence[float]) -> Affine:
    """The line with the least sum of squared relative errors; neither part is negative."""
    inverse = [1 / value for value in seconds]
    slopes = [size / value for size, value in zip(sizes, seconds, strict=True)]
    ones, twos = sum(inverse), sum(slopes)
    one_one, one_two, two_two = _dot(inverse, inverse), _dot(inverse, slopes), _dot(slopes, slopes)
    # The normal equations of Σ (fixed / t + per_sample · size / t − 1)². If one part is negative,
    # only the other is fitted.
    determinant = one_one * two_two - one_two**2
    fixed = (ones * two_two - twos * one_two) / determinant
    per_sample = (twos * one_one - ones * one_two) / determinant
    if fixed < 0:
        fixed, per_sample = 0.0, twos / two_two
    elif per_sample < 0:
        fixed, per_sample = ones / one_one, 0.0
    return Affine(fixed=fixed, per_sample=per_sample)


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(one * two for one, two in zip(left, right, strict=True))


def line_above(sizes: Sequence[int], values: Sequence[float]) -> Affine:
    """The line through both ends, raised above all points between them."""
    per_sample = (values[-1] - values[0]) / (sizes[-1] - sizes[0])
    fixed = max(value - per_sample * size for size, value in zip(sizes, values, strict=True))
    return Affine(fixed=max(0.0, fixed), per_sample=per_sample)
