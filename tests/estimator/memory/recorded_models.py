"""Small models of several families, and their training steps with some modules recomputed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainwright.estimator.structure import Structure
from trainwright.estimator.trace.source import ModelDefinition
from trainwright.estimator.trace.trace import trace
from trainwright.estimator.trace.training_step import TrainingStepSpec


class _Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        normal = self.norm(inputs)
        inputs = inputs + self.attention(normal, normal, normal, need_weights=False)[0]
        return inputs + self.mlp(inputs)


class Transformer(nn.Module):
    """Blocks over tokens, whose output weight is the embedding's."""

    def __init__(self, depth: int = 3, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.embedding(tokens)
        for block in self.blocks:
            found = block(found)
        return (found @ self.embedding.weight.T).mean(1)


class _Convolutions(nn.Module):
    """Two convolutions with a residual connection, the last activation in place."""

    def __init__(self, filters: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(filters, filters, 3, padding=1), nn.BatchNorm2d(filters), nn.ReLU()
        )
        self.second = nn.Conv2d(filters, filters, 3, padding=1)
        self.last = nn.ReLU(inplace=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(images + self.second(self.first(images)))


class Residual(nn.Module):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, 16, 3, padding=1)
        self.blocks = nn.Sequential(*(_Convolutions(16) for _ in range(3)))
        self.head = nn.Linear(16, 50)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.enter(images)).mean((2, 3)))


class UNet(nn.Module):
    """Skip connections from the way down to the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(one, two, 3, stride=2, padding=1), nn.Tanh())
            for one, two in ((1, 8), (8, 16))
        )
        self.up = nn.ModuleList(
            nn.Sequential(nn.ConvTranspose2d(one, two, 2, stride=2), nn.GELU())
            for one, two in ((16, 8), (16, 8))
        )
        self.head = nn.Linear(9, 50)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        first = self.down[0](images)
        second = self.down[1](first)
        back = torch.cat([self.up[0](second), first], dim=1)
        whole = torch.cat([self.up[1](back), images], dim=1)
        return self.head(whole.mean((2, 3)))


class Recurrent(nn.Module):
    """An LSTM between an embedding and a head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.lstm = nn.LSTM(24, 32, batch_first=True)
        self.head = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 50))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0].mean(1))


class Chain(nn.Module):
    """Small blocks between two layers, all in the code of the model."""

    def __init__(self, depth: int = 12, width: int = 32) -> None:
        super().__init__()
        self.enter = nn.Linear(16, width)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width), nn.Tanh()
                )
                for _ in range(depth)
            )
        )
        self.out = nn.Linear(width, 50)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks(self.enter(rows)))


def _rows(size: int) -> tuple[Any, Any]:
    return torch.zeros(size, 16), torch.zeros(size, dtype=torch.int64)


def _images(size: int) -> tuple[Any, Any]:
    return torch.zeros(size, 1, 16, 16), torch.zeros(size, dtype=torch.int64)


def _tokens(size: int) -> tuple[Any, Any]:
    return torch.zeros(size, 12, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Any, Sequence[Sequence[str]]]] = {
    "transformer": (
        Transformer,
        _tokens,
        [["blocks.0", "blocks.1", "blocks.2"], ["blocks.0.mlp", "blocks.2"], ["blocks.1.norm"]],
    ),
    "residual": (
        Residual,
        _images,
        [["blocks.0", "blocks.2"], ["blocks"], ["blocks.1.first", "blocks.1.second"]],
    ),
    "u-net": (UNet, _images, [["down.0", "down.1", "up.0", "up.1"], ["down.0"], ["up.1"]]),
    "recurrent": (Recurrent, _tokens, [["head"], ["lstm", "head"]]),
}
"""By name: the model, its batch, and modules to recompute."""


def chain_step(*runs: tuple[int, int]) -> TrainingStepSpec:
    """The step of a `Chain`; blocks [begin, end) of a run are under one checkpoint."""

    def build(**config: Any) -> nn.Module:
        model = Chain()

        def forward(found: torch.Tensor) -> torch.Tensor:
            at = 0
            for begin, end in [*runs, (len(model.blocks), len(model.blocks))]:
                found = model.blocks[at:begin](found)
                found = _again(model.blocks[begin:end])(found) if begin < end else found
                at = end
            return found

        if runs:
            model.blocks.forward = forward  # type: ignore[method-assign]
        return model

    return TrainingStepSpec(
        ModelDefinition(build, _rows, functional.cross_entropy), {}, None, {"name": "adamw"}
    )


def step_of(family: str, accumulation: int = 1) -> TrainingStepSpec:
    """The training step of a family's model."""
    build, example, _ = FAMILIES[family]
    return TrainingStepSpec(
        ModelDefinition(build, example, functional.cross_entropy),
        {},
        None,
        {"name": "adamw"},
        accumulation=accumulation,
    )


def recomputing(step: TrainingStepSpec, names: Collection[str]) -> TrainingStepSpec:
    """The step with some modules under `torch.utils.checkpoint`."""

    def build(**config: Any) -> nn.Module:
        model: nn.Module = step.definition.build_model(**config)
        for name in names:
            module = model.get_submodule(name)
            module.forward = _again(module.forward)  # type: ignore[method-assign]
        return model

    return replace(step, definition=replace(step.definition, build_model=build))


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        # Fake tensors have no state of random numbers to restore.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return recomputed


def _token_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(size, 128, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)


@functools.cache
def wide_structure() -> Structure:
    """The structure of a transformer of four wide blocks, trained by AdamW."""
    definition = ModelDefinition(
        lambda: Transformer(depth=4, width=128), _token_batch, functional.cross_entropy
    )
    return trace(TrainingStepSpec(definition, {}, None, {"name": "adamw"}), 16)
