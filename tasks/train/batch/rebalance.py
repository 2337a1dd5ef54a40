"""When the batch split changes: from measured step times, by a fit that outlives one change, where that pays. Pure.

A rank's time for b samples is taken as t = a + s·b; with one batch size seen, a = 0. What is known of it is the mean of n windows
with one split, wrong by σ/√n or so. A step takes as long as its slowest rank, so that the split b' gains

    E[max_r t_r(b_r) · (1 + ε_r)] / E[max_r t_r(b'_r) · (1 + ε_r)] - 1        ε_r ~ N(0, σ²/n)

over b. Of ranks that differ only as chance would have it, the slowest is about as slow in any split, and nothing is gained; one
that stands out is gained in full. A change needs LEAST_GAIN, by ERRORS times these errors, still so when another window has gone
into the mean. σ is by how much windows with one split differ; what all ranks have in common moves no split, and is not counted. A
rank that differs by far more has another speed now, and what was known of it is forgotten.
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
"""of those that a mean is of: slow changes are followed"""
FIRST_NOISE, NOISE_SMOOTHING = 0.05, 0.9
OTHER_SPEED, OTHER_SPEED_NOISES = 0.10, 4.0
"""A window says so if it differs by this, and by so many times the noise."""
MOST_CHANGES = 8
"""At the same speeds: by then, what is measured does not lead to a better split."""
_TAIL_ERRORS, _POINTS = 5.0, 64
"""How far from a mean, in errors, the expectation of the largest is integrated, and at how many points."""


@dataclass
class Rebalancer:
    """Remembers, for each rank, the mean of its windows' times by batch size. Every rank has the same, and decides the same."""

    split: list[int]
    limits: Sequence[int | None] | None = None
    """what each rank's memory holds, in samples"""
    seen: list[dict[int, float]] = field(default_factory=list)
    changes: int = 0
    asked_before: bool = False
    noise: float = FIRST_NOISE
    """σ: the relative standard deviation of one window's times"""
    windows: int = 0
    """with the present split and speeds, MOST_WINDOWS at most"""
    since_other_speed: int = 0
    """changes since a rank's speed was another"""

    def observe(self, medians: Sequence[float]) -> tuple[list[int], str] | None:
        """Take in each rank's median own-work time (s) with the present split; a better split and the reason, or None."""
        if len(self.split) < 2 or min(medians) <= 0:
            return None
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
        )
        self.split = better
        self.changes, self.since_other_speed = self.changes + 1, self.since_other_speed + 1
        self.asked_before, self.windows = False, 0
        return better, reason

    def _learn(self, medians: Sequence[float]) -> None:
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
            square = squares / (1 + 1 / before)  # of a window against the mean of those before it
            self.noise = math.sqrt(NOISE_SMOOTHING * self.noise**2 + (1 - NOISE_SMOOTHING) * square)

    def _curves(self) -> list[Affine]:
        return [_fit(known, batch) for known, batch in zip(self.seen, self.split, strict=True)]

    def resized(self, total: int) -> list[int]:
        """The split of another global batch, from now on; in the present proportions where no times are known yet."""
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
    """The expectation of the largest of independent normal times (s), each with this relative standard deviation.

    E[max] = h - ∫ Π_r Φ((x - t_r) / (error · t_r)) dx up to an h that none exceeds, by the midpoint rule.
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
    """The line through the present point and the one farthest from it in batch size, where that says something."""
    time = known[batch]
    other = max(known, key=lambda size: abs(size - batch))
    if abs(other - batch) >= 0.1 * batch:
        slope = (known[other] - time) / (other - batch)
        fixed = time - slope * batch
        if slope > 0 and 0 <= fixed < time:
            return Affine(fixed=fixed, per_sample=slope)
    return Affine(fixed=0.0, per_sample=time / batch)
