"""Which rates a learning-rate search tries after its ramp, and which it takes from what they gave. Pure.

The ramp says at which rate the loss runs away, but little about what is best below it: at each rate it takes one step, of a
model that the steps before have made. So a few short trainings, each from the same start over the same batches, are compared: at
a third, a ninth and a 27th of the runaway rate, and on by thirds, downwards or upwards, as long as the best lies at an end. From
the same start the rate at which the ramp ran away may hold: what runs away there has no score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

FACTOR = 3.0
FIRST = 3
MOST = 6
SHARE = 5
"""A trial takes this part of the training's steps,"""
LEAST_STEPS, MOST_STEPS = 20, 300
"""but not fewer or more than these."""


def trial_steps(training_steps: int) -> int:
    """Steps of one trial: a fifth of the training's, within bounds."""
    return max(LEAST_STEPS, min(MOST_STEPS, training_steps // SHARE))


def score(losses: Sequence[float], steps: int) -> float:
    """What a trial reached: its mean loss over the last quarter; infinite where it ran away before its end."""
    last = losses[-max(1, steps // 4) :]
    if len(losses) < steps or not all(math.isfinite(one) for one in last):
        return math.inf
    return math.fsum(last) / len(last)


def next_trial(edge: float, tried: Mapping[float, float]) -> float | None:
    """The rate to try next, given the runaway rate and the scores so far; None where there is enough."""
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
    """The rate with the least score; the lower one where two are equal, or where none has a score."""
    return min(sorted(tried), key=lambda rate: tried[rate])


def settle(tried: Mapping[float, float]) -> tuple[float, tuple[float, float]] | None:
    """Value and interval: the least of the parabola over log(rate) through the best trial and its neighbours, and these.

    Where a neighbour is missing or ran away, the best trial itself. None where every trial ran away.
    """
    rates, best = sorted(tried), best_of(tried) if tried else 0.0
    if not tried or not math.isfinite(tried[best]):
        return None
    place = rates.index(best)
    low, high = rates[max(0, place - 1)], rates[min(len(rates) - 1, place + 1)]
    below, above = tried[low] - tried[best], tried[high] - tried[best]
    if low == best or high == best or not math.isfinite(above + below) or below + above <= 0:
        return best, (low, high)
    # Through (−1, below), (0, 0), (1, above): least at (below − above) / 2 (below + above), at most half a place away.
    shift = (below - above) / (2 * (below + above))
    return best * (high / best if shift > 0 else best / low) ** shift, (low, high)
