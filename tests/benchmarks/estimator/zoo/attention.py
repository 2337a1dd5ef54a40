"""Transformers over tokens, BERT and GPT-2, and their blocks, with attention in several styles."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from zoo.drawn import Drawn, each_token, next_words, words


class Perceptron(nn.Module):
    """Two dense layers with GELU between them, then dropout."""

    def __init__(self, width: int, factor: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = (
            nn.Linear(width, factor * width),
            nn.Linear(factor * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(functional.gelu(self.up(x))))


class SelfAttention(nn.Module):
    """Attention over (B, L, D): fused, or by hand with softmax and dropout."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool = False,
        fused: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.fused = heads, causal, fused
        self.inputs, self.outputs, self.dropout = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            self.inputs(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        )
        if self.fused:
            mixed = functional.scaled_dot_product_attention(
                query, key, value, is_causal=self.causal
            )
        else:
            scores = query @ key.transpose(-2, -1) / math.sqrt(width / self.heads)
            if self.causal:
                above = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
                scores = scores.masked_fill(above, float("-inf"))
            mixed = self.dropout(scores.softmax(-1)) @ value
        return self.outputs(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and perceptron with shortcuts; normalised before (GPT-2, ViT) or after (BERT)."""

    def __init__(
        self, width: int, attention: nn.Module, *, before: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.before, self.attention, self.perceptron = (
            before,
            attention,
            Perceptron(width, dropout=dropout),
        )
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before:
            x = x + self.attention(self.one(x))
            return x + self.perceptron(self.two(x))
        x = self.one(x + self.attention(x))
        return self.two(x + self.perceptron(x))


class Tokens(nn.Module):
    """Embeddings of tokens and places."""

    def __init__(self, vocabulary: int, length: int, width: int, dropout: float) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.norm(self.word(tokens) + self.place(places)))


class First(nn.Module):
    """The first place of each sequence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0]


def _berts(draw: random.Random) -> Drawn:
    heads, each, layers = draw.choice((2, 4)), draw.choice((16, 32, 64)), draw.choice((1, 2, 4))
    length, vocabulary, fused = (
        draw.choice((16, 32, 64, 128)),
        draw.choice((500, 2000, 8000)),
        draw.random() < 0.5,
    )
    width = heads * each

    def build() -> nn.Module:
        blocks = [
            Block(
                width,
                SelfAttention(width, heads, fused=fused, dropout=0.1),
                before=False,
                dropout=0.1,
            )
            for _ in range(layers)
        ]
        return nn.Sequential(
            Tokens(vocabulary, length, width, 0.1),
            *blocks,
            First(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, 2),
        )

    return Drawn(
        f"d{width} h{heads} l{layers} n{length} v{vocabulary}",
        build,
        words(length, vocabulary, 2),
        (2, 4, 8, 16),
    )


class Decoder(nn.Module):
    """GPT-2 with its output tied to its embedding (Radford et al., 2019)."""

    def __init__(
        self, vocabulary: int, length: int, width: int, heads: int, layers: int, *, fused: bool
    ) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(
            *(
                Block(width, SelfAttention(width, heads, causal=True, fused=fused))
                for _ in range(layers)
            )
        )
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.out.weight = self.word.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.out(self.norm(self.blocks(self.word(tokens) + self.place(places))))


def _decoders(draw: random.Random) -> Drawn:
    heads, each, layers = draw.choice((2, 4)), draw.choice((16, 32)), draw.choice((1, 2, 4))
    length, vocabulary, fused = (
        draw.choice((32, 64, 128)),
        draw.choice((256, 1000, 4000)),
        draw.random() < 0.5,
    )
    width = heads * each
    return Drawn(
        f"d{width} h{heads} l{layers} n{length} v{vocabulary}",
        lambda: Decoder(vocabulary, length, width, heads, layers, fused=fused),
        next_words(length, vocabulary),
        (1, 2, 4, 8),
        each_token,
    )


FAMILIES: dict[str, Callable[[random.Random], Drawn]] = {"BERT": _berts, "GPT-2": _decoders}
