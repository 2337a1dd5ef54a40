"""When the loss has run away. Every rank has the same loss and the same parameters, and decides the same."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from trainwright.tasks.train.checkpoint.files import State

if TYPE_CHECKING:
    from torch import nn

SMOOTHING = 0.9
RAN_AWAY, FIRST_LOSSES, JUDGED_AFTER = 10.0, 10, 20
"""The smoothed loss is ten times the mean of the first ten, from the twentieth step on."""


class RanAway(Exception):  # an event, met by going back
    """The loss is no number or runs away."""


def judge(state: State, loss: float, rate: float) -> None:
    """Take in a step's loss. Raises RanAway where it is no number, or has left its beginning far behind."""
    where = f"at step {state.step} (learning rate {rate:.3g})"
    if not math.isfinite(loss):
        raise RanAway(f"the loss is {loss} {where}")
    if len(state.first_losses) < FIRST_LOSSES:
        state.first_losses.append(loss)
        state.smoothed_loss = statistics.fmean(state.first_losses)
        return
    state.smoothed_loss = SMOOTHING * state.smoothed_loss + (1 - SMOOTHING) * loss
    beginning = statistics.fmean(state.first_losses)
    if state.step >= JUDGED_AFTER and beginning > 0 and state.smoothed_loss > RAN_AWAY * beginning:
        raise RanAway(
            f"the loss runs away: {state.smoothed_loss:.3g}, {beginning:.3g} at first, {where}"
        )


def require_finite(model: nn.Module, step: int) -> None:
    """Raises RanAway where a parameter is no number: such a checkpoint would be no good one."""
    # A sum is no number where a part is none; it may also overflow, and then each number is looked at, which takes longer.
    if not all(
        bool(tensor.sum().isfinite() or tensor.isfinite().all()) for tensor in model.parameters()
    ):
        raise RanAway(f"parameters are no numbers any more after step {step - 1}")
