"""The noise scale on a single rank: from the two halves of its batch, every few steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.train.batch.noise_scale import LEAST_ESTIMATES

EVERY_STEPS = 16
"""The two halves cost one more forward and backward pass: 1/16 of the training time."""
FIRST_EVERY_STEPS = 4
"""Until there are LEAST_ESTIMATES, measure more often: 1/4 of the training time."""


def due(step: int, estimates: int) -> bool:
    """Whether a single rank measures at this step."""
    return step % (FIRST_EVERY_STEPS if estimates < LEAST_ESTIMATES else EVERY_STEPS) == 0


def half_squares(
    model: torch.nn.Module,
    loss_of: Callable[[Any], tuple[torch.Tensor, float]],
    rows: Sequence[int] | Any,
    count: int | None = None,
) -> tuple[list[float], list[float], float]:
    """The batch sizes and |g|² of both halves of these rows, and |g|² of the whole.

    Leaves parameters, buffers and gradients unchanged. `loss_of` returns the mean loss over some
    rows and its weight: sizes are in proportion to that. `count` is the number of rows of the first
    half, by default half of the rows.
    """
    parameters = [one for one in model.parameters() if one.requires_grad]
    buffers = [(one, one.detach().clone()) for one in model.buffers()]
    middle = len(rows) // 2 if count is None else count
    parts = [rows[:middle], rows[middle:]]
    weights: list[float] = []

    def gradient(part: Any) -> Sequence[torch.Tensor]:
        loss, weight = loss_of(part)
        weights.append(weight)
        return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)

    try:
        first, second = (gradient(part) for part in parts)
    finally:
        with torch.no_grad():
            for buffer, kept in buffers:
                buffer.copy_(kept)
    a, b = (len(rows) * one / (sum(weights) or 1.0) for one in weights)
    squares = [_inner(first, first), _inner(second, second)]
    # |g|² of g = (a·g₁ + b·g₂) / (a + b), without another pass.
    joint = (a * a * squares[0] + 2 * a * b * _inner(first, second) + b * b * squares[1]) / len(
        rows
    ) ** 2
    return [a, b], squares, joint


def _inner(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    return sum(
        float(torch.dot(one.to_dense().reshape(-1).double(), other.to_dense().reshape(-1).double()))
        for one, other in zip(left, right, strict=True)
    )
