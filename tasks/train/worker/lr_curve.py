"""The loss over a learning-rate ramp: smoothing, noise, and the point of divergence. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

SMOOTHING = 0.85


def smooth(values: Sequence[float]) -> list[float]:
    """Exponential moving average with bias correction: m_k / (1 − β^k)."""
    smoothed, mean = [], 0.0
    for count, value in enumerate(values, start=1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * value
        smoothed.append(mean / (1 - SMOOTHING**count))
    return smoothed


def runaway_rate(points: Sequence[tuple[float, float, float | None]]) -> float | None:
    """The rate at which a ramp's loss diverges, else its last rate; None if no loss is finite."""
    finite = list(itertools.takewhile(lambda point: math.isfinite(point[1]), points))
    if not finite:
        return None
    raw_loss = [value for _, value, _ in finite]
    diverged = course(raw_loss, smooth(raw_loss))[-1]
    return (
        finite[diverged][0]
        if diverged is not None
        else points[min(len(finite), len(points) - 1)][0]
    )


def course(raw_loss: list[float], loss: list[float]) -> tuple[int, float, float, int | None]:
    """Describe a ramp's loss: minimum, start, noise and divergence.

    Returns the index of the smoothed minimum, the initial loss, the noise, and the index from which
    the loss stays diverged (None if it never does).
    """
    least = min(range(len(loss)), key=loss.__getitem__)
    # the median, because one unusual first batch must not move it
    begin = statistics.median(raw_loss[: max(3, len(raw_loss) // 9)])
    fall, noise = begin - loss[least], _noise(raw_loss[: max(least, 8)])
    # Above this bound for good, the loss has diverged: half of the fall lost, and beyond noise.
    bound = loss[least] + max(0.5 * fall, 0.05 * abs(begin), noise)
    last = max((k for k in range(len(loss)) if loss[k] <= bound), default=least)
    return least, begin, noise, last + 1 if last + 1 < len(loss) else None


def _noise(losses: Sequence[float]) -> float:
    """The smallest fall in loss that is unlikely to be chance: 1.5 standard deviations of the loss.

    The deviation σ comes from the differences between neighbouring steps, which exclude the trend:
    for normal noise the median |difference| is 0.954 σ. Smoothing leaves 0.28 σ, and the lowest of
    90 values lies about 2.2 × 0.28 σ below the mean; the median of the start adds its own noise.
    """
    steps = [abs(after - before) for before, after in itertools.pairwise(losses)]
    return 1.5 * statistics.median(steps) / 0.954 if steps else 0.0
