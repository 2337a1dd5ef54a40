"""A small model. The service traces it at its start, to find which modules a trace imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def build_model() -> torch.nn.Module:
    """One layer of each common kind."""
    from torch import nn

    convolution = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU())
    return nn.Sequential(convolution, nn.Flatten(), nn.Linear(72, 2))


def example_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of 8 x 8, and labels."""
    import torch

    return torch.rand(size, 1, 8, 8), torch.randint(0, 2, (size,))


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy."""
    from torch.nn import functional

    return functional.cross_entropy(outputs, targets)
