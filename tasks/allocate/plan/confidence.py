"""Quantities with their 90 % interval and other quantiles."""

from __future__ import annotations

import math
from typing import NamedTuple

from trainwright.estimator.curves import Interval
from trainwright.estimator.quantiles import NINETY, normal_quantile

TOLERANCE = 1e-9
"""Two values this close, relatively, are a tie: the difference is rounding."""


class Triple(NamedTuple):
    """Median, and the ends of the 90 % interval."""

    median: float
    low: float
    high: float

    def interval(self) -> Interval:
        """The same, as an artefact stores it."""
        return Interval(median=self.median, low=self.low, high=self.high)

    def at(self, z: float) -> float:
        """The quantile at z: 0 is the median, −1 and 1 are the ends, log-normal in between.

        q(z) = median · (high / median) ^ z
        """
        end = self.high if z >= 0 else self.low
        if z in (-1.0, 0.0, 1.0) or end == self.median or not 0 < self.median < math.inf:
            return self.median if z == 0 else end
        return self.median * math.pow(end / self.median, abs(z))


def relative_deviations(confidence: float) -> float:
    """Standard deviations from the median to this quantile, relative to those to the 95 % point."""
    return normal_quantile(confidence) / NINETY
