"""LSTM language model, GRU classifier, temporal convolutions (TCN), and a recommender (DLRM)."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from zoo.drawn import CLASSES, Drawn, each_token, next_words


class LanguageModel(nn.Module):
    """Embedding, LSTM, dropout, vocabulary (Zaremba et al., RNN Regularization, 2014)."""

    def __init__(self, vocabulary: int, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.word, self.dropout = nn.Embedding(vocabulary, width), nn.Dropout(0.2)
        self.layers = nn.LSTM(width, hidden, layers, batch_first=True)
        self.out = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.dropout(self.layers(self.dropout(self.word(tokens)))[0]))


def _language_models(draw: random.Random) -> Drawn:
    vocabulary, width, hidden = (
        draw.choice((200, 1000, 5000)),
        draw.choice((32, 64, 128)),
        draw.choice((64, 128, 200, 256)),
    )
    layers, length = draw.choice((1, 2)), draw.choice((16, 32, 64))
    return Drawn(
        f"e{width} h{hidden} l{layers} n{length} v{vocabulary}",
        lambda: LanguageModel(vocabulary, width, hidden, layers),
        next_words(length, vocabulary),
        (2, 4, 8, 16),
        each_token,
    )


class Series(nn.Module):
    """A GRU over a series, one or both ways; its last state is classified."""

    def __init__(self, inputs: int, hidden: int, layers: int, *, both: bool) -> None:
        super().__init__()
        self.layers = nn.GRU(inputs, hidden, layers, batch_first=True, bidirectional=both)
        self.out = nn.Linear(hidden * (1 + both), CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(x)[0][:, -1])


def _series(
    length: int, inputs: int, *, channels_first: bool = False
) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    shape = (inputs, length) if channels_first else (length, inputs)
    return lambda size: (torch.rand(size, *shape), torch.randint(0, CLASSES, (size,)))


def _grus(draw: random.Random) -> Drawn:
    inputs, hidden, layers = (
        draw.choice((8, 32, 64)),
        draw.choice((32, 64, 128)),
        draw.choice((1, 2)),
    )
    length, both = draw.choice((12, 24, 48)), draw.random() < 0.3
    name = f"i{inputs} h{hidden} l{layers} n{length}{' both ways' if both else ''}"
    return Drawn(
        name,
        lambda: Series(inputs, hidden, layers, both=both),
        _series(length, inputs),
        (4, 16, 32, 64),
    )


class Temporal(nn.Module):
    """Two dilated causal convolutions and a shortcut (Bai et al., An Empirical …, 2018)."""

    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        self.past = 2 * dilation
        self.one = nn.Conv1d(inputs, outputs, 3, dilation=dilation)
        self.two = nn.Conv1d(outputs, outputs, 3, dilation=dilation)
        self.dropout = nn.Dropout(0.1)
        self.shortcut = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x
        for layer in (self.one, self.two):
            inner = self.dropout(torch.relu(layer(functional.pad(inner, (self.past, 0)))))
        return torch.relu(inner + self.shortcut(x))


def _temporals(draw: random.Random) -> Drawn:
    inputs, width, layers = (
        draw.choice((1, 4, 16)),
        draw.choice((16, 32, 64)),
        draw.choice((3, 4, 5)),
    )
    length = draw.choice((64, 128, 256))

    def build() -> nn.Module:
        blocks = [Temporal(width if place else inputs, width, 2**place) for place in range(layers)]
        return nn.Sequential(
            *blocks, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, CLASSES)
        )

    return Drawn(
        f"i{inputs} w{width} l{layers} n{length}",
        build,
        _series(length, inputs, channels_first=True),
        (4, 8, 16, 32),
    )


class Recommender(nn.Module):
    """Bags of embeddings and dense features with pairwise products (Naumov et al., DLRM, 2019)."""

    def __init__(self, tables: int, rows: int, width: int, dense: int, hidden: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(
            nn.Linear(dense, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU()
        )
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(pairs + width, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )
        self.register_buffer(
            "pairs", torch.stack([torch.tensor(one) for one in self._below(tables + 1)])
        )

    @staticmethod
    def _below(count: int) -> tuple[list[int], list[int]]:
        pairs = [(row, column) for row in range(count) for column in range(row)]
        return [row for row, _ in pairs], [column for _, column in pairs]

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        dense = self.bottom(inputs["dense"])
        bags = [table(inputs["sparse"][:, place]) for place, table in enumerate(self.tables)]
        together = torch.stack([dense, *bags], 1)
        products = torch.bmm(together, together.transpose(1, 2))
        return self.top(torch.cat([dense, products[:, self.pairs[0], self.pairs[1]]], 1)).squeeze(1)


def _recommenders(draw: random.Random) -> Drawn:
    tables, rows, width = (
        draw.choice((4, 8, 16)),
        draw.choice((1000, 5000, 20000)),
        draw.choice((8, 16, 32)),
    )
    dense, hidden, bag = draw.choice((13, 64)), draw.choice((64, 256, 512)), draw.choice((1, 4, 10))

    def batch(size: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        inputs = {
            "dense": torch.rand(size, dense),
            "sparse": torch.randint(0, rows, (size, tables, bag)),
        }
        return inputs, torch.rand(size)

    return Drawn(
        f"{tables}x{rows}x{width} h{hidden} bag{bag}",
        lambda: Recommender(tables, rows, width, dense, hidden),
        batch,
        (32, 64, 128, 256),
        functional.binary_cross_entropy_with_logits,
    )


FAMILIES: dict[str, Callable[[random.Random], Drawn]] = {
    "LSTM": _language_models,
    "GRU": _grus,
    "TCN": _temporals,
    "DLRM": _recommenders,
}
