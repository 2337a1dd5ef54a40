"""Training steps of a generated source in one precision, in this process."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from trainwright.estimator.precision import PARAMETER_DTYPES, autocast, cast, for_loss
from trainwright.estimator.trace.batch_loss import loss_function
from trainwright.estimator.trace.source import ModelDefinition


def losses(
    made: ModelDefinition,
    model: torch.nn.Module,
    task: str,
    batch: tuple[Any, torch.Tensor],
    precision: str,
    steps: int,
    rate: float,
) -> list[float]:
    """The loss of each step on one batch; every parameter gets a gradient."""
    model = cast(model, precision)
    inputs, targets = tree_map(
        lambda one: one.to(PARAMETER_DTYPES[precision]) if one.is_floating_point() else one, batch
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    found = []
    for _ in range(steps):
        with autocast(precision):
            loss = loss_function(made, task)(for_loss(model(inputs)), targets)
        optimizer.zero_grad()
        loss.backward()
        assert all(one.grad is not None for one in model.parameters())
        optimizer.step()
        found.append(float(loss.detach()))
    return found
