"""Grows the global batch during training and scales the learning rate with it. Pure.

The goal is progress per second, Pollux's goodput (Qiao et al. 2021, equations 6 and 7):

    goodput(B) = throughput(B) · efficiency(B) = B / T(B) · (φ + B0) / (φ + B)

φ is the gradient noise scale, B0 the initial batch, and T(B) = a + s·B the measured step time.
The batch grows, at most twofold at a time, if that gains LEAST_GAIN. It shrinks back if the step
time measured afterwards shows a loss of LEAST_GAIN. Smaller differences are within the noise of
φ and T, and φ rises while a network learns. While only one batch size has been measured, the step
time is assumed to be the same for twice the batch. That is the most that growing can gain, so
every batch that may pay is tried.
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
    """Resolve `auto`: `sqrt` for Adam and AdamW (Malladi et al. 2022), else `adascale`."""
    if rule != "auto":
        return rule
    return "sqrt" if optimizer in ("adam", "adamw") else "adascale"


def rate_factor(rule: Rule, batch: float, base: float, noise_scale: float | None) -> float:
    """The factor on the base batch's learning rate at another batch size.

    `adascale` is the gain of Johnson et al. 2020, (σ² + μ²) / (σ²/S + μ²) with S = B / B0,
    σ² = tr Σ / B0 and μ² = |G|². With φ = tr Σ / |G|² that is S · (φ + B0) / (φ + B). It lies
    between 1 and S; without a noise scale it is 1.
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
    """The global batch of one training and the factor on its learning rate.

    All ranks hold the same state, so all make the same decision.
    """

    base: int
    most: int
    rule: Rule
    batch: int = 0
    times_s: dict[int, float] = field(default_factory=dict)
    """measured step time by batch size"""
    changes: int = 0
    came_from: int | None = None
    """the previous batch, until the current one has been measured"""
    changed_at: int = 0
    factor_before: float = 1.0
    worked_s: float = 0.0
    """compute time of all ranks together in the observed windows"""

    def __post_init__(self) -> None:
        self.batch = self.batch or self.base

    def observe(self, step_time_s: float, noise_scale: float | None) -> tuple[int, str] | None:
        """Add a window's mean step time. Returns a better global batch and the reason, or None."""
        known = self.times_s.get(self.batch)
        self.times_s[self.batch] = step_time_s if known is None else (known + step_time_s) / 2
        if noise_scale is None or self.changes >= MOST_CHANGES or step_time_s <= 0:
            return None
        now = self._goodput(self.batch, noise_scale)
        if self.came_from is not None:
            before, worth = self.came_from, self._goodput(self.came_from, noise_scale)
            self.came_from = None
            if worth / now - 1 >= LEAST_GAIN:
                return self._propose(before, noise_scale, now, worth, "before")
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
            f"global batch from {self.batch} to {batch}: noise scale {noise_scale:.3g} samples, "
            f"goodput now {now:.4g} samples/s, {word} {then:.4g}"
        )

    def _larger(self) -> list[int]:
        """Candidates up to twice the current batch; only twice it until T's slope is known."""
        top = min(2 * self.batch, self.most)
        if len(self.times_s) < 2:
            return [top] if top > self.batch else []
        return sorted(
            {min(top, round(self.batch * _GRID**step)) for step in range(1, 5)} - {self.batch}
        )

    def _goodput(self, batch: int, noise_scale: float) -> float:
        return goodput(batch, self._step_time_s(batch), self.base, noise_scale)

    def _step_time_s(self, batch: int) -> float:
        """The measured time, or a line through the current and the farthest measured batch."""
        if batch in self.times_s:
            return self.times_s[batch]
        here = self.times_s[self.batch]
        other = max(self.times_s, key=lambda size: abs(size - self.batch))
        if other == self.batch:
            return here
        slope = (self.times_s[other] - here) / (other - self.batch)
        # Noise can give any slope. The bounds: samples cost nothing, or steps have no fixed cost.
        return max(here + min(max(slope, 0.0), here / self.batch) * (batch - self.batch), 1e-9)

    def change(self, batch: int, step: int, noise_scale: float | None) -> None:
        """Use this global batch from `step` on, whether decided here or replayed."""
        if batch == self.batch:
            return
        self.factor_before = self.factor(step, noise_scale)
        self.came_from = self.batch if batch > self.batch else None
        self.batch, self.changed_at = batch, step
        self.changes += 1

    def forget_times(self) -> None:
        """Discard the measured step times: the set of ranks has changed."""
        self.times_s, self.came_from = {}, None

    def factor(self, step: int, noise_scale: float | None) -> float:
        """The factor on the learning rate at a step.

        `linear` warms up over WARM_UP_STEPS (Goyal et al. 2017).
        """
        aim = rate_factor(self.rule, self.batch, self.base, noise_scale)
        if self.rule != "linear":
            return aim
        done = min(1.0, (step - self.changed_at + 1) / WARM_UP_STEPS)
        return self.factor_before + (aim - self.factor_before) * done

    def document(self) -> dict[str, Any]:
        """JSON for a checkpoint; `restored` reads it."""
        return asdict(self)


def restored(document: dict[str, Any]) -> BatchGrowth:
    """Rebuild what `BatchGrowth.document` wrote (JSON keys are strings)."""
    times_s = {int(size): time for size, time in document["times_s"].items()}
    return BatchGrowth(**{**document, "times_s": times_s})


def mean_step_time_s(steps_s: Sequence[float]) -> float:
    """A window's T(B): the mean, with outliers capped at MOST_OF_MEDIAN medians.

    A median would hide occasional waits. They cost every step the same, so they favour large
    batches, which need fewer steps. A long stall of the machine has nothing to do with the batch;
    hence the cap.
    """
    most_s = MOST_OF_MEDIAN * statistics.median(steps_s)
    return statistics.fmean(min(one, most_s) for one in steps_s)


def largest_batch(
    split: Sequence[int], limits: Sequence[int | None], bound: int, *, follows_speed: bool
) -> int:
    """The largest global batch within `bound` and each rank's memory limit, in samples.

    If the split follows measured speeds, other ranks take what one can't hold. Otherwise the
    proportions of the split stay fixed.
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
