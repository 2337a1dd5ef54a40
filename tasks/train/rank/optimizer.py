"""The optimizer and the learning rate at each step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from trainwright.tasks.spec.job import Optimizer

if TYPE_CHECKING:
    import torch


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], spec: Optimizer, learning_rate: float
) -> torch.optim.Optimizer:
    """Create the job's optimizer (torch.optim)."""
    import torch

    chosen = list(parameters)
    if spec.name == "sgd":
        return torch.optim.SGD(chosen, lr=learning_rate, weight_decay=spec.weight_decay)
    if spec.name == "momentum":
        return torch.optim.SGD(
            chosen, lr=learning_rate, momentum=spec.momentum, weight_decay=spec.weight_decay
        )
    if spec.name == "adam":
        return torch.optim.Adam(chosen, lr=learning_rate, weight_decay=spec.weight_decay)
    return torch.optim.AdamW(chosen, lr=learning_rate, weight_decay=spec.weight_decay)


def learning_rate_at(done: float, whole: float, base: float, schedule: str) -> float:
    """The learning rate after `done` of `whole` samples.

    Constant, or for the cosine schedule base · (1 + cos(π · done / whole)) / 2.
    """
    if schedule == "constant":
        return base
    return base * (1 + math.cos(math.pi * done / whole)) / 2
