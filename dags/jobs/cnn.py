"""A small convolutional network for small grey images."""

import torch
from torch import nn


def build_model(width: int = 64, classes: int = 10) -> nn.Module:
    """Two convolutions, pooling, two dense layers: images (N, 1, 8, 8) -> logits (N, classes)."""
    return nn.Sequential(
        nn.Conv2d(1, width, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(width * 16, 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


def example_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of 8 x 8 grey values in 0..1 and their labels."""
    return torch.rand(batch_size, 1, 8, 8), torch.randint(0, 10, (batch_size,))
