"""By what the loss is multiplied before the backward pass, so that fp16 gradients do not vanish. Pure.

The rule of torch.amp.GradScaler: halved where a gradient overflows, and that step is left out; doubled after a long while
without. All ranks have the same scale, whatever half precision they compute in: batch normalisation sums gradients within the
backward pass. That a gradient has overflowed on any rank is agreed on before the optimizer's step, so that all leave it out.
Powers of two, so that scaling changes no digit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

FIRST, LEAST, MOST = 2.0**16, 1.0, 2.0**24
GROWS_AFTER_STEPS = 2000


@dataclass
class LossScale:
    """The scale, and for how many steps it has held."""

    value: float = FIRST
    held_steps: int = 0

    def after_step(self, *, overflowed: bool) -> None:
        """Take in whether a gradient of the joint batch had overflowed."""
        self.held_steps += 1
        if overflowed:
            self.value, self.held_steps = max(LEAST, self.value / 2), 0
        elif self.held_steps == GROWS_AFTER_STEPS:
            self.value, self.held_steps = min(MOST, self.value * 2), 0

    def document(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)
