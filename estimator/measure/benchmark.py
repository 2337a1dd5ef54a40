"""The benchmark family: small networks generated over the range that training uses, whose steps calibration measures.

The idea of 2019 varied convolution layers, filters, dense layers and widths, image size and batch size; here come recurrent,
attention, normalisation, embedding and residual blocks, and chains of single operations. Each family is what cross-validation
leaves out as one. Heavy: torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch  # noqa: TID253 - measuring runs in a process of its own
from torch import nn  # noqa: TID253
from torch.nn import functional  # noqa: TID253

from trainwright.estimator.measure.blocks import CLASSES, FAMILIES
from trainwright.estimator.measure.single_layers import SINGLES

_BATCH_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
_OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adamw")


@dataclass(frozen=True)
class BenchmarkNetwork:
    """A network to train for some steps."""

    family: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], torch.Tensor]
    batch_size: int
    optimizer: str

    @property
    def single(self) -> bool:
        """Whether it is one layer only: it tells of operations, not of steps."""
        return self.family in SINGLES

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy, or of a single layer something whose gradient is dense."""
        return (
            outputs.square().mean() if self.single else functional.cross_entropy(outputs, targets)
        )

    def example_batch(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random inputs and labels."""
        return self.inputs(batch_size), torch.randint(0, CLASSES, (batch_size,))


def networks(seed: int, growth: Sequence[int] = (1,)) -> Iterator[BenchmarkNetwork]:
    """Networks without end, the families in turn, each of other sizes; the same for the same seed.

    Batch sizes are those of a CPU, times a number drawn from `growth`.
    """
    number = 0
    made = {**FAMILIES, **SINGLES}
    while True:
        for family in turn():
            number += 1
            draw = random.Random(f"{seed} {number}")
            build, inputs = made[family](draw)
            batch_size, optimizer = draw.choice(_BATCH_SIZES), draw.choice(_OPTIMIZERS)
            batch_size *= draw.choice(growth)
            yield BenchmarkNetwork(family, build, inputs, batch_size, optimizer)


def turn() -> list[str]:
    """The families in their order, before the first comes again.

    As many single layers as networks: three times as many took as long as all networks, of which there were the fewer, and costs
    were no better for them.
    """
    return [*sorted(FAMILIES), *sorted(SINGLES)]
