"""How the global batch grows while training, and how the learning rate follows. Pure.

What counts is progress per second, Pollux's goodput (Qiao et al. 2021, equations 6 and 7):

    goodput(B) = throughput(B) · efficiency(B) = B / T(B) · (φ + B0) / (φ + B)

with φ the gradient noise scale, B0 the batch that the training began with, and T(B) = a + s·B the step time, measured. The batch
grows to at most twice itself where that gains LEAST_GAIN, and goes back where by the step time then measured it has lost as much:
less is within the noise of both, and φ rises while a network learns. As long as one batch is all that was measured, a step is
taken to cost the same for twice the batch, the most that growing can gain: so a batch that may pay is tried.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Rule = Literal["auto", "constant", "linear", "sqrt", "adascale"]

LEAST_GAIN = 0.05
MOST_CHANGES = 16
MOST_OF_MEDIAN = 4.0
WARM_UP_STEPS = 50
_GRID = 2**0.25


def efficiency(batch: float, base: float, noise_scale: float) -> float:
    """Progress per sample, relative to the base batch: (φ + B0) / (φ + B)."""
    return 1.0 if math.isinf(noise_scale) else (noise_scale + base) / (noise_scale + batch)


def goodput(batch: float, step_time_s: float, base: float, noise_scale: float) -> float:
    """Samples per second, in samples of the base batch."""
    return batch / step_time_s * efficiency(batch, base, noise_scale)


def rule_for(rule: Rule, optimizer: str) -> Rule:
    """`auto` is `sqrt` for optimizers that divide by the gradient's size (Malladi et al. 2022), `adascale` for the others."""
    if rule != "auto":
        return rule
    return "sqrt" if optimizer in ("adam", "adamw") else "adascale"


def rate_factor(rule: Rule, batch: float, base: float, noise_scale: float | None) -> float:
    """By what the learning rate of the base batch is multiplied at another batch.

    `adascale` is the gain of Johnson et al. 2020, (σ² + μ²) / (σ²/S + μ²) with S = B / B0, σ² = tr Σ / B0, μ² = |G|²: in terms of
    φ, S · (φ + B0) / (φ + B). It lies between 1 and S; without a noise scale it is 1.
    """
    scale = batch / base
    if rule == "linear":
        return scale
    if rule == "sqrt":
        return math.sqrt(scale)
    if rule == "adascale" and noise_scale is not None:
        return scale * efficiency(batch, base, noise_scale)
    return 1.0


@dataclass
class BatchGrowth:
    """The global batch of one training and its learning rate's factor. Every rank has the same, and decides the same."""

    base: int
    most: int
    rule: Rule
    batch: int = 0
    times_s: dict[int, float] = field(default_factory=dict)
    """the latest step time by batch"""
    changes: int = 0
    came_from: int | None = None
    """the batch before, as long as the present one has not been measured"""
    changed_at: int = 0
    factor_before: float = 1.0
    worked_s: float = 0.0
    """by all ranks together, in the windows that were observed"""

    def __post_init__(self) -> None:
        self.batch = self.batch or self.base

    def observe(self, step_time_s: float, noise_scale: float | None) -> tuple[int, str] | None:
        """Take in a window's mean step time; a better global batch and the reason, or None."""
        known = self.times_s.get(self.batch)
        self.times_s[self.batch] = step_time_s if known is None else (known + step_time_s) / 2
        if noise_scale is None or self.changes >= MOST_CHANGES or step_time_s <= 0:
            return None
        now = self._goodput(self.batch, noise_scale)
        if self.came_from is not None:
            before, worth = self.came_from, self._goodput(self.came_from, noise_scale)
            self.came_from = None
            if worth / now - 1 >= LEAST_GAIN:
                return self._propose(before, noise_scale, now, worth, "was")
        sizes = self._larger()
        if not sizes:
            return None
        chosen = max(sizes, key=lambda size: self._goodput(size, noise_scale))
        then = self._goodput(chosen, noise_scale)
        if then / now - 1 < LEAST_GAIN:
            return None
        return self._propose(
            chosen, noise_scale, now, then, "expected" if len(self.times_s) > 1 else "at most"
        )

    def _propose(
        self, batch: int, noise_scale: float, now: float, then: float, word: str
    ) -> tuple[int, str]:
        return batch, (
            f"global batch {self.batch} to {batch}: noise scale {noise_scale:.3g} samples, "
            f"goodput {now:.4g} samples/s, {then:.4g} {word}"
        )

    def _larger(self) -> list[int]:
        """Up to twice the present batch; only that one as long as the step time's slope is not known."""
        top = min(2 * self.batch, self.most)
        if len(self.times_s) < 2:
            return [top] if top > self.batch else []
        return sorted(
            {min(top, round(self.batch * _GRID**step)) for step in range(1, 5)} - {self.batch}
        )

    def _goodput(self, batch: int, noise_scale: float) -> float:
        return goodput(batch, self._step_time_s(batch), self.base, noise_scale)

    def _step_time_s(self, batch: int) -> float:
        """As measured, else by the line through the present batch and the measured one farthest from it."""
        if batch in self.times_s:
            return self.times_s[batch]
        here = self.times_s[self.batch]
        other = max(self.times_s, key=lambda size: abs(size - self.batch))
        if other == self.batch:
            return here
        slope = (self.times_s[other] - here) / (other - self.batch)
        return max(here + min(max(slope, 0.0), here / self.batch) * (batch - self.batch), 1e-9)

    def change(self, batch: int, step: int, noise_scale: float | None) -> None:
        """From `step` on, this is the global batch: decided here, or replayed."""
        if batch == self.batch:
            return
        self.factor_before = self.factor(step, noise_scale)
        self.came_from = self.batch if batch > self.batch else None
        self.batch, self.changed_at = batch, step
        self.changes += 1

    def forget_times(self) -> None:
        """What was measured says nothing from now on: other ranks train."""
        self.times_s, self.came_from = {}, None

    def factor(self, step: int, noise_scale: float | None) -> float:
        """What the learning rate is multiplied by at a step; `linear` gets there over WARM_UP_STEPS (Goyal et al. 2017)."""
        aim = rate_factor(self.rule, self.batch, self.base, noise_scale)
        if self.rule != "linear":
            return aim
        done = min(1.0, (step - self.changed_at + 1) / WARM_UP_STEPS)
        return self.factor_before + (aim - self.factor_before) * done

    def document(self) -> dict[str, Any]:
        """For a checkpoint; `restored` reads it."""
        return asdict(self)


def restored(document: dict[str, Any]) -> BatchGrowth:
    """What `BatchGrowth.document` wrote down (JSON's keys are text)."""
    times_s = {int(size): time for size, time in document["times_s"].items()}
    return BatchGrowth(**{**document, "times_s": times_s})


def mean_step_time_s(steps_s: Sequence[float]) -> float:
    """A window's T(B). Not the median: what a step waits now and then costs a small batch's steps as much as a large one's, which
    are fewer. A long stall of the machine has nothing to do with the batch, and counts as MOST_OF_MEDIAN medians at most."""
    most_s = MOST_OF_MEDIAN * statistics.median(steps_s)
    return statistics.fmean(min(one, most_s) for one in steps_s)


def largest_batch(
    split: Sequence[int], limits: Sequence[int | None], bound: int, *, follows_speed: bool
) -> int:
    """The largest global batch within a bound and what each rank's memory holds, in samples.

    Where the split follows measured speeds, what one rank can't hold another takes; else the split's proportions stay.
    """
    total = sum(split)
    if all(limit is None for limit in limits):
        return bound
    if follows_speed:
        return min(bound, sum(bound if limit is None else limit for limit in limits))
    held = [
        limit * total // part
        for limit, part in zip(limits, split, strict=True)
        if limit is not None and part
    ]
    return min([bound, *held])
