"""Networks of the benchmark family for rows, tokens and tables, with random sizes. Loads torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch  # noqa: TID253 - measuring runs in a separate process
from torch import nn  # noqa: TID253
from torch.nn import functional  # noqa: TID253

from trainwright.estimator.measure.networks.parts import (
    CLASSES,
    Drawn,
    Made,
    Residual,
    draw_activation,
    rows,
    tokens,
)


def _dense(draw: random.Random) -> Made:
    inputs, layers, width = (
        draw.choice((16, 64, 256, 784)),
        draw.randint(1, 5),
        draw.choice((32, 64, 128, 256, 512, 1024)),
    )
    activation, drop, normalise = draw_activation(draw), draw.random() < 0.4, draw.random() < 0.4

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
    """Tokens through a recurrent layer; the last step is classified."""

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
        return lambda: _Recurrent(kind, inputs, hidden, layers, vocabulary), tokens(
            length, vocabulary
        )

    return drawn


class Attention(nn.Module):
    """Multi-head attention in one of three ways: torch's layer, its fused function, or matrices."""

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
                Residual(nn.Sequential(nn.LayerNorm(width), Attention(width, heads, way, causal)))
            )
            inner = [
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
            ]
            self.blocks.append(Residual(nn.Sequential(*inner, nn.Dropout(0.1))))
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
    ), tokens(length, vocabulary)


class _Tables(nn.Module):
    """Columns of categories, each with its own table, and dense layers over all of them."""

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
    return lambda: _Tables(columns, rows, width, hidden), tokens(columns, rows)


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
    """A chain of single operations."""

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


SEQUENCE_FAMILIES: dict[str, Drawn] = {
    "dense": _dense,
    "lstm": _recurrent(("lstm",)),
    "recurrent": _recurrent(("gru", "rnn")),
    "attention": _attention,
    "embedding": _embedding,
    "chain": _chained,
}
