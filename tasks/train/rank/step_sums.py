"""What ranks agree on in the last sum of a step, and how a rank ends a step that another has ended.

A rank of a pipeline takes part in that sum only when it has all its gradients. If a rank is lost
then, some of the others may have received the sum and ended the step, but not all. Stages differ,
so that the newest state is on several ranks, and must not be lost with one that has not ended the
step: it does that when the next group forms, by the sums of one that has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True)
class StepSums:
    """A rank's part of the sum, or the sum."""

    loss: float
    correct: float
    stops: float
    leaves: float
    spread: float
    """Σ_r B² / b_r · |h_r|²"""
    ranks: float
    """the number of ranks with samples, or of pipelines"""
    joint_square: float
    """|g|² of the step before"""
    overflows: float
    used: Sequence[float]
    """by parameter: how many ranks have a gradient"""

    def numbers(self) -> list[float]:
        """All of them in a list."""
        *scalars, used = vars(self).values()
        return [*scalars, *used]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Self:
        """From a list as of `numbers`."""
        *names, _ = cls.__dataclass_fields__
        scalars: dict[str, Any] = dict(zip(names, numbers, strict=False))
        return cls(**scalars, used=numbers[len(names) :])


class FinishedStep(BaseModel):
    """What the end of a rank's last step depended on besides its gradients."""

    model_config = ConfigDict(frozen=True)
    sums: StepSums
    samples: int
    norm_square: float | None
    """|g|² of all ranks, by which gradients were clipped; None: they were not"""
    learning_rate: float
