"""Trains a model with rounded numbers to give the trained model's outputs: distillation.

Source: G. Hinton et al., Distilling the knowledge in a neural network, 2015, arXiv:1503.02531. The
trained model is the teacher: its outputs on training rows are what is learnt, so that no loss and
no target of the user's is needed. Classes: Kullback-Leibler divergence of the distributions;
numbers: mean square, in standard deviations of the teacher's outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch  # noqa: TID253 - this runs in a separate process
from torch.nn import functional  # noqa: TID253

_BATCH = 64


@dataclass(frozen=True)
class Teacher:
    """A trained model's outputs on training rows, (rows, …)."""

    outputs: torch.Tensor
    classes: bool
    """whether the outputs are logits"""

    @property
    def spread(self) -> torch.Tensor:
        """The outputs' standard deviation."""
        return self.outputs.std().clamp(min=1e-12)

    def loss(self, outputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """How far outputs for these rows are off."""
        taught = self.outputs[rows]
        if self.classes:
            return functional.kl_div(
                outputs.log_softmax(1), taught.softmax(1), reduction="batchmean"
            )
        return functional.mse_loss(outputs / self.spread, taught / self.spread)


def learn(
    outputs: Callable[[torch.Tensor], torch.Tensor],
    parameters: Iterable[torch.nn.Parameter],
    teacher: Teacher,
    *,
    rows: int,
    epochs: int,
    rate: float,
    after_epoch: Callable[[], object] = lambda: None,
) -> None:
    """Train parameters on the first `rows` rows. `outputs`: those for some row numbers."""
    optimizer = torch.optim.Adam([one for one in parameters if one.requires_grad], rate)
    batches = -(-rows // _BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * batches)
    for _ in range(epochs):
        for batch in torch.randperm(rows).split(_BATCH):
            optimizer.zero_grad()
            teacher.loss(outputs(batch), batch).backward()
            optimizer.step()
            schedule.step()
        after_epoch()
