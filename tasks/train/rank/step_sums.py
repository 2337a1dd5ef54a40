"""What ranks agree on in the last sum of a step, and how a rank ends a step that another has ended.

A rank of a pipeline takes part in that sum only when it has all its gradients. If a rank is lost
then, some of the others may have received the sum and ended the step, but not all. Stages differ,
so that the newest state is on several ranks, and must not be lost with one that has not ended the
step: it does that when the next group forms, by the sums of one that has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True)
class StepSums:
    """A rank's part of the sum, or the sum.

    `squares` and `weights` are by rank; a pipeline's are those of the rank of its first stage.
    """

    loss: float
    """Σ_r s_r / B"""
    correct: float
    stops: float
    leaves: float
    joint_square: float
    """|g|² of the step before"""
    overflows: float
    squares: Sequence[float]
    """|h_r|², of h_r = ∇s_r / B"""
    weights: Sequence[float]
    """w_r: the number of samples, or of what else the loss is the mean over"""
    used: Sequence[float]
    """by parameter: how many ranks have a gradient"""

    @property
    def weight(self) -> float:
        """W = Σ_r w_r. Without it, the step has no loss and no gradient."""
        return math.fsum(self.weights)

    @property
    def ranks(self) -> int:
        """The number of ranks, or pipelines, with a weight."""
        return sum(weight > 0 for weight in self.weights)

    def factor(self, samples: int) -> float:
        """B / W, which makes means of sums over B: 1 if the loss is a mean over samples."""
        return samples / self.weight if self.weight else 1.0

    def spread(self, samples: int) -> float:
        """Σ_r b_r |g_r|² with b_r = w_r B / W, the samples that rank r's weight stands for."""
        by_rank = zip(self.weights, self.squares, strict=True)
        spread = sum(samples**2 / weight * square for weight, square in by_rank if weight)
        return spread * self.factor(samples)

    def numbers(self) -> list[float]:
        """All of them in a list."""
        *scalars, squares, weights, used = vars(self).values()
        return [*scalars, *squares, *weights, *used]

    @classmethod
    def of(cls, numbers: Sequence[float], ranks: int) -> Self:
        """From a list as of `numbers`, of so many ranks."""
        *names, _, _, _ = cls.__dataclass_fields__
        scalars: dict[str, Any] = dict(zip(names, numbers, strict=False))
        rest = numbers[len(names) :]
        return cls(
            **scalars,
            squares=rest[:ranks],
            weights=rest[ranks : 2 * ranks],
            used=rest[2 * ranks :],
        )


class FinishedStep(BaseModel):
    """What the end of a rank's last step depended on besides its gradients."""

    model_config = ConfigDict(frozen=True)
    sums: StepSums
    samples: int
    norm_square: float | None
    """|g|² of all ranks, by which gradients were clipped; None: they were not"""
    learning_rate: float
