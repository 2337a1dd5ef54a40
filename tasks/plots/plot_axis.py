"""The axis of a plot: its range, its ticks, and where a value is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_LOG_FROM = 5.0
"""Ratio of the greatest to the least value from which an axis is logarithmic."""
_MARGIN = 0.08


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> Axis:
        """An axis with these values and a margin; logarithmic if they differ by a large factor."""
        low, high = min(values), max(values)
        if low > 0 and high / low >= _LOG_FROM:
            factor = (high / low) ** _MARGIN
            return cls(low / factor, high * factor, start, end, log=True)
        pad = _MARGIN * (high - low) or 0.1 * abs(high) or 1.0
        return cls(
            max(low - pad, 0.0) if low >= 0 else low - pad, high + pad, start, end, log=False
        )

    def at(self, value: float) -> float:
        """The pixel of a value."""
        low, high = self.low, self.high
        share = (
            math.log(value / low) / math.log(high / low)
            if self.log
            else (value - low) / (high - low)
        )
        return self.start + (self.end - self.start) * share

    def ticks(self) -> list[tuple[float, str]]:
        """Round values in the range, with their labels."""
        return self._powers() if self.log else self._even()

    def _even(self) -> list[tuple[float, str]]:
        rough = (self.high - self.low) / 6
        power = math.floor(math.log10(rough))
        step = next(one for one in (1, 2, 5, 10) if one * 10**power >= rough) * 10.0**power
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return [(one * step, f"{one * step:,.{decimals}f}") for one in range(first, last + 1)]

    def _powers(self) -> list[tuple[float, str]]:
        first, last = math.floor(math.log10(self.low)), math.floor(math.log10(self.high))
        kept = (1, 2, 5) if last - first < 3 else (1,)
        return [
            (one * 10.0**power, f"{one * 10.0**power:,.{max(0, -power)}f}")
            for power in range(first, last + 1)
            for one in kept
            if self.low <= one * 10.0**power <= self.high
        ]
