"""When the batch split changes: from measured step times, by a fit that outlives one change, with hysteresis. Pure.

A rank's time for b samples is taken as t = a + s·b; with one batch size seen, a = 0. Re-splitting on the last block's b/t alone
oscillates: here a change needs a predicted gain above the noise, still so when another window has gone into the mean. The noise
is by how much windows with one split differ, over the root of how many there were, whose mean is what is known; a rank that
differs by far more has another speed now, and what was known of it is forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainwright.estimator.curves import Affine
from trainwright.tasks.allocate.split import split_batch
from trainwright.tasks.train.batches import shares

LEAST_GAIN = 0.02
"""And twice the noise beyond it."""
MOST_WINDOWS = 8
"""of those that a mean is of: slow changes are followed"""
FIRST_NOISE, NOISE_SMOOTHING = 0.02, 0.7
OTHER_SPEED, OTHER_SPEED_NOISES = 0.10, 4.0
"""A window says so if it differs by this, and by so many times the noise."""
MOST_CHANGES = 8
"""At the same speeds: by then, what is measured does not lead to a better split."""


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
    """by how much a window's times differ from those before it with the same split: smoothed, of the rank that differs most"""
    windows: int = 0
    """with the present split and speeds, MOST_WINDOWS at most"""
    since_other_speed: int = 0
    """changes since a rank's speed was another"""

    def observe(self, medians: Sequence[float]) -> tuple[list[int], str] | None:
        """Take in each rank's median own-work time (s) with the present split; a better split and the reason, or None."""
        if not self.seen:
            self.seen = [{} for _ in self.split]
        self._learn(medians)
        if self.since_other_speed >= MOST_CHANGES or len(self.split) < 2 or min(medians) <= 0:
            return None
        curves = self._curves()
        better = split_batch(sum(self.split), curves, self.limits)
        if better is None:
            return None
        present = [known[batch] for known, batch in zip(self.seen, self.split, strict=True)]
        now, then = max(present), max(curve(batch) for curve, batch in zip(curves, better, strict=True))
        pays = now / then - 1 >= LEAST_GAIN + 2 * self.noise / math.sqrt(self.windows)
        twice, self.asked_before = pays and self.asked_before, pays
        if not twice:
            return None
        reason = f"slowest rank took {now * 1e3:.1f} ms, {then * 1e3:.1f} ms expected"
        self.split = better
        self.changes, self.since_other_speed = self.changes + 1, self.since_other_speed + 1
        self.asked_before, self.windows = False, 0
        return better, reason

    def _learn(self, medians: Sequence[float]) -> None:
        differences = []
        self.windows = min(self.windows + 1, MOST_WINDOWS)
        for number, (known, batch, median) in enumerate(zip(self.seen, self.split, medians, strict=True)):
            difference = abs(median / known[batch] - 1) if known.get(batch) else 0.0
            if difference > max(OTHER_SPEED, OTHER_SPEED_NOISES * self.noise):
                self.seen[number] = {batch: median}
                self.since_other_speed, self.windows = 0, 1
                continue
            if batch in known:
                differences.append(difference)
            known[batch] = known[batch] + (median - known[batch]) / self.windows if batch in known else median
        if differences:
            self.noise = NOISE_SMOOTHING * self.noise + (1 - NOISE_SMOOTHING) * max(differences)

    def _curves(self) -> list[Affine]:
        return [_fit(known, batch) for known, batch in zip(self.seen, self.split, strict=True)]

    def resized(self, total: int) -> list[int]:
        """The split of another global batch, from now on; in the present proportions where no times are known yet."""
        found = split_batch(total, self._curves(), self.limits) if self.seen and min(self.split) > 0 else None
        self.split = found or shares(total, self.split)
        self.asked_before, self.windows = False, 0
        return list(self.split)


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
