"""The loss over a learning-rate ramp: smoothed, its noise, and where it diverges. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

SMOOTHING = 0.85


def smooth(values: Sequence[float]) -> list[float]:
    """Exponential moving average without the bias of its start: m_k / (1 − β^k)."""
    smoothed, mean = [], 0.0
    for count, value in enumerate(values, start=1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * value
        smoothed.append(mean / (1 - SMOOTHING**count))
    return smoothed


def runaway_rate(points: Sequence[tuple[float, float, float | None]]) -> float | None:
    """The rate at which a ramp's loss diverges, or its last rate; None if no loss is a number."""
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
    """How the loss went: the index of its minimum after smoothing, its first value, its noise, and the
    index from which it stays diverged (None: it does not).
    """
    least = min(range(len(loss)), key=loss.__getitem__)
    # The median: one odd first batch does not move it.
    begin = statistics.median(raw_loss[: max(3, len(raw_loss) // 9)])
    fall, noise = begin - loss[least], _noise(raw_loss[: max(least, 8)])
    bound = loss[least] + max(0.5 * fall, 0.05 * abs(begin), noise)
    last = max((k for k in range(len(loss)) if loss[k] <= bound), default=least)
    return least, begin, noise, last + 1 if last + 1 < len(loss) else None


def _noise(losses: Sequence[float]) -> float:
    """A fall that chance alone hardly makes: 1.5 standard deviations of the raw loss.

    Taken from the differences of neighbouring steps, so that the fall itself is not in it. For normal
    noise the median |difference| is 0.954 σ. Smoothing leaves 0.28 σ, and the lowest of 90 values lies
    about 2.2 of those below the mean; the median of the start adds its own noise.
    """
    steps = [abs(after - before) for before, after in itertools.pairwise(losses)]
    return 1.5 * statistics.median(steps) / 0.954 if steps else 0.0
