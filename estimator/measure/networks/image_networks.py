"""Networks of the benchmark family for images and signals, with random sizes. Loads torch."""

from __future__ import annotations

import random
from typing import Any

import torch  # noqa: TID253 - measuring runs in a separate process
from torch import nn  # noqa: TID253
from torch.nn import functional  # noqa: TID253

from trainwright.estimator.measure.networks.parts import (
    CLASSES,
    Drawn,
    Made,
    Mean,
    Residual,
    draw_activation,
    images,
    rows,
)


def _convolutional(draw: random.Random) -> Made:
    layers, filters, side = (
        draw.randint(1, 4),
        draw.choice((8, 16, 32, 48, 64, 96)),
        draw.choice((8, 12, 16, 24, 32)),
    )
    channels, dense, width = (
        draw.choice((1, 3)),
        draw.randint(0, 2),
        draw.choice((32, 64, 128, 256)),
    )
    kernel, pool = draw.choice((3, 3, 3, 5)), draw.choice((nn.MaxPool2d, nn.AvgPool2d))

    def build() -> nn.Module:
        modules: list[nn.Module] = []
        before = channels
        for _ in range(layers):
            modules += [nn.Conv2d(before, filters, kernel, padding=kernel // 2), nn.ReLU()]
            before = filters
        inner = filters * (side // 2) ** 2
        modules += [pool(2), nn.Flatten()]
        for _ in range(dense):
            modules += [nn.Linear(inner, width), nn.ReLU()]
            inner = width
        return nn.Sequential(*modules, nn.Linear(inner, CLASSES))

    return build, images(channels, side)


def _residual(draw: random.Random) -> Made:
    width, side, blocks = (
        draw.choice((16, 24, 32, 64, 96, 128)),
        draw.choice((8, 16, 24, 32)),
        draw.randint(1, 4),
    )
    narrow = draw.random() < 0.5

    def block(before: int, after: int, stride: int) -> nn.Module:
        inner = after // 4 if narrow else after
        first = 1 if narrow else 3
        body = [
            nn.Conv2d(before, inner, first, padding=first // 2, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
        ]
        if narrow:
            body += [nn.Conv2d(inner, after, 1, bias=False), nn.BatchNorm2d(after)]
        shortcut = None
        if before != after or stride != 1:
            shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after)
            )
        return nn.Sequential(Residual(nn.Sequential(*body), shortcut), nn.ReLU())

    def build() -> nn.Module:
        modules: list[nn.Module] = [
            nn.Conv2d(3, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        before = width
        for number in range(blocks):
            after = before * 2 if number % 2 else before
            modules.append(block(before, after, 2 if number % 2 else 1))
            before = after
        return nn.Sequential(*modules, Mean(), nn.Linear(before, CLASSES))

    return build, images(3, side)


def _separable(draw: random.Random) -> Made:
    width, side, blocks = (
        draw.choice((16, 32, 48, 64)),
        draw.choice((16, 24, 32, 48)),
        draw.randint(1, 3),
    )
    kernel, activation, wider = (
        draw.choice((3, 3, 5, 7)),
        draw_activation(draw),
        draw.choice((2, 4, 6)),
    )

    def build() -> nn.Module:
        modules: list[nn.Module] = [
            nn.Conv2d(3, width, 3, stride=2, padding=1),
            nn.BatchNorm2d(width),
            activation(),
        ]
        for _ in range(blocks):
            inner = width * wider
            modules.append(
                Residual(
                    nn.Sequential(
                        nn.Conv2d(width, inner, 1),
                        nn.BatchNorm2d(inner),
                        activation(),
                        nn.Conv2d(inner, inner, kernel, padding=kernel // 2, groups=inner),
                        nn.BatchNorm2d(inner),
                        activation(),
                        nn.Conv2d(inner, width, 1),
                        nn.BatchNorm2d(width),
                    )
                )
            )
        return nn.Sequential(
            *modules, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)
        )

    return build, images(3, side)


class _Shaped(nn.Module):
    """Halves the image, restores its size, and joins it with the original (U-Net)."""

    def __init__(self, width: int, normalise: str, up: str) -> None:
        super().__init__()

        def double(before: int, after: int) -> nn.Module:
            norm = {
                "batch": nn.BatchNorm2d(after),
                "group": nn.GroupNorm(4, after),
                "none": nn.Identity(),
            }[normalise]
            return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), norm, nn.ReLU())

        self.one, self.two, self.three = (
            double(3, width),
            double(width, 2 * width),
            double(3 * width, width),
        )
        scale = nn.Upsample(scale_factor=2, mode="bilinear" if up == "smooth" else "nearest")
        self.up = (
            nn.ConvTranspose2d(2 * width, 2 * width, 2, stride=2) if up == "learned" else scale
        )
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> Any:
        one = self.one(x)
        return self.head(
            self.three(torch.cat([one, self.up(self.two(functional.max_pool2d(one, 2)))], 1))
        ).mean((2, 3))


def _shaped(draw: random.Random) -> Made:
    width, side = draw.choice((8, 16, 32, 48)), draw.choice((16, 24, 32, 48))
    normalise, up = (
        draw.choice(("batch", "group", "none")),
        draw.choice(("learned", "smooth", "nearest")),
    )
    return lambda: _Shaped(width, normalise, up), images(3, side)


def _temporal(draw: random.Random) -> Made:
    width, length, layers = (
        draw.choice((16, 32, 64)),
        draw.choice((32, 64, 128, 256)),
        draw.randint(1, 4),
    )
    channels, kernel, activation = (
        draw.choice((1, 4, 16)),
        draw.choice((3, 5, 7)),
        draw_activation(draw),
    )

    def build() -> nn.Module:
        modules: list[nn.Module] = []
        before = channels
        for number in range(layers):
            dilation = 2**number
            modules += [
                nn.Conv1d(
                    before, width, kernel, padding=dilation * (kernel // 2), dilation=dilation
                ),
                activation(),
            ]
            before = width
        return nn.Sequential(
            *modules, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, CLASSES)
        )

    return build, rows(channels, length)


class _Permuted(nn.Module):
    """Normalisation and dense layers over an image's channels, permuted to the last dimension.

    They work on windows of the image or on the whole image. With `last`, images keep this layout
    between the blocks, as after a normalisation over channels.
    """

    def __init__(
        self, width: int, patch: int, kernel: int, blocks: int, window: int, last: bool
    ) -> None:
        super().__init__()
        self.stem, self.norm = (
            nn.Conv2d(3, width, patch, stride=patch),
            nn.LayerNorm(width) if last else None,
        )
        self.window = window
        self.depth = nn.ModuleList(
            nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width)
            for _ in range(blocks)
        )
        self.wide = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 3 * width),
                nn.GELU(),
                nn.Linear(3 * width, width),
            )
            for _ in range(blocks)
        )
        self.scale = nn.Parameter(torch.full((width,), 0.1))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.stem(x)
        if self.norm is not None:
            x = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        for depth, wide in zip(self.depth, self.wide, strict=True):
            y = depth(x).permute(0, 2, 3, 1)
            batch, high, across, width = y.shape
            if self.window and high % self.window == 0:
                y = y.view(
                    batch,
                    high // self.window,
                    self.window,
                    across // self.window,
                    self.window,
                    width,
                )
                y = wide(y.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window**2, width))
                y = y.view(
                    batch,
                    high // self.window,
                    across // self.window,
                    self.window,
                    self.window,
                    width,
                )
                y = y.permute(0, 1, 3, 2, 4, 5).reshape(batch, high, across, width)
            else:
                y = wide(y)
            x = x + (self.scale * y).permute(0, 3, 1, 2)
        return self.head(x.mean((2, 3)))


def _permuted(draw: random.Random) -> Made:
    width, side, patch = (
        draw.choice((24, 32, 48, 64, 96)),
        draw.choice((16, 32, 48, 64)),
        draw.choice((2, 4)),
    )
    blocks, window = draw.randint(1, 3), draw.choice((0, 2, 4))
    kernel, last = draw.choice((3, 5, 7)), draw.random() < 0.5
    return lambda: _Permuted(width, patch, kernel, blocks, window, last), images(3, side)


IMAGE_FAMILIES: dict[str, Drawn] = {
    "convolutional": _convolutional,
    "residual": _residual,
    "separable": _separable,
    "shaped": _shaped,
    "temporal": _temporal,
    "permuted": _permuted,
}
