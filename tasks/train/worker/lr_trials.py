"""Which rates a learning-rate search tries after its ramp, and which rate it chooses. Pure.

The ramp shows at which rate the loss diverges, but little about the best rate below it: it takes one step
at each rate, with a model that the earlier steps have trained. So a few short trials are compared, each
from the same start over the same batches: at a third, a ninth and a 27th of the diverging rate, and on by
thirds, downwards or upwards, as long as the best rate is the lowest or the highest. From the same start the
rate at which the ramp diverged may hold; a trial that diverges has no score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

FACTOR = 3.0
FIRST = 3
MOST = 6
SHARE = 5
"""A trial takes one in so many of the training's steps, within the bounds below."""
LEAST_STEPS, MOST_STEPS = 20, 300


def trial_steps(training_steps: int) -> int:
    """Steps of one trial: a fifth of the training's, within bounds."""
    return max(LEAST_STEPS, min(MOST_STEPS, training_steps // SHARE))


def score(losses: Sequence[float], steps: int) -> float:
    """A trial's mean loss over its last quarter; infinite if it diverged before its end."""
    last = losses[-max(1, steps // 4) :]
    if len(losses) < steps or not all(math.isfinite(one) for one in last):
        return math.inf
    return math.fsum(last) / len(last)


def next_trial(edge: float, tried: Mapping[float, float]) -> float | None:
    """The rate to try next, given the diverging rate and the scores so far; None: enough were tried."""
    if len(tried) < FIRST:
        return edge / FACTOR ** (len(tried) + 1)
    if len(tried) >= MOST:
        return None
    rates, best = sorted(tried), best_of(tried)
    if best == rates[0]:
        return best / FACTOR
    if best == rates[-1]:
        return best * FACTOR
    return None


def best_of(tried: Mapping[float, float]) -> float:
    """The rate with the lowest score; of equal ones, or if none has a score, the lowest rate."""
    return min(sorted(tried), key=lambda rate: tried[rate])


def settle(tried: Mapping[float, float]) -> tuple[float, tuple[float, float]] | None:
    """The value and the interval: the minimum of the parabola over log(rate) through the best trial and
    its neighbours, and these neighbours.

    If a neighbour is missing or diverged, the value is the best trial's rate. None if every trial diverged.
    """
    rates, best = sorted(tried), best_of(tried) if tried else 0.0
    if not tried or not math.isfinite(tried[best]):
        return None
    place = rates.index(best)
    low, high = rates[max(0, place - 1)], rates[min(len(rates) - 1, place + 1)]
    below, above = tried[low] - tried[best], tried[high] - tried[best]
    if low == best or high == best or not math.isfinite(above + below) or below + above <= 0:
        return best, (low, high)
    # The parabola through (−1, below), (0, 0), (1, above) is lowest at
    # (below − above) / 2 (below + above), at most half a place away.
    shift = (below - above) / (2 * (below + above))
    return best * (high / best if shift > 0 else best / low) ** shift, (low, high)
