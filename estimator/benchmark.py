"""What calibration measures: single operations over a range of shapes, and whole training steps of small generated networks.

The networks vary convolution layers, filters, dense layers and widths, image size and batch size (the 2019 family). Heavy: torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch  # noqa: TID253 - measuring runs in a process of its own
from torch import nn  # noqa: TID253


@dataclass(frozen=True)
class OpCase:
    """An operation to time, with what it computes and moves."""

    family: str
    flops: float
    bytes: float
    run: Callable[[], Any]


@dataclass(frozen=True)
class NetworkCase:
    """A network to train for some steps. Its family is what cross-validation leaves out."""

    family: str
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    classes: int
    batch_size: int


def _size(*tensors: torch.Tensor) -> float:
    return float(sum(one.numel() * one.element_size() for one in tensors))


def op_cases(seed: int) -> list[OpCase]:
    """Operations of every family that `structure.family_of` names, small to large."""
    draw = random.Random(seed)
    cases: list[OpCase] = []
    for channels, filters, side in (
        (1, 16, 8),
        (1, 64, 8),
        (16, 32, 16),
        (32, 32, 8),
        (64, 64, 8),
        (64, 64, 16),
        (3, 32, 32),
    ):
        for batch in draw.sample((8, 24, 48, 96, 160), 3):
            inputs, weight = torch.rand(batch, channels, side, side), torch.rand(filters, channels, 3, 3)
            out = torch.nn.functional.conv2d(inputs, weight, padding=1)
            flops = 2.0 * out.numel() * channels * 9
            cases.append(OpCase("conv", flops, _size(inputs, weight, out), _conv(inputs, weight)))
            moved = 2 * _size(inputs, weight) + _size(out)
            cases.append(OpCase("conv_backward", 2 * flops, moved, _conv_backward(inputs, weight, out)))
    for rows, inner, columns in (
        (8, 64, 64),
        (32, 256, 128),
        (64, 1024, 128),
        (128, 512, 512),
        (256, 1024, 256),
        (512, 512, 512),
    ):
        left, right = torch.rand(rows, inner), torch.rand(inner, columns)
        moved = _size(left, right) + 4.0 * rows * columns
        cases.append(OpCase("matmul", 2.0 * rows * inner * columns, moved, _mm(left, right)))
    for count in (16, 256, 4_096, 40_000, 200_000, 800_000, 3_000_000):
        one, two = torch.rand(count), torch.rand(count)
        cases.append(OpCase("elementwise", 0.0, 3 * _size(one), partial(torch.add, one, two)))
        cases.append(
            OpCase("elementwise", 0.0, 3 * _size(one), partial(torch.Tensor.addcmul_, one, two, two, value=1e-6))
        )
        cases.append(OpCase("elementwise", 0.0, 2 * _size(one), partial(torch.relu, one)))
    for rows, columns in ((32, 10), (128, 100), (512, 512), (2048, 256)):
        inputs = torch.rand(rows, columns)
        cases.append(OpCase("norm", 0.0, 2 * _size(inputs), partial(torch.log_softmax, inputs, 1)))
        cases.append(OpCase("norm", 0.0, 2 * _size(inputs), partial(nn.functional.layer_norm, inputs, [columns])))
    for batch, channels, side in ((16, 16, 8), (64, 64, 8), (96, 32, 16), (32, 64, 16)):
        images = torch.rand(batch, channels, side, side)
        cases.append(OpCase("pool", 0.0, 1.75 * _size(images), partial(nn.functional.max_pool2d, images, 2)))
    base = torch.rand(64, 64)
    cases += [OpCase("view", 0.0, 0.0, lambda: base.t()), OpCase("view", 0.0, 0.0, lambda: base.view(-1))]
    return cases


def _conv(inputs: torch.Tensor, weight: torch.Tensor) -> Callable[[], Any]:
    return lambda: torch.nn.functional.conv2d(inputs, weight, padding=1)


def _conv_backward(inputs: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Callable[[], Any]:
    gradient = torch.rand_like(out)
    arguments = (gradient, inputs, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    return lambda: torch.ops.aten.convolution_backward(*arguments)


def _mm(left: torch.Tensor, right: torch.Tensor) -> Callable[[], Any]:
    return lambda: left @ right


def convolutional(layers: int, filters: int, dense: int, width: int, side: int, *, normalise: bool) -> nn.Module:
    """A network of the benchmark family: `layers` convolutions, one pooling, `dense` dense layers, 10 classes."""
    modules: list[nn.Module] = []
    channels = 1
    for _ in range(layers):
        modules.append(nn.Conv2d(channels, filters, 3, padding=1))
        if normalise:
            modules.append(nn.BatchNorm2d(filters))
        modules.append(nn.ReLU())
        channels = filters
    modules += [nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*modules, *_dense(channels * (side // 2) ** 2, dense, width))


def perceptron(inputs: int, dense: int, width: int) -> nn.Module:
    """Dense layers only."""
    return nn.Sequential(nn.Flatten(), *_dense(inputs, dense, width))


def _dense(inputs: int, layers: int, width: int) -> list[nn.Module]:
    modules: list[nn.Module] = []
    for _ in range(layers):
        modules += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return [*modules, nn.Linear(inputs, 10)]


def network_cases(seed: int) -> list[NetworkCase]:
    """Networks drawn over the range that training on such devices uses."""
    draw = random.Random(seed)
    cases = []
    for layers, filters, side in ((1, 16, 8), (2, 32, 8), (2, 64, 8), (3, 32, 16), (2, 16, 28), (3, 64, 8)):
        for normalise in (False, True):
            dense, width = draw.choice((0, 1, 2)), draw.choice((64, 128, 256))
            family = f"conv{layers}x{filters}@{side}"
            for batch in draw.sample((16, 32, 64, 128, 256), 2):
                build = partial(convolutional, layers, filters, dense, width, side, normalise=normalise)
                cases.append(NetworkCase(family, build, (1, side, side), 10, batch))
    for dense, width, inputs in ((1, 128, 64), (3, 256, 64), (2, 512, 256)):
        for batch in draw.sample((16, 64, 256), 2):
            cases.append(
                NetworkCase(
                    f"dense{dense}x{width}",
                    partial(perceptron, inputs, dense, width),
                    (inputs,),
                    10,
                    batch,
                )
            )
    draw.shuffle(cases)
    return cases
