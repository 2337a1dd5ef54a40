"""How fast a machine is at the moment, by kernels that are always the same. Arithmetic on values; loads no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pydantic import Field

from trainwright.estimator.frozen_model import FrozenModel

SENTINEL_FLOPS = 3 * 2 * 160**3
SENTINEL_CALLS = 90


class Speed(FrozenModel):
    """Seconds that three kernels took, which are always the same: how fast the machine was at the moment.

    Neighbours on a machine take caches, memory and turns of the cores from a program: not all it does is as much slower.
    """

    compute_s: float = Field(
        gt=0, description="matrix products that fit in the caches, of `SENTINEL_FLOPS` together"
    )
    memory_s: float = Field(gt=0, description="a sum of arrays that do not")
    calls_s: float = Field(
        gt=0, description="a chain of small operations, `SENTINEL_CALLS` of them"
    )

    def slower(self, than: Speed, seconds: float, flops: float, calls: float = 1.0) -> float:
        """How many times as long as at that speed something takes that took so many seconds, for so many FLOPs and calls.

        What its FLOPs and calls take at the sentinel's rates is arithmetic and calling. The rest moves bytes, within caches or
        beyond them: it is told by the geometric mean of all three.
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
        """Of each kernel."""
        return Speed(
            compute_s=statistics.median(one.compute_s for one in seen),
            memory_s=statistics.median(one.memory_s for one in seen),
            calls_s=statistics.median(one.calls_s for one in seen),
        )
