"""The loss scale: a factor on the loss that keeps fp16 gradients from underflowing. Pure.

The rule is that of torch.amp.GradScaler. If a gradient overflows, the step is skipped and the scale
halved; after GROWS_AFTER_STEPS steps without overflow it doubles. All ranks use the same scale,
also those that compute in bf16, because batch normalisation sums gradients over ranks within the
backward pass. Before the optimizer step, ranks share whether any of them overflowed, so all skip
the same step. The scale is a power of two, so that scaling is exact.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

FIRST, LEAST, MOST = 2.0**16, 1.0, 2.0**24
GROWS_AFTER_STEPS = 2000


@dataclass
class LossScale:
    """The scale, and the number of steps since it changed."""

    value: float = FIRST
    held_steps: int = 0

    def after_step(self, *, overflowed: bool) -> None:
        """Adapt the scale after a step; `overflowed`: whether any rank's gradient overflowed."""
        self.held_steps += 1
        if overflowed:
            self.value, self.held_steps = max(LEAST, self.value / 2), 0
        elif self.held_steps == GROWS_AFTER_STEPS:
            self.value, self.held_steps = min(MOST, self.value * 2), 0

    def document(self) -> dict[str, Any]:
        """JSON for a checkpoint."""
        return asdict(self)
