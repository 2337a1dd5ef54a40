"""The optimizer and the learning rate at each step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from trainwright.tasks.spec.train_spec import Optimizer

if TYPE_CHECKING:
    import torch


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], spec: Optimizer, learning_rate: float
) -> torch.optim.Optimizer:
    """Create the job's optimizer (torch.optim)."""
    import torch

    from trainwright.estimator.trace.training_step import decay_groups, uncompiled

    chosen = decay_groups(list(parameters), spec.decay_exclude)
    if spec.name in ("sgd", "momentum"):
        momentum = spec.momentum if spec.name == "momentum" else 0.0
        sgd = uncompiled(torch.optim.SGD)
        return sgd(chosen, lr=learning_rate, momentum=momentum, weight_decay=spec.weight_decay)
    kind = uncompiled(torch.optim.Adam if spec.name == "adam" else torch.optim.AdamW)
    return kind(chosen, lr=learning_rate, betas=spec.betas, weight_decay=spec.weight_decay)


_FIRST_SHARE = 0.1
"""The first rate of a warm-up, as a share of the rate after it."""


def learning_rate_at(
    done: float, whole: float, base: float, schedule: str, warm_up: float = 0.0
) -> float:
    """The learning rate after `done` of `whole` samples.

    Constant, or (1 + cos(π · x)) / 2 of the base with x = done / whole; for `flat-cosine`,
    x = max(0, 2 · done / whole − 1) (D. Holzmüller et al., "Better by default", 2024). During the
    share `warm_up` of the samples, the rate rises in proportion from a tenth.
    """
    share = done / whole
    if share < warm_up:
        base *= _FIRST_SHARE + (1 - _FIRST_SHARE) * share / warm_up
    if schedule == "constant":
        return base
    if schedule == "flat-cosine":
        return base * (1 + math.cos(math.pi * max(0.0, 2 * share - 1))) / 2
    # Not of `share`: its rounding changes last digits, and replays must repeat earlier rates.
    return base * (1 + math.cos(math.pi * done / whole)) / 2
