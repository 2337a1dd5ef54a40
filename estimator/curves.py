"""What a training step costs on a device, over the batch size: the form in which the planner sees a model.

Pure arithmetic on values: t(b) = a + s·b, m(b) = m0 + m1·b, energy = time × power.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Mode = Literal["calibrated", "few-shot", "datasheet"]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Interval(_Value):
    """A prediction with its 90 % interval, low <= median <= high."""

    median: float
    low: float
    high: float

    def __mul__(self, factor: float) -> Interval:
        """The interval of a quantity `factor` (>= 0) times as large."""
        return Interval(median=self.median * factor, low=self.low * factor, high=self.high * factor)


class Affine(_Value):
    """fixed + per_sample · batch size."""

    fixed: float
    per_sample: float

    def __call__(self, batch_size: float) -> float:
        return self.fixed + self.per_sample * batch_size


class DeviceCurve(_Value):
    """A model's training step on one kind of device (type, cores, speed).

    `step_time_s` is the median; the 90 % interval is that times `low_factor` and `high_factor`.
    """

    device_type: str
    cores: float | None = None
    speed: float | None = None
    mode: Mode
    coverage: float = Field(ge=0, le=1, description="share of the step's cost in operations seen in calibration")
    step_time_s: Affine
    low_factor: float
    high_factor: float
    peak_memory_bytes: Affine
    memory_safe_factor: float = Field(ge=1, description="`safe` = expected times this")
    memory_limit_bytes: float | None = Field(default=None, description="what the device has; None: not known")
    idle_w: float | None = None
    load_w: float | None = None
    energy_source: Literal["measured", "datasheet"] | None = None

    def step_time(self, batch_size: int) -> Interval:
        """Seconds for one step of this many samples."""
        median = self.step_time_s(batch_size)
        return Interval(median=median, low=median * self.low_factor, high=median * self.high_factor)

    def safe_memory_bytes(self, batch_size: int) -> float:
        """Bytes that a step of this many samples stays below."""
        return self.peak_memory_bytes(batch_size) * self.memory_safe_factor
