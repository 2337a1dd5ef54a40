"""Decides from measured step times when a new batch split pays. Pure.

A rank's time for b samples is modelled as t = a + s·b, with a = 0 while only one batch size has
been measured. The times are means over n windows with the same split, with a relative standard
error of σ/√n. A step takes as long as its slowest rank, so split b' gains over split b

    E[max_r t_r(b_r) · (1 + ε_r)] / E[max_r t_r(b'_r) · (1 + ε_r)] - 1        ε_r ~ N(0, σ²/n)

If ranks differ only by chance, the expected slowest rank is about as slow in any split and the gain
is near zero. If one rank is clearly slower, the full gain counts. The split changes if the gain is
at least LEAST_GAIN even with ERRORS times the standard error, and is so again after another
window.

A plan for energy or cost may give a device less than it could finish in a step. Each rank's times
are then divided by its planned share of the slowest rank's time (`pace`), so that the split keeps
the plan's proportions.

σ is the relative difference between windows of the same split. A difference that all ranks share
is left out, since it favours no split. If a rank's time differs by much more than σ, its speed has
changed and its earlier measurements are discarded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainwright.estimator.curves import Affine
from trainwright.tasks.allocate.plan.split import split_batch
from trainwright.tasks.train.batch.sampling import shares

LEAST_GAIN, ERRORS = 0.02, 3.0
MOST_WINDOWS = 8
"""The most windows that a mean counts, so that it follows slow changes."""
FIRST_NOISE, NOISE_SMOOTHING = 0.05, 0.9
OTHER_SPEED, OTHER_SPEED_NOISES = 0.10, 4.0
"""A rank's speed has changed if a window differs by this much and by this many times the noise."""
MOST_CHANGES = 8
"""The most changes of the split while no rank's speed changes; more would not find a better one."""
_TAIL_ERRORS, _POINTS = 5.0, 64
"""The range, in standard errors, and the number of points of the integral in `expected_largest`."""


@dataclass
class Rebalancer:
    """Holds, for each rank, the mean window time by batch size.

    All ranks hold the same state, so all make the same decision.
    """

    split: list[int]
    limits: Sequence[int | None] | None = None
    """the most samples that fit into each rank's memory"""
    pace: Sequence[float] | None = None
    """each rank's planned time as a share of the slowest rank's, which the split keeps"""
    seen: list[dict[int, float]] = field(default_factory=list)
    changes: int = 0
    asked_before: bool = False
    noise: float = FIRST_NOISE
    """σ: the relative standard deviation of one window's times"""
    windows: int = 0
    """windows in the current means, at most MOST_WINDOWS"""
    since_other_speed: int = 0
    """changes of the split since a rank's speed last changed"""

    def observe(self, medians: Sequence[float]) -> tuple[list[int], str] | None:
        """Add each rank's median compute time (s) with the current split.

        Returns a better split and the reason, or None.
        """
        if len(self.split) < 2 or min(medians) <= 0:
            return None
        if self.pace is not None:
            medians = [one / share for one, share in zip(medians, self.pace, strict=True)]
        if not self.seen:
            self.seen = [{} for _ in self.split]
        self._learn(medians)
        if self.since_other_speed >= MOST_CHANGES:
            return None
        curves = self._curves()
        better = split_batch(sum(self.split), curves, self.limits)
        if better is None:
            return None
        present = [known[batch] for known, batch in zip(self.seen, self.split, strict=True)]
        expected = [curve(batch) for curve, batch in zip(curves, better, strict=True)]
        error = ERRORS * self.noise / math.sqrt(self.windows)
        pays = (
            expected_largest(present, error) / expected_largest(expected, error) - 1 >= LEAST_GAIN
        )
        twice, self.asked_before = pays and self.asked_before, pays
        if not twice:
            return None
        reason = (
            f"slowest rank took {max(present) * 1e3:.1f} ms, {max(expected) * 1e3:.1f} ms expected"
            f"{', at the pace of the plan' if self.pace and min(self.pace) < 1 else ''}"
        )
        self.split = better
        self.changes, self.since_other_speed = self.changes + 1, self.since_other_speed + 1
        self.asked_before, self.windows = False, 0
        return better, reason

    def _learn(self, medians: Sequence[float]) -> None:
        """Update the means and σ by a window; discard a rank's times if its speed has changed."""
        differences, before, is_other = [], self.windows, False
        self.windows = min(before + 1, MOST_WINDOWS)
        for number, (known, batch, median) in enumerate(
            zip(self.seen, self.split, medians, strict=True)
        ):
            difference = median / known[batch] - 1 if batch in known else 0.0
            if abs(difference) > max(OTHER_SPEED, OTHER_SPEED_NOISES * self.noise):
                self.seen[number], is_other = {batch: median}, True
                continue
            if batch in known and before:
                differences.append(difference)
            known[batch] = (
                known[batch] + (median - known[batch]) / self.windows if batch in known else median
            )
        if is_other:
            self.since_other_speed, self.windows = 0, 1
        if len(differences) > 1:
            common = sum(differences) / len(differences)
            squares = sum((one - common) ** 2 for one in differences) / (len(differences) - 1)
            # A window minus the mean of `before` windows has the variance σ² · (1 + 1 / before).
            square = squares / (1 + 1 / before)
            self.noise = math.sqrt(NOISE_SMOOTHING * self.noise**2 + (1 - NOISE_SMOOTHING) * square)

    def _curves(self) -> list[Affine]:
        return [_fit(known, batch) for known, batch in zip(self.seen, self.split, strict=True)]

    def resized(self, total: int) -> list[int]:
        """Switch to the split of another global batch.

        Keeps the current proportions if no times have been measured yet.
        """
        known = bool(self.seen) and all(
            batch in times for times, batch in zip(self.seen, self.split, strict=True)
        )
        found = (
            split_batch(total, self._curves(), self.limits)
            if known and min(self.split) > 0
            else None
        )
        self.split = found or shares(total, self.split)
        self.asked_before, self.windows = False, 0
        return list(self.split)


def expected_largest(times: Sequence[float], error: float) -> float:
    """The expected maximum of independent normal times (s).

    `error` is their relative standard deviation. E[max] = h - ∫ Π_r Φ((x - t_r) / (error · t_r)) dx
    up to h, with h above all times. The integral is computed by the midpoint rule.
    """
    if error <= 0 or len(times) == 1:
        return max(times)
    low, high = (
        max(times) * max(0.0, 1 - _TAIL_ERRORS * error),
        max(times) * (1 + _TAIL_ERRORS * error),
    )
    width, below = (high - low) / _POINTS, 0.0
    for point in range(_POINTS):
        at = low + (point + 0.5) * width
        below += math.prod(
            0.5 * math.erfc((time - at) / (math.sqrt(2) * error * time)) for time in times
        )
    return high - below * width


def _fit(known: dict[int, float], batch: int) -> Affine:
    """The line through the current batch and the farthest measured one.

    Goes through the origin if they lie too close together or give no plausible line.
    """
    time = known[batch]
    other = max(known, key=lambda size: abs(size - batch))
    if abs(other - batch) >= 0.1 * batch:
        slope = (known[other] - time) / (other - batch)
        fixed = time - slope * batch
        if slope > 0 and 0 <= fixed < time:
            return Affine(fixed=fixed, per_sample=slope)
    return Affine(fixed=0.0, per_sample=time / batch)
