"""What a rank's passes over the micro-batches of a step add up to. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PassSums:
    """What a rank's passes over its micro-batches add up to."""

    loss: float = 0.0
    """Σ_p s_p / B, of sums of losses s_p"""
    correct: float = 0.0
    weight: float = 0.0
    """Σ_p w_p; see `estimator.trace.batch_loss`"""
