"""Estimates the gradient noise scale from ranks with unequal batches. Pure.

The noise scale is the batch size, in samples, beyond which a larger batch gains little per step.

Rank r's gradient g_r is the mean over its b_r samples; the joint gradient is g = Σ (b_r / B) · g_r.
With G the true gradient and Σ the covariance of one sample's gradient,

    E|g_r|² = |G|² + tr Σ / b_r        E|g|² = |G|² + tr Σ / B

Over n ranks, these two estimates are therefore unbiased for any split (one-way analysis of
variance; for normally distributed gradients they have the least variance of all unbiased
estimates from these figures; for equal batches they are those of AdaScale and Pollux; Cannikin
treats unequal batches):

    tr Σ ≈ (Σ_r b_r |g_r|² − B |g|²) / (n − 1)        |G|² ≈ |g|² − tr Σ / B

If the loss is a mean over other things than samples, w_r of them on rank r, then b_r = w_r B / W.

The noise scale is φ = tr Σ / |G|² (McCandlish et al. 2018, the "simple" noise scale). Both terms
are smoothed before the division: smoothing the ratio itself would be biased. With batch
normalisation over all ranks, the g_r are not quite independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

SMOOTHING = 0.97
LEAST_ESTIMATES = 10


def noise_and_signal(
    batches: Sequence[float], squares: Sequence[float], joint_square: float
) -> tuple[float, float]:
    """Unbiased (tr Σ, |G|²) from each rank's batch b_r and |g_r|², and the joint |g|².

    Either can be negative by chance. Raises ValueError if fewer than two ranks have samples.
    """
    spread = math.fsum(batch * square for batch, square in zip(batches, squares, strict=True))
    return _noise_and_signal(
        spread, sum(batches), sum(batch > 0 for batch in batches), joint_square
    )


def _noise_and_signal(
    spread: float, total: float, ranks: int, joint_square: float
) -> tuple[float, float]:
    if ranks < 2:
        raise ValueError(f"got {ranks} ranks with samples; the noise scale needs at least 2")
    noise = (spread - total * joint_square) / (ranks - 1)
    return noise, joint_square - noise / total


@dataclass
class NoiseScale:
    """Smoothed tr Σ and |G|². A checkpoint can store and restore all of it."""

    noise: float = 0.0
    signal: float = 0.0
    estimates: int = 0
    spread: float = 0.0
    """Σ_r b_r |g_r|² of the last step; its |g|² arrives with the next step's sum"""
    total: int = 0
    ranks: int = 0

    def add(self, noise: float, signal: float) -> None:
        """Add one step's estimates; ignores values that are not finite."""
        if not (math.isfinite(noise) and math.isfinite(signal)):
            return
        self.noise = SMOOTHING * self.noise + (1 - SMOOTHING) * noise
        self.signal = SMOOTHING * self.signal + (1 - SMOOTHING) * signal
        self.estimates += 1

    def begin(self, spread: float, total: int, ranks: int) -> None:
        """Store a step's Σ_r b_r |g_r|², its B, and the number of ranks with samples."""
        self.spread, self.total, self.ranks = spread, total, ranks

    def complete(self, joint_square: float) -> None:
        """Add |g|² of the step given to `begin`; ignored if fewer than two ranks had samples."""
        if self.ranks >= 2:
            self.add(*_noise_and_signal(self.spread, self.total, self.ranks, joint_square))
        self.ranks = 0

    @property
    def value(self) -> float | None:
        """φ in samples; inf if noise drowns the gradient; None before LEAST_ESTIMATES."""
        if self.estimates < LEAST_ESTIMATES:
            return None
        if self.noise <= 0:
            return 0.0
        return self.noise / self.signal if self.signal > 0 else math.inf

    def document(self) -> dict[str, Any]:
        """JSON for a checkpoint."""
        return asdict(self)
