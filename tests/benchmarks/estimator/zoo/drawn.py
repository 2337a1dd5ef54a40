"""A random model of a family: its sizes, its batches and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

CLASSES = 10


@dataclass(frozen=True)
class Drawn:
    """A model of some size, and batch sizes; four times the largest takes well below a second."""

    name: str
    build: Callable[[], nn.Module]
    example_batch: Callable[[int], tuple[Any, Any]]
    batch_sizes: tuple[int, ...]
    loss: Callable[[Any, Any], torch.Tensor] = functional.cross_entropy


def images(side: int, channels: int = 3) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Images with a class each."""
    return lambda size: (torch.rand(size, channels, side, side), torch.randint(0, CLASSES, (size,)))


def pictures(side: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Images with a class for each pixel."""
    return lambda size: (
        torch.rand(size, 3, side, side),
        torch.randint(0, CLASSES, (size, side, side)),
    )


def words(
    length: int, vocabulary: int, classes: int
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Token sequences with a class each."""
    return lambda size: (
        torch.randint(0, vocabulary, (size, length)),
        torch.randint(0, classes, (size,)),
    )


def next_words(length: int, vocabulary: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Token sequences with the next token at each place."""
    return lambda size: (
        torch.randint(0, vocabulary, (size, length)),
        torch.randint(0, vocabulary, (size, length)),
    )


def each_token(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over all places of all sequences: outputs (B, L, V), targets (B, L)."""
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
