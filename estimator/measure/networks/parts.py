"""Shared by the networks of the benchmark family: types, inputs and blocks. Loads torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch  # noqa: TID253 - measuring runs in a separate process
from torch import nn  # noqa: TID253

CLASSES = 10
Made = tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]
"""Builds a network, and makes inputs for a number of samples."""
Drawn = Callable[[random.Random], Made]
"""Chooses a network's sizes at random."""


def images(channels: int, side: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.rand(batch, channels, side, side)


def tokens(length: int, vocabulary: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.randint(0, vocabulary, (batch, length))


def rows(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.rand(batch, *shape)


def draw_activation(draw: random.Random) -> Callable[[], nn.Module]:
    return draw.choice(
        (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.LeakyReLU, nn.Hardswish, nn.Sigmoid, nn.ELU)
    )


class Mean(nn.Module):
    """The mean over an image's height and width, or over a sequence's steps."""

    def forward(self, x: torch.Tensor) -> Any:
        return x.flatten(2).mean(2) if x.dim() == 4 else x.mean(1)


class Residual(nn.Module):
    """x + inner(x), with a projection if the shapes differ."""

    def __init__(self, inner: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.shortcut = inner, shortcut or nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        return self.shortcut(x) + self.inner(x)
