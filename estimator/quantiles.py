"""Quantiles of the normal distribution, of observed values, and of the next value. Arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

_NORMAL = NormalDist()


def normal_quantile(share: float) -> float:
    """The quantile of the normal distribution, in standard deviations; 0 < share < 1."""
    return _NORMAL.inv_cdf(share)


NINETY = normal_quantile(0.95)
"""Half the width of a 90 % interval, in standard deviations."""
TEN_TO_NINETY = 2 * normal_quantile(0.9)
"""The distance from the 10 % quantile to the 90 % quantile, in standard deviations."""


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed, linear between neighbours.

    Hyndman and Fan 1996, type 7. Raises ValueError for no values.
    """
    if not len(values):
        raise ValueError("values: got none; at least one is needed")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


def conformal_quantile(scores: Sequence[float], share: float) -> float:
    """A bound for a new score, exchangeable with these n, that holds with this probability.

    It is the ⌈(n + 1) · share⌉-th smallest score: the probability is `share` to `share` + 1 / (n +
    1). With too few scores it is the largest one: n / (n + 1). Source: Vovk, Gammerman and Shafer,
    Algorithmic Learning in a Random World, 2005, section 2.2. Raises ValueError for no scores.
    """
    if not len(scores):
        raise ValueError("scores: got none; at least one is needed")
    return sorted(scores)[min(len(scores), math.ceil((len(scores) + 1) * share)) - 1]
