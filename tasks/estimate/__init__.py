"""Step `estimate`: the cost of a training step by kind of device; calibration; finished runs.

Read `step` first, then `pool_estimate`. `calibrate` and `link` measure this machine at first use;
`finished_runs` and `memory_limits` hold the measurements of earlier runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainwright.tasks.lazy import exports

if TYPE_CHECKING:
    from trainwright.tasks.estimate.pool_estimate import estimate

__all__ = ["estimate"]

__getattr__ = exports(
    __name__,
    {
        "estimate": "pool_estimate",
    },
)
