"""The benchmark family: generated small networks whose steps calibration measures. Loads torch.

Their sizes cover the range that training uses. The idea of 2019 varied convolution layers, filters,
dense layers and widths, image size and batch size; this family adds recurrent, attention,
normalisation, embedding and residual blocks, and chains of single operations. Cross-validation
leaves out one family of networks at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch  # noqa: TID253 - measuring runs in a separate process
from torch import nn  # noqa: TID253
from torch.nn import functional  # noqa: TID253

from trainwright.estimator.measure.networks.image_networks import IMAGE_FAMILIES
from trainwright.estimator.measure.networks.parts import CLASSES, Drawn
from trainwright.estimator.measure.networks.sequence_networks import SEQUENCE_FAMILIES
from trainwright.estimator.measure.networks.single_layers import SINGLES

FAMILIES: dict[str, Drawn] = {**IMAGE_FAMILIES, **SEQUENCE_FAMILIES}
_BATCH_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
_OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adamw")


@dataclass(frozen=True)
class BenchmarkNetwork:
    """A network to train for some steps, with its batch and optimizer."""

    family: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], torch.Tensor]
    batch_size: int
    optimizer: str

    @property
    def single(self) -> bool:
        """Whether it is a single layer, used for the costs of operations, not of steps."""
        return self.family in SINGLES

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy; for a single layer, a loss whose gradient is dense."""
        return (
            outputs.square().mean() if self.single else functional.cross_entropy(outputs, targets)
        )

    def example_batch(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random inputs and labels."""
        return self.inputs(batch_size), torch.randint(0, CLASSES, (batch_size,))


def networks(seed: int, growth: Sequence[int] = (1,)) -> Iterator[BenchmarkNetwork]:
    """An endless sequence of networks: the families in turn, each time with other sizes.

    The same seed gives the same sequence. Batch sizes are those for a CPU, times a random number
    from `growth`.
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
    """The families in the order of one turn.

    There are as many single layers as networks. Three times as many took as long as all networks,
    left less time for those, and did not improve the costs.
    """
    return [*sorted(FAMILIES), *sorted(SINGLES)]
