"""Chooses the rates that a learning-rate search tries after its ramp, and the final rate. Pure.

The ramp finds the rate at which the loss diverges, but says little about the best rate below it: it
takes one step at each rate, and each step starts from the model that the earlier steps trained. So
a few short trials are compared, all from the same start and over the same batches: first at 1/3,
1/9 and 1/27 of the diverging rate. While the best rate is the lowest or the highest tried, the next
trial extends the range by a factor of 3. The rate at which the ramp diverged may work from the
start, so trials may reach it. A trial that diverges has no score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

FACTOR = 3.0
FIRST = 3
MOST = 6
SHARE = 5
"""A trial takes 1 / SHARE of the training's steps, within the bounds below."""
LEAST_STEPS, MOST_STEPS = 20, 300


def trial_steps(training_steps: int) -> int:
    """Steps of one trial: a fifth of the training's steps, within bounds."""
    return max(LEAST_STEPS, min(MOST_STEPS, training_steps // SHARE))


def score(losses: Sequence[float], steps: int) -> float:
    """A trial's mean loss over its last quarter; infinite if it diverged before its end."""
    last = losses[-max(1, steps // 4) :]
    if len(losses) < steps or not all(math.isfinite(one) for one in last):
        return math.inf
    return math.fsum(last) / len(last)


def next_trial(edge: float, tried: Mapping[float, float]) -> float | None:
    """The next rate to try, given the diverging rate and the scores so far; None if done."""
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
    """The rate with the lowest score. With equal scores, or none, the lowest rate."""
    return min(sorted(tried), key=lambda rate: tried[rate])


def settle(tried: Mapping[float, float]) -> tuple[float, tuple[float, float]] | None:
    """The chosen rate and its interval. None if every trial diverged.

    The rate is the minimum of the parabola in log(rate) through the best trial and its two
    neighbours; the neighbours are the interval. If a neighbour is missing or diverged, the rate is
    the best trial's.
    """
    rates, best = sorted(tried), best_of(tried) if tried else 0.0
    if not tried or not math.isfinite(tried[best]):
        return None
    place = rates.index(best)
    low, high = rates[max(0, place - 1)], rates[min(len(rates) - 1, place + 1)]
    below, above = tried[low] - tried[best], tried[high] - tried[best]
    if low == best or high == best or not math.isfinite(above + below) or below + above <= 0:
        return best, (low, high)
    # The parabola through (−1, below), (0, 0), (1, above) has its minimum at
    # (below − above) / (2 (below + above)), at most half a position from the best trial.
    shift = (below - above) / (2 * (below + above))
    return best * (high / best if shift > 0 else best / low) ** shift, (low, high)
