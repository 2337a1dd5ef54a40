"""The speed of a machine at one time, from kernels that are always the same. Loads no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import Field

from trainwright.estimator.frozen_model import FrozenModel

SENTINEL_FLOPS = 3 * 2 * 160**3
SENTINEL_CALLS = 90


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
