"""The networks of the benchmark family: for each, a draw of sizes gives a module and its inputs. Heavy: torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch  # noqa: TID253 - measuring runs in a process of its own
from torch import nn  # noqa: TID253
from torch.nn import functional  # noqa: TID253

CLASSES = 10


def images(channels: int, side: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.rand(batch, channels, side, side)


def _tokens(length: int, vocabulary: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.randint(0, vocabulary, (batch, length))


def rows(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.rand(batch, *shape)


def _activation(draw: random.Random) -> Callable[[], nn.Module]:
    return draw.choice(
        (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.LeakyReLU, nn.Hardswish, nn.Sigmoid, nn.ELU)
    )


class _Mean(nn.Module):
    """The mean over all but the first two sides of an image, or over the steps of a sequence."""

    def forward(self, x: torch.Tensor) -> Any:
        return x.flatten(2).mean(2) if x.dim() == 4 else x.mean(1)


class _Sum(nn.Module):
    """x + inner(x), with a projection where the shapes differ."""

    def __init__(self, inner: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.shortcut = inner, shortcut or nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        return self.shortcut(x) + self.inner(x)


Made = tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]


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
        return nn.Sequential(_Sum(nn.Sequential(*body), shortcut), nn.ReLU())

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
        return nn.Sequential(*modules, _Mean(), nn.Linear(before, CLASSES))

    return build, images(3, side)


def _separable(draw: random.Random) -> Made:
    width, side, blocks = (
        draw.choice((16, 32, 48, 64)),
        draw.choice((16, 24, 32, 48)),
        draw.randint(1, 3),
    )
    kernel, activation, wider = draw.choice((3, 3, 5, 7)), _activation(draw), draw.choice((2, 4, 6))

    def build() -> nn.Module:
        modules: list[nn.Module] = [
            nn.Conv2d(3, width, 3, stride=2, padding=1),
            nn.BatchNorm2d(width),
            activation(),
        ]
        for _ in range(blocks):
            inner = width * wider
            modules.append(
                _Sum(
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


def _dense(draw: random.Random) -> Made:
    inputs, layers, width = (
        draw.choice((16, 64, 256, 784)),
        draw.randint(1, 5),
        draw.choice((32, 64, 128, 256, 512, 1024)),
    )
    activation, drop, normalise = _activation(draw), draw.random() < 0.4, draw.random() < 0.4

    def build() -> nn.Module:
        modules: list[nn.Module] = []
        before = inputs
        for _ in range(layers):
            modules += [
                nn.Linear(before, width),
                *([nn.BatchNorm1d(width)] if normalise else []),
                activation(),
            ]
            modules += [nn.Dropout(0.1)] if drop else []
            before = width
        return nn.Sequential(*modules, nn.Linear(before, CLASSES))

    return build, rows(inputs)


class _Recurrent(nn.Module):
    """Tokens or rows through a recurrent layer; the last step decides."""

    def __init__(self, kind: str, inputs: int, hidden: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, inputs)
        made = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[kind]
        self.layers = made(inputs, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.layers(self.embedding(x))[0][:, -1])


def _recurrent(kinds: tuple[str, ...]) -> Callable[[random.Random], Made]:
    def drawn(draw: random.Random) -> Made:
        kind, inputs, hidden = (
            draw.choice(kinds),
            draw.choice((16, 32, 64, 128)),
            draw.choice((32, 64, 128, 200, 256)),
        )
        layers, vocabulary, length = (
            draw.randint(1, 2),
            draw.choice((50, 1000, 5000)),
            draw.choice((8, 16, 32, 48)),
        )
        return lambda: _Recurrent(kind, inputs, hidden, layers, vocabulary), _tokens(
            length, vocabulary
        )

    return drawn


class Attention(nn.Module):
    """Multi-head attention by one of the three ways that code uses: torch's layer, its fused function, or matrices by hand."""

    def __init__(self, width: int, heads: int, way: str, causal: bool) -> None:
        super().__init__()
        self.heads, self.way, self.causal = heads, way, causal
        if way == "layer":
            self.layer = nn.MultiheadAttention(width, heads, batch_first=True)
        else:
            self.three, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> Any:
        if self.way == "layer":
            return self.layer(x, x, x, need_weights=False)[0]
        batch, length, width = x.shape
        query, key, value = (
            self.three(x)
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        if self.way == "fused":
            out = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        else:
            scores = query @ key.transpose(-2, -1) / (width // self.heads) ** 0.5
            if self.causal:
                scores = scores.masked_fill(
                    torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1),
                    float("-inf"),
                )
            out = scores.softmax(-1) @ value
        return self.out(out.transpose(1, 2).reshape(batch, length, width))


class _Transformer(nn.Module):
    """Tokens with positions through pre-norm blocks."""

    def __init__(
        self,
        width: int,
        heads: int,
        blocks: int,
        length: int,
        vocabulary: int,
        way: str,
        causal: bool,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(1, length, width))
        self.blocks = nn.Sequential()
        for _ in range(blocks):
            self.blocks.append(
                _Sum(nn.Sequential(nn.LayerNorm(width), Attention(width, heads, way, causal)))
            )
            inner = [
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            ]
            self.blocks.append(_Sum(nn.Sequential(*inner, nn.Dropout(0.1))))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.blocks(self.embedding(x) + self.positions).mean(1))


def _attention(draw: random.Random) -> Made:
    heads, each = draw.choice((2, 4, 8)), draw.choice((8, 16, 32))
    blocks, length, vocabulary = (
        draw.randint(1, 3),
        draw.choice((8, 16, 32, 64, 128)),
        draw.choice((100, 1000, 8000)),
    )
    way, causal = draw.choice(("layer", "fused", "by hand")), draw.random() < 0.5
    return lambda: _Transformer(
        heads * each, heads, blocks, length, vocabulary, way, causal
    ), _tokens(length, vocabulary)


class _Tables(nn.Module):
    """Columns of categories, each with a table of its own, and dense layers over all of them."""

    def __init__(self, columns: int, rows: int, width: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(columns))
        self.top = nn.Sequential(
            nn.Linear(columns * width, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.top(
            torch.cat([table(x[:, place]) for place, table in enumerate(self.tables)], 1)
        )


def _embedding(draw: random.Random) -> Made:
    columns, rows, width = (
        draw.choice((4, 8, 16)),
        draw.choice((100, 1000, 10_000)),
        draw.choice((8, 16, 32)),
    )
    hidden = draw.choice((32, 64, 256))
    return lambda: _Tables(columns, rows, width, hidden), _tokens(columns, rows)


class _Shaped(nn.Module):
    """Down and up again, joined with what was there before."""

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
        _activation(draw),
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
    """Channels last and back: normalisation and dense layers over the channels of an image, windows or not.

    With `last`, images lie so between the blocks too, as they do after a normalisation over channels.
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


_CHAIN: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x.exp(),
    lambda x: x.clamp(-3, 3),
    lambda x: x.sqrt(),
    lambda x: x * x,
    lambda x: x / (x + 1.5),
    lambda x: x.tanh(),
    lambda x: x.sigmoid(),
    lambda x: functional.gelu(x),
    lambda x: functional.softplus(x),
    lambda x: x.softmax(-1),
    lambda x: x - x.mean(-1, keepdim=True),
    lambda x: functional.layer_norm(x, x.shape[-1:]),
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    lambda x: x.roll(1, 1),
    lambda x: x.abs() + 0.1,
    lambda x: x.pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt() * x,
    lambda x: functional.dropout(x, 0.1),
    lambda x: torch.where(x > 0.5, x, 0.5 * x),
    lambda x: x.log1p(),
    lambda x: x + x.amax(-1, keepdim=True),
    lambda x: x.cumsum(1) * 0.1,
    lambda x: x.sin(),
    lambda x: torch.maximum(x, x * 0.5),
    lambda x: functional.normalize(x, dim=-1),
    lambda x: x.flip(1),
    lambda x: x + torch.stack([x, x], 0).sum(0),
    lambda x: functional.pad(x, (1, 1))[..., 1:-1],
    lambda x: functional.silu(x),
    lambda x: x.chunk(2, -1)[0].repeat(1, 1, 2),
)


class _Chain(nn.Module):
    """Single operations after one another."""

    def __init__(self, width: int, places: list[int]) -> None:
        super().__init__()
        self.places = places
        self.scale, self.head = nn.Parameter(torch.ones(width)), nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        x = x * self.scale
        for place in self.places:
            x = _CHAIN[place](x).abs() + 0.01
        return self.head(x.mean(1))


def _chained(draw: random.Random) -> Made:
    width, length = draw.choice((16, 64, 128, 256)), draw.choice((4, 16, 64, 256))
    places = [draw.randrange(len(_CHAIN)) for _ in range(draw.randint(5, 12))]
    return lambda: _Chain(width, places), rows(length, width)


FAMILIES: dict[str, Callable[[random.Random], Made]] = {
    "convolutional": _convolutional,
    "residual": _residual,
    "separable": _separable,
    "dense": _dense,
    "lstm": _recurrent(("lstm",)),
    "recurrent": _recurrent(("gru", "rnn")),
    "attention": _attention,
    "embedding": _embedding,
    "shaped": _shaped,
    "temporal": _temporal,
    "permuted": _permuted,
    "chain": _chained,
}
