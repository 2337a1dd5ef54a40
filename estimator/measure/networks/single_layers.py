"""Single layers, with random sizes that cover the range of training. Loads torch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch  # noqa: TID253 - measuring runs in a separate process
from torch import nn  # noqa: TID253

from trainwright.estimator.measure.networks.parts import Drawn, Made, images, rows
from trainwright.estimator.measure.networks.sequence_networks import Attention


class _Single(nn.Module):
    """One layer whose inputs need gradients too."""

    def __init__(self, layer: Callable[[torch.Tensor], torch.Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.layer, self.parts, self.scale = (
            layer,
            nn.ModuleList(parts),
            nn.Parameter(torch.ones(())),
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x * self.scale)


def _power(draw: random.Random, low: float, high: float) -> int:
    """A size whose logarithm is uniform, often a multiple of 8."""
    size = 2 ** draw.uniform(math.log2(low), math.log2(high))
    return max(
        1,
        round(size)
        if draw.random() < 0.3
        else 8 * max(1, round(size / 8))
        if size >= 8
        else round(size),
    )


def _rows_first(images: torch.Tensor) -> torch.Tensor:
    """The same image with adjacent channels in memory, as after layers that work on channels."""
    return images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def _laid_out(layer: nn.Module, draw: random.Random, last: float = 0.25) -> nn.Module:
    return (
        _Single(layer)
        if draw.random() > last
        else _Single(lambda x: _rows_first(layer(_rows_first(x))), layer)
    )


def _one_convolution(draw: random.Random) -> Made:
    channels, filters, side = _power(draw, 1, 256), _power(draw, 8, 256), _power(draw, 4, 64)
    kernel, stride = draw.choice((1, 1, 3, 3, 3, 5, 7)), draw.choice((1, 1, 1, 2))
    layer = partial(
        nn.Conv2d,
        channels,
        filters,
        kernel,
        stride=stride,
        padding=kernel // 2,
        bias=draw.random() < 0.5,
    )
    return lambda: _laid_out(layer(), random.Random(channels)), images(channels, side)


def _one_transposed(draw: random.Random) -> Made:
    channels, filters, side = _power(draw, 4, 128), _power(draw, 1, 128), _power(draw, 4, 32)
    kernel, stride, padding = draw.choice(((2, 2, 0), (3, 1, 1), (3, 2, 1), (4, 2, 1)))
    return (
        lambda: _Single(
            nn.ConvTranspose2d(channels, filters, kernel, stride=stride, padding=padding)
        ),
        images(channels, side),
    )


def _one_depthwise(draw: random.Random) -> Made:
    channels, side, kernel, stride = (
        _power(draw, 8, 512),
        _power(draw, 4, 64),
        draw.choice((3, 3, 5, 7)),
        draw.choice((1, 1, 2)),
    )
    layer = partial(
        nn.Conv2d, channels, channels, kernel, stride=stride, padding=kernel // 2, groups=channels
    )
    return lambda: _laid_out(layer(), random.Random(channels), last=0.4), images(channels, side)


def _one_convolution_1d(draw: random.Random) -> Made:
    channels, filters, length = _power(draw, 1, 128), _power(draw, 8, 128), _power(draw, 16, 512)
    kernel, dilation = draw.choice((1, 3, 5, 7)), draw.choice((1, 1, 2, 4))
    return (
        lambda: _Single(
            nn.Conv1d(
                channels, filters, kernel, padding=dilation * (kernel // 2), dilation=dilation
            )
        ),
        rows(channels, length),
    )


def _one_product(draw: random.Random) -> Made:
    inputs, outputs, length = (
        _power(draw, 8, 2048),
        _power(draw, 8, 2048),
        draw.choice((1, 1, 8, 32, 128)),
    )
    biased = draw.random() < 0.7
    return lambda: _Single(nn.Linear(inputs, outputs, bias=biased)), rows(length, inputs)


def _one_attention(draw: random.Random) -> Made:
    heads, each, length = (
        draw.choice((1, 2, 4, 8, 12)),
        draw.choice((8, 16, 32, 64)),
        draw.choice((8, 16, 32, 64, 128, 196)),
    )
    way, causal = draw.choice(("fused", "by hand")), draw.random() < 0.3
    return lambda: _Single(Attention(heads * each, heads, way, causal)), rows(length, heads * each)


class _Steps(nn.Module):
    """A recurrent layer's outputs only."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)[0]


def _one_recurrent(draw: random.Random) -> Made:
    inputs, hidden, length = _power(draw, 8, 256), _power(draw, 16, 384), _power(draw, 4, 64)
    return lambda: _Single(_Steps(nn.LSTM(inputs, hidden, batch_first=True))), rows(length, inputs)


def _one_normalisation(draw: random.Random) -> Made:
    channels, side = _power(draw, 8, 256), _power(draw, 2, 64)
    made = draw.choice((nn.BatchNorm2d, lambda size: nn.GroupNorm(4, size), nn.InstanceNorm2d))
    return lambda: _Single(made(4 * math.ceil(channels / 4))), images(
        4 * math.ceil(channels / 4), side
    )


def _one_of_rows(draw: random.Random) -> Made:
    width, length = _power(draw, 8, 1024), _power(draw, 4, 256)
    layer = draw.choice((nn.LayerNorm(width), nn.Softmax(-1), nn.LogSoftmax(-1), nn.Softmax(1)))
    return lambda: _Single(layer), rows(length, width)


def _one_pool(draw: random.Random) -> Made:
    channels, side = _power(draw, 4, 128), 2 * _power(draw, 4, 32)
    layer = draw.choice(
        (
            nn.MaxPool2d(2),
            nn.AvgPool2d(2),
            nn.MaxPool2d(3, 2, 1),
            nn.AdaptiveAvgPool2d(1),
            nn.Upsample(scale_factor=2),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.ConvTranspose2d(channels, max(1, channels // 2), 2, stride=2),
        )
    )
    return lambda: _Single(layer), images(channels, side)


class _Looked(nn.Module):
    """Looks up rows of a table: one for each number, or the sum of a bag."""

    def __init__(self, rows: int, width: int, bag: bool) -> None:
        super().__init__()
        self.rows = rows
        self.table = nn.EmbeddingBag(rows, width, mode="sum") if bag else nn.Embedding(rows, width)

    def forward(self, x: torch.Tensor) -> Any:
        return self.table((x * self.rows).long().clamp(max=self.rows - 1))


def _one_table(draw: random.Random) -> Made:
    count, width, length = (
        _power(draw, 16, 30_000),
        _power(draw, 4, 256),
        draw.choice((1, 4, 16, 64, 128)),
    )
    bag = draw.random() < 0.3
    return lambda: _Looked(count, width, bag), rows(length)


def _one_activation(draw: random.Random) -> Made:
    shape = (_power(draw, 4, 256), _power(draw, 2, 48) ** 2)
    layer = draw.choice(
        (
            nn.ReLU(inplace=True),
            nn.ReLU(),
            nn.GELU(),
            nn.SiLU(),
            nn.Hardswish(),
            nn.ReLU6(),
            nn.Sigmoid(),
            nn.Tanh(),
            nn.LeakyReLU(0.1),
            nn.Dropout(0.1),
            lambda x: x + 0.5 * x,
            lambda x: x * x.mean((2,), keepdim=True),
            lambda x: torch.cat([x, x * 2], 1),
            lambda x: x.transpose(1, 2).contiguous(),
        )
    )
    return lambda: _Single(layer), rows(*shape)


SINGLES: dict[str, Drawn] = {
    "one convolution": _one_convolution,
    "one depthwise": _one_depthwise,
    "one convolution 1d": _one_convolution_1d,
    "one product": _one_product,
    "one attention": _one_attention,
    "one recurrent": _one_recurrent,
    "one normalisation": _one_normalisation,
    "one of rows": _one_of_rows,
    "one pool": _one_pool,
    "one transposed": _one_transposed,
    "one table": _one_table,
    "one activation": _one_activation,
}
