"""Detects a diverging loss.

All ranks have the same loss and the same parameters, or ask each other, so all make the same
decision.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.errors import BadInput
from trainwright.tasks.train.checkpoint.files import CheckpointState

if TYPE_CHECKING:
    from trainwright.tasks.train.rank.replica import Replica

SMOOTHING = 0.9
RAN_AWAY, FIRST_LOSSES, JUDGED_AFTER = 10.0, 10, 20
"""Diverged: the smoothed loss is ten times the mean of the first ten, from the 20th step on."""


class LossDiverged(
    Exception
):  # not a TrainwrightError: the training loop goes back to a checkpoint
    """The loss diverged or is not finite."""


def judge(state: CheckpointState, loss: float, rate: float) -> None:
    """Add a step's loss. Raises LossDiverged if it is not finite, or too high when smoothed."""
    moment = f"at step {state.step} (learning rate {rate:.3g})"
    if not math.isfinite(loss):
        raise LossDiverged(f"the loss is {loss} {moment}")
    if len(state.first_losses) < FIRST_LOSSES:
        state.first_losses.append(loss)
        state.smoothed_loss = statistics.fmean(state.first_losses)
        return
    state.smoothed_loss = SMOOTHING * state.smoothed_loss + (1 - SMOOTHING) * loss
    beginning = statistics.fmean(state.first_losses)
    if state.step >= JUDGED_AFTER and beginning > 0 and state.smoothed_loss > RAN_AWAY * beginning:
        raise LossDiverged(
            f"the loss diverged {moment}: smoothed {state.smoothed_loss:.3g}, "
            f"at the start {beginning:.3g}"
        )


def require_finite(rank: Replica, step: int) -> None:
    """Raises LossDiverged if a parameter is not finite, so that no such checkpoint is taken.

    All ranks call it at once, and raise it together: if layers are sharded, each has other rows.
    """
    # The sum is fast. It may overflow though all values are finite: only then, check each value.
    finite = all(
        bool(tensor.sum().isfinite() or tensor.isfinite().all())
        for tensor in rank.model.parameters()
    )
    if rank.is_cut:
        broken = torch.tensor([not finite], dtype=torch.float64)
        finite = not rank.collective.sum_(broken, "not finite").any()
    if not finite:
        raise LossDiverged(f"parameters are NaN or infinite after step {step - 1}")


def without_weight(samples: str) -> BadInput:
    """The error that nothing in some samples has a weight in the loss."""
    return BadInput(
        f"loss: its weight is 0 in all {samples}; allowed: at least one with a target that counts"
    )
