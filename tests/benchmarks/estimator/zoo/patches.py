"""Models of images cut into patches: ViT, Swin, SegFormer, MLP-Mixer."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from zoo.attention import Block, Perceptron, SelfAttention
from zoo.drawn import CLASSES, Drawn, images, pictures


class Patches(nn.Module):
    """Squares of the image as tokens, with learned positions."""

    def __init__(self, side: int, patch: int, width: int, *, places: bool = True) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.zeros(1, (side // patch) ** 2, width)) if places else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.cut(x).flatten(2).transpose(1, 2)
        return x if self.places is None else x + self.places


class MeanHead(nn.Module):
    """Normalise, mean over the places, classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x).mean(1))


def _vits(draw: random.Random) -> Drawn:
    heads, each, layers = draw.choice((2, 3, 4)), draw.choice((16, 32)), draw.choice((2, 4))
    side, patch = draw.choice(((32, 4), (32, 8), (48, 8), (64, 8)))
    width = heads * each

    def build() -> nn.Module:
        blocks = [Block(width, SelfAttention(width, heads)) for _ in range(layers)]
        return nn.Sequential(Patches(side, patch, width), *blocks, MeanHead(width))

    return Drawn(
        f"d{width} h{heads} l{layers} {side}px/{patch}", build, images(side), (2, 4, 8, 16)
    )


class Windows(nn.Module):
    """Attention in windows, every second time shifted (Liu et al., Swin Transformer, 2021)."""

    def __init__(self, width: int, heads: int, side: int, window: int, shift: int) -> None:
        super().__init__()
        self.heads, self.side, self.window, self.shift = heads, side, window, shift
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(heads, window**2, window**2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        side, window, count = self.side, self.window, self.side // self.window
        x = x.view(batch, side, side, width)
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = (
            x.view(batch, count, window, count, window, width)
            .transpose(2, 3)
            .reshape(-1, window**2, width)
        )
        query, key, value = (
            self.inputs(x)
            .view(len(x), window**2, 3, self.heads, -1)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        scores = query * (width / self.heads) ** -0.5 @ key.transpose(-2, -1) + self.bias
        x = self.outputs(
            (scores.softmax(-1) @ value).transpose(1, 2).reshape(len(x), window**2, width)
        )
        x = (
            x.view(batch, count, count, window, window, width)
            .transpose(2, 3)
            .reshape(batch, side, side, width)
        )
        if self.shift:
            x = torch.roll(x, (self.shift, self.shift), (1, 2))
        return x.view(batch, length, width)


class Merge(nn.Module):
    """Four neighbours become one place of twice the width."""

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.side, self.norm, self.out = (
            side,
            nn.LayerNorm(4 * width),
            nn.Linear(4 * width, 2 * width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, _, width = x.shape
        x = x.view(batch, self.side, self.side, width)
        x = torch.cat([x[:, a::2, b::2] for a in (0, 1) for b in (0, 1)], -1)
        return self.out(self.norm(x.view(batch, -1, 4 * width)))


def _swins(draw: random.Random) -> Drawn:
    heads, each, pairs = draw.choice((2, 3)), draw.choice((16, 24)), draw.choice((1, 2))
    side, window = draw.choice(((32, 4), (64, 4), (64, 8)))
    width, grid = heads * each, side // 4

    def build() -> nn.Module:
        layers: list[nn.Module] = [Patches(side, 4, width, places=False), nn.LayerNorm(width)]
        for stage in range(2):
            now, places = width * 2**stage, grid // 2**stage
            size = min(window, places)
            for number in range(2 * pairs):
                shift = size // 2 if number % 2 and size < places else 0
                layers.append(Block(now, Windows(now, heads * 2**stage, places, size, shift)))
            if not stage:
                layers.append(Merge(now, places))
        return nn.Sequential(*layers, MeanHead(2 * width))

    return Drawn(
        f"d{width} h{heads} {pairs}+{pairs} {side}px/{window}", build, images(side), (2, 4, 8)
    )


class Reduced(nn.Module):
    """Attention with keys and values from a smaller image (Xie et al., SegFormer, 2021)."""

    def __init__(self, width: int, heads: int, side: int, ratio: int) -> None:
        super().__init__()
        self.heads, self.side, self.ratio = heads, side, ratio
        self.query, self.both, self.out = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )
        self.shrink, self.norm = nn.Conv2d(width, width, ratio, ratio), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        small = (
            self.shrink(x.transpose(1, 2).reshape(batch, width, self.side, self.side))
            .flatten(2)
            .transpose(1, 2)
        )
        query = self.query(x).view(batch, length, self.heads, -1).transpose(1, 2)
        key, value = (
            self.both(self.norm(small))
            .view(batch, -1, 2, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class SegFormer(nn.Module):
    """Stages of reduced attention; all brought to one size and classified for each pixel."""

    def __init__(self, width: int, heads: int, side: int, layers: int) -> None:
        super().__init__()
        self.stages, self.cuts, self.mix = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        inputs, self.sides = 3, [side // 4, side // 8]
        for stage, place in enumerate(self.sides):
            now = width * 2**stage
            self.cuts.append(
                nn.Conv2d(
                    inputs, now, 7 if not stage else 3, 4 if not stage else 2, 3 if not stage else 1
                )
            )
            ratio = 4 // 2**stage
            self.stages.append(
                nn.Sequential(
                    *(Block(now, Reduced(now, heads, place, ratio)) for _ in range(layers))
                )
            )
            self.mix.append(nn.Conv2d(now, width, 1))
            inputs = now
        self.out = nn.Sequential(
            nn.Conv2d(2 * width, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, CLASSES, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole, seen = x.shape[-2:], []
        for cut, stage, mix, side in zip(self.cuts, self.stages, self.mix, self.sides, strict=True):
            x = cut(x)
            batch, width = x.shape[:2]
            x = (
                stage(x.flatten(2).transpose(1, 2))
                .transpose(1, 2)
                .reshape(batch, width, side, side)
            )
            seen.append(
                functional.interpolate(
                    mix(x), (self.sides[0],) * 2, mode="bilinear", align_corners=False
                )
            )
        return functional.interpolate(
            self.out(torch.cat(seen, 1)), whole, mode="bilinear", align_corners=False
        )


def _segformers(draw: random.Random) -> Drawn:
    width, heads, layers, side = (
        draw.choice((16, 32, 48)),
        draw.choice((1, 2)),
        draw.choice((1, 2)),
        draw.choice((32, 64, 96)),
    )
    return Drawn(
        f"d{width} h{heads} l{layers} {side}px",
        lambda: SegFormer(width, heads, side, layers),
        pictures(side),
        (1, 2, 4, 8),
    )


class Mixer(nn.Module):
    """Perceptrons over places and over channels in turn (Tolstikhin et al., MLP-Mixer, 2021)."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places, self.channels = Perceptron(places, 2), Perceptron(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.places(self.one(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.two(x))


def _mixers(draw: random.Random) -> Drawn:
    width, layers = draw.choice((32, 64, 128)), draw.choice((2, 4, 6))
    side, patch = draw.choice(((32, 4), (32, 8), (64, 8)))

    def build() -> nn.Module:
        blocks = [Mixer((side // patch) ** 2, width) for _ in range(layers)]
        return nn.Sequential(Patches(side, patch, width, places=False), *blocks, MeanHead(width))

    return Drawn(f"d{width} l{layers} {side}px/{patch}", build, images(side), (4, 8, 16, 32))


FAMILIES: dict[str, Callable[[random.Random], Drawn]] = {
    "ViT": _vits,
    "Swin": _swins,
    "SegFormer": _segformers,
    "MLP-Mixer": _mixers,
}
