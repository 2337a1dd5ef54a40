"""The gradient noise scale from ranks with unequal batches: how many samples a step needs before more of them stop paying. Pure.

Rank r's gradient g_r is the mean over its b_r samples, the joint one g = Σ (b_r / B) · g_r. With G the true gradient and Σ the
covariance of one sample's gradient,

    E|g_r|² = |G|² + tr Σ / b_r        E|g|² = |G|² + tr Σ / B

so that, over n ranks, both of these are unbiased for any split (one-way analysis of variance; where gradients are normal no
unbiased estimate from these figures varies less. For equal batches they are those of AdaScale and Pollux; Cannikin treats unequal
ones):

    tr Σ ≈ (Σ_r b_r |g_r|² − B |g|²) / (n − 1)        |G|² ≈ |g|² − tr Σ / B

The noise scale is φ = tr Σ / |G|² (McCandlish et al. 2018, "simple" noise scale, in samples), the ratio of the two after
smoothing: smoothing the ratio itself would be biased. Where batch normalisation joins the ranks, the g_r are not quite
independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

SMOOTHING = 0.97
LEAST_ESTIMATES = 10


def noise_and_signal(
    batches: Sequence[int], squares: Sequence[float], joint_square: float
) -> tuple[float, float]:
    """Unbiased (tr Σ, |G|²) from each rank's batch b_r and |g_r|², and |g|² of the joint gradient.

    Either can come out negative by chance. Raises ValueError below two ranks with samples.
    """
    spread = math.fsum(batch * square for batch, square in zip(batches, squares, strict=True))
    return _noise_and_signal(
        spread, sum(batches), sum(batch > 0 for batch in batches), joint_square
    )


def _noise_and_signal(
    spread: float, total: int, ranks: int, joint_square: float
) -> tuple[float, float]:
    if ranks < 2:
        raise ValueError(f"two or more ranks with samples, not {ranks}")
    noise = (spread - total * joint_square) / (ranks - 1)
    return noise, joint_square - noise / total


@dataclass
class NoiseScale:
    """Smoothed tr Σ and |G|². All of it can be written down and taken up again."""

    noise: float = 0.0
    signal: float = 0.0
    estimates: int = 0
    spread: float = 0.0
    """Σ_r b_r |g_r|² of the step whose |g|² is not known to all ranks yet"""
    total: int = 0
    ranks: int = 0

    def add(self, noise: float, signal: float) -> None:
        """Take in one step's estimates; those that are no numbers are passed over."""
        if not (math.isfinite(noise) and math.isfinite(signal)):
            return
        self.noise = SMOOTHING * self.noise + (1 - SMOOTHING) * noise
        self.signal = SMOOTHING * self.signal + (1 - SMOOTHING) * signal
        self.estimates += 1

    def begin(self, spread: float, total: int, ranks: int) -> None:
        """Note a step's Σ_r b_r |g_r|², its B, and how many ranks had samples."""
        self.spread, self.total, self.ranks = spread, total, ranks

    def complete(self, joint_square: float) -> None:
        """Take in |g|² of the step that `begin` noted; nothing where fewer than two ranks had samples."""
        if self.ranks >= 2:
            self.add(*_noise_and_signal(self.spread, self.total, self.ranks, joint_square))
        self.ranks = 0

    @property
    def value(self) -> float | None:
        """φ in samples; infinite where the gradient is lost in its noise; None before there are LEAST_ESTIMATES."""
        if self.estimates < LEAST_ESTIMATES:
            return None
        if self.noise <= 0:
            return 0.0
        return self.noise / self.signal if self.signal > 0 else math.inf

    def document(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)
