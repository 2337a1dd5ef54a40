"""Quantities with their 90 % interval, and the value not exceeded at a given confidence."""

from __future__ import annotations

import math
from typing import NamedTuple

from trainwright.estimator.curves import Interval
from trainwright.estimator.quantiles import NINETY, normal_quantile


class Triple(NamedTuple):
    """Median, and the ends of the 90 % interval."""

    median: float
    low: float
    high: float

    def interval(self) -> Interval:
        """The same, as an artefact stores it."""
        return Interval(median=self.median, low=self.low, high=self.high)


def not_exceeded(quantity: Triple, confidence: float) -> float:
    """The value that the quantity exceeds with probability 1 − confidence.

    The quantity is log-normal through its median and its 95 % point (`high`):

        q(c) = median · (high / median) ^ z   with   z = `relative_deviations(c)`
    """
    if quantity.high <= quantity.median:
        return quantity.high
    ratio = math.log(quantity.high / quantity.median)
    return quantity.median * math.exp(ratio * relative_deviations(confidence))


def relative_deviations(confidence: float) -> float:
    """Standard deviations from the median to this quantile, relative to those to the 95 % point."""
    return normal_quantile(confidence) / NINETY
