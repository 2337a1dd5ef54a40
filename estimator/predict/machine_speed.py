"""The speed of a machine at one time, and what its drift means for predictions. Loads no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pydantic import Field

from trainwright.estimator.curves import DeviceCurve
from trainwright.estimator.frozen_model import FrozenModel
from trainwright.estimator.quantiles import NINETY, TEN_TO_NINETY

SENTINEL_FLOPS = 3 * 2 * 160**3
SENTINEL_CALLS = 90
MOST_LINEAR_DRIFT = 1.0
"""The drift up to which times differ by a share rather than by a factor."""


class Speed(FrozenModel):
    """Seconds that three sentinel kernels took at one time.

    Other programs take caches, memory bandwidth and core time, which slows kernels down by
    different factors.
    """

    compute_s: float = Field(
        gt=0, description="matrix products in the caches, `SENTINEL_FLOPS` in total"
    )
    memory_s: float = Field(gt=0, description="a sum of arrays that do not fit in the caches")
    calls_s: float = Field(gt=0, description="a chain of `SENTINEL_CALLS` small operations")

    def slower(self, than: Speed, seconds: float, flops: float, calls: float = 1.0) -> float:
        """The time of some work at this speed, divided by its time at the speed `than`.

        The work took `seconds` at this speed. The time of its FLOPs and calls at the
        sentinel's rates scales with those kernels. The rest moves bytes, within caches or beyond
        them, and scales with the geometric mean of all three kernels.
        """
        compute = min(1.0, flops / SENTINEL_FLOPS * self.compute_s / seconds)
        call = min(1.0 - compute, calls / SENTINEL_CALLS * self.calls_s / seconds)
        each = (1 - compute - call) / 3
        return float(
            (self.compute_s / than.compute_s) ** (compute + each)
            * (self.calls_s / than.calls_s) ** (call + each)
            * (self.memory_s / than.memory_s) ** each
        )

    @staticmethod
    def median(seen: Sequence[Speed]) -> Speed:
        """The median of each kernel's times."""
        return Speed(
            compute_s=statistics.median(one.compute_s for one in seen),
            memory_s=statistics.median(one.memory_s for one in seen),
            calls_s=statistics.median(one.calls_s for one in seen),
        )


def at_another_time(curve: DeviceCurve, drift: float) -> DeviceCurve:
    """The curve with the interval of a step at another time than that of the calibration.

    `drift` is how much the machine's speed spread meanwhile, (p90 - p10) / median. The speed in a
    training is assumed to differ from the calibrated one by as much: as for a normal distribution,
    σ = drift / 2.56, independent of the error that the curve's interval already states. On a busy
    machine the speed differs by factors: from some drift on, ln(1 + drift) is the spread.
    """
    width = NINETY * max(min(drift, MOST_LINEAR_DRIFT), math.log1p(drift)) / TEN_TO_NINETY

    def wider(factor: float) -> float:
        return math.exp(math.hypot(math.log(factor), width))

    return curve.model_copy(
        update={
            "low_factor": 1 / wider(curve.low_factor),
            "high_factor": wider(curve.high_factor),
            "speed_drift": drift,
        }
    )
