"""Step `estimate`: what a training step costs on each kind of device; calibration; corrections from finished runs."""

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
