"""Convolutional models: ResNets, DenseNet, MobileNetV2, ConvNeXt, U-Net, autoencoder."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from zoo.drawn import CLASSES, Drawn, images, pictures


def normalised(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Convolution and batch normalisation."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


def head(width: int) -> list[nn.Module]:
    """Mean over the image, then the classes."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)]


class Excitation(nn.Module):
    """A gate for each channel (Hu et al., Squeeze-and-Excitation Networks, 2018)."""

    def __init__(self, width: int, shrink: int) -> None:
        super().__init__()
        self.down, self.up = (
            nn.Conv2d(width, width // shrink, 1),
            nn.Conv2d(width // shrink, width, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.up(torch.relu(self.down(x.mean((2, 3), keepdim=True)))))


class Residual(nn.Module):
    """A basic or a bottleneck block beside a shortcut (He et al., Deep Residual Learning, 2016)."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, *, bottleneck: bool, excite: int = 0
    ) -> None:
        super().__init__()
        inner = outputs // 4
        shape = (
            ((inputs, inner, 1, 1), (inner, inner, 3, stride), (inner, outputs, 1, 1))
            if bottleneck
            else ((inputs, outputs, 3, stride), (outputs, outputs, 3, 1))
        )
        layers: list[nn.Module] = []
        for one in shape:
            layers += [normalised(*one), nn.ReLU(inplace=True)]
        layers[-1] = Excitation(outputs, excite) if excite else nn.Identity()
        self.inner = nn.Sequential(*layers)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else normalised(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x) + self.shortcut(x))


def _resnet(width: int, blocks: tuple[int, ...], *, bottleneck: bool, excite: int = 0) -> nn.Module:
    layers: list[nn.Module] = [normalised(3, width, 3), nn.ReLU(inplace=True)]
    channels = width
    for stage, count in enumerate(blocks):
        for place in range(count):
            outputs = width * 2**stage * (4 if bottleneck else 1)
            stride = 2 if stage and not place else 1
            layers.append(Residual(channels, outputs, stride, bottleneck=bottleneck, excite=excite))
            channels = outputs
    return nn.Sequential(*layers, *head(channels))


def _resnets(*, bottleneck: bool, excite: bool = False) -> Callable[[random.Random], Drawn]:
    def drawn(draw: random.Random) -> Drawn:
        width, side = draw.choice((8, 12, 16, 24, 32)), draw.choice((16, 24, 32))
        blocks = draw.choice(((1, 1), (2, 2), (1, 1, 1), (2, 2, 2), (1, 2, 1)))
        gate = draw.choice((2, 4)) if excite else 0
        sizes = (4, 8, 16, 32) if width * side < 400 else (2, 4, 8)
        name = f"w{width} {'-'.join(map(str, blocks))} {side}px"
        return Drawn(
            name,
            lambda: _resnet(width, blocks, bottleneck=bottleneck, excite=gate),
            images(side),
            sizes,
        )

    return drawn


class Dense(nn.Module):
    """Each layer gets all before it (Huang et al., Densely Connected Convolutional …, 2017)."""

    def __init__(self, inputs: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(inputs + place * growth),
                nn.ReLU(),
                nn.Conv2d(inputs + place * growth, growth, 3, padding=1, bias=False),
            )
            for place in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


def _densenet(growth: int, layers: int, stages: int) -> nn.Module:
    channels = 2 * growth
    made: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
    for stage in range(stages):
        made.append(Dense(channels, growth, layers))
        channels += growth * layers
        if stage < stages - 1:
            made += [
                nn.BatchNorm2d(channels),
                nn.ReLU(),
                nn.Conv2d(channels, channels // 2, 1),
                nn.AvgPool2d(2),
            ]
            channels //= 2
    return nn.Sequential(*made, nn.BatchNorm2d(channels), nn.ReLU(), *head(channels))


def _densenets(draw: random.Random) -> Drawn:
    growth, layers, stages = (
        draw.choice((8, 12, 16, 24)),
        draw.choice((3, 4, 6)),
        draw.choice((2, 3)),
    )
    side = draw.choice((16, 32))
    return Drawn(
        f"k{growth} {layers}x{stages} {side}px",
        lambda: _densenet(growth, layers, stages),
        images(side),
        (4, 8, 16),
    )


class Inverted(nn.Module):
    """Expand, depthwise convolution, project (Sandler et al., MobileNetV2, 2018)."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = inputs * expand
        self.inner = nn.Sequential(
            normalised(inputs, wide, 1),
            nn.ReLU6(inplace=True),
            normalised(wide, wide, 3, stride, wide),
            nn.ReLU6(inplace=True),
            normalised(wide, outputs, 1),
        )
        self.same = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x) if self.same else self.inner(x)


def _mobilenets(draw: random.Random) -> Drawn:
    width, expand, side = (
        draw.choice((8, 12, 16, 24)),
        draw.choice((3, 4, 6)),
        draw.choice((24, 32, 48)),
    )
    repeats = draw.choice((1, 2))

    def build() -> nn.Module:
        layers: list[nn.Module] = [normalised(3, width, 3, 2), nn.ReLU6(inplace=True)]
        channels = width
        for factor, stride in ((1, 1), (2, 2), (3, 1), (4, 2)):
            for place in range(repeats):
                layers.append(
                    Inverted(channels, width * factor, stride if not place else 1, expand)
                )
                channels = width * factor
        return nn.Sequential(
            *layers, normalised(channels, 8 * width, 1), nn.ReLU6(inplace=True), *head(8 * width)
        )

    return Drawn(f"w{width} t{expand} r{repeats} {side}px", build, images(side), (4, 8, 16, 32))


class ConvNextBlock(nn.Module):
    """Depthwise 7x7, then a perceptron over channels (Liu et al., A ConvNet for the …, 2022)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        inner = self.scale * self.down(functional.gelu(self.up(inner)))
        return x + inner.permute(0, 3, 1, 2)


class ChannelNorm(nn.Module):
    """Layer normalisation over the channels of images."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _convnexts(draw: random.Random) -> Drawn:
    width, side, blocks = (
        draw.choice((16, 24, 32, 48)),
        draw.choice((32, 48, 64)),
        draw.choice((1, 2, 3)),
    )

    def build() -> nn.Module:
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 4), ChannelNorm(width)]
        layers += [ConvNextBlock(width) for _ in range(blocks)]
        layers += [ChannelNorm(width), nn.Conv2d(width, 2 * width, 2, 2)]
        layers += [ConvNextBlock(2 * width) for _ in range(blocks)]
        return nn.Sequential(*layers, *head(2 * width))

    return Drawn(f"w{width} {blocks}+{blocks} {side}px", build, images(side), (4, 8, 16, 32))


class UNet(nn.Module):
    """Halves and restores the image, with shortcuts (Ronneberger et al., U-Net, 2015)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        inputs = [3, *widths[:-1]]
        self.down = nn.ModuleList(self._pair(a, b) for a, b in zip(inputs, widths, strict=True))
        self.widen = nn.ModuleList(nn.ConvTranspose2d(2 * one, one, 2, 2) for one in widths[:-1])
        self.up = nn.ModuleList(self._pair(2 * one, one) for one in widths[:-1])
        self.out = nn.Conv2d(width, CLASSES, 1)

    @staticmethod
    def _pair(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            normalised(inputs, outputs, 3), nn.ReLU(), normalised(outputs, outputs, 3), nn.ReLU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for level, layer in enumerate(self.down):
            x = layer(functional.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for level in reversed(range(len(self.up))):
            x = self.up[level](torch.cat([kept[level], self.widen[level](x)], 1))
        return self.out(x)


def _unets(draw: random.Random) -> Drawn:
    width, depth, side = draw.choice((8, 12, 16)), draw.choice((2, 3)), draw.choice((32, 48, 64))
    return Drawn(
        f"w{width} d{depth} {side}px", lambda: UNet(width, depth), pictures(side), (1, 2, 4)
    )


def _autoencoders(draw: random.Random) -> Drawn:
    width, side, code = (
        draw.choice((8, 16, 32)),
        draw.choice((28, 32, 64)),
        draw.choice((16, 64, 256)),
    )

    def build() -> nn.Module:
        flat = 2 * width * (side // 4) ** 2
        return nn.Sequential(
            nn.Conv2d(1, width, 3, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(flat, code),
            nn.Tanh(),
            nn.Linear(code, flat),
            nn.Unflatten(1, (2 * width, side // 4, side // 4)),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.ConvTranspose2d(width, 1, 4, 2, 1),
            nn.Sigmoid(),
        )

    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.rand(size, 1, side, side)
        return made, made

    return Drawn(f"w{width} c{code} {side}px", build, batch, (8, 16, 32, 64), functional.mse_loss)


FAMILIES: dict[str, Callable[[random.Random], Drawn]] = {
    "ResNet": _resnets(bottleneck=False),
    "ResNet bottleneck": _resnets(bottleneck=True),
    "SE-ResNet": _resnets(bottleneck=False, excite=True),
    "DenseNet": _densenets,
    "MobileNetV2": _mobilenets,
    "ConvNeXt": _convnexts,
    "U-Net": _unets,
    "autoencoder": _autoencoders,
}
