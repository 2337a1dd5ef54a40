"""Known families of models in plain torch, of random sizes; calibration measures one of them.

`cases(seed, count)` goes through the families in turn. With their sizes, a step takes a CPU core
some 5 to 400 ms.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainwright.estimator.trace.source import ModelDefinition
from trainwright.estimator.trace.training_step import TrainingStep, TrainingStepSpec, prepare
from zoo import attention, convolutional, patches, sequences

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")


@dataclass(frozen=True)
class Case:
    """A model with the batch and the optimizer that it is trained with."""

    family: str
    name: str
    build: Callable[[], nn.Module]
    example_batch: Callable[[int], tuple[Any, Any]]
    loss: Callable[[Any, Any], torch.Tensor]
    batch_size: int
    optimizer: str

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.family} {self.name} b{self.batch_size} {self.optimizer}"

    def spec(self) -> TrainingStepSpec:
        """The step as the tracer takes it."""
        return TrainingStepSpec(
            ModelDefinition(self.build, self.example_batch, self.loss),
            {},
            None,
            {"name": self.optimizer},
        )

    def step(self) -> TrainingStep:
        """The step, built with the same weights and data each time."""
        torch.manual_seed(0)
        return prepare(self.spec(), self.build(), self.batch_size)


LIKE_CALIBRATED = ("ConvNeXt",)
"""Families with the same operations as a network of calibration (`permuted`): not held out."""
FAMILIES = {
    **convolutional.FAMILIES,
    **attention.FAMILIES,
    **patches.FAMILIES,
    **sequences.FAMILIES,
}


def cases(seed: int, count: int) -> list[Case]:
    """`count` cases, the families in turn, the same for the same seed."""
    made = []
    order = list(FAMILIES)
    random.Random(seed).shuffle(order)
    for number in range(count):
        family = order[number % len(order)]
        draw = random.Random(f"{seed} {family} {number}")
        drawn = FAMILIES[family](draw)
        made.append(
            Case(
                family,
                drawn.name,
                drawn.build,
                drawn.example_batch,
                drawn.loss,
                draw.choice(drawn.batch_sizes) * draw.choice((1, 2, 4)),
                draw.choice(OPTIMIZERS),
            )
        )
    return made
