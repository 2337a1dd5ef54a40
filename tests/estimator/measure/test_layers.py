"""Parameters and FLOPs of layers add up to torch's counts of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from trainwright.estimator.trace.source import ModelDefinition
from trainwright.estimator.trace.trace import trace
from trainwright.estimator.trace.training_step import TrainingStepSpec


class Attention(nn.Module):
    """Has its own arithmetic and parameter, besides those of its children."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(1, 12, width))
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            self.into(x + self.place).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        )
        return self.out(
            functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        )


class Tied(nn.Module):
    """A head that shares its weight with the embedding, and a block that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.block = nn.Sequential(nn.Linear(32, 32), nn.GELU())
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.block(self.embedding(tokens))).mean(1))


class Functional(nn.Module):
    """No child modules: only its own parameters and products."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.rand(16, 16)) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.einsum("bi,ij->bj", x, weight).relu()
        return x


def _images(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.rand(batch, *shape)


def _tokens(batch: int) -> torch.Tensor:
    return torch.zeros(batch, 12, dtype=torch.long)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "grouped, strided, dilated": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 12, 3, stride=2),
            nn.Conv2d(12, 12, 3, groups=12),
            nn.Conv2d(12, 24, 3, dilation=2, groups=3),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(24, 10),
        ),
        _images(3, 32, 32),
    ),
    "up again": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 8, 4, 2, 1),
            nn.Flatten(),
            nn.Linear(8 * 64, 10),
        ),
        _images(1, 8, 8),
    ),
    "one dimension": (
        lambda: nn.Sequential(nn.Conv1d(4, 8, 5), nn.Flatten(), nn.Linear(8 * 12, 10)),
        _images(4, 16),
    ),
    "three dimensions": (
        lambda: nn.Sequential(nn.Conv3d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 6**3, 10)),
        _images(1, 8, 8, 8),
    ),
    "attention": (
        lambda: nn.Sequential(
            nn.Embedding(50, 32), Attention(), Attention(), nn.Flatten(), nn.Linear(384, 10)
        ),
        _tokens,
    ),
    "transformer": (
        lambda: nn.Sequential(
            nn.Embedding(50, 32),
            nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2),
            nn.Flatten(),
            nn.Linear(384, 10),
        ),
        _tokens,
    ),
    "tied": (Tied, _tokens),
    "functional": (Functional, _images(16)),
    "one layer": (lambda: nn.Linear(16, 10), _images(16)),
    "norm": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 10)),
        _images(4, 4),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_layers_counts_add_up_to_torchs(name: str) -> None:
    build, inputs = MODELS[name]
    definition = ModelDefinition(
        build, lambda batch: (inputs(batch), torch.zeros(batch, dtype=torch.long)), None
    )
    structure = trace(TrainingStepSpec(definition, {}, None, {"name": "adamw"}), 4)
    model = build()
    with FlopCounterMode(display=False) as counter:
        model(inputs(4))
    assert structure.parameters == sum(one.numel() for one in model.parameters())
    assert structure.forward_flops_per_sample * 4 == counter.get_total_flops()
    assert sum(one.parameters for one in structure.layers) == structure.parameters
    assert sum(one.forward_flops for one in structure.layers) == counter.get_total_flops()
    assert [one.name for one in structure.modules[1:]] == [
        name for name, _ in model.named_modules()
    ][1:]
    assert structure.modules[0].kind == type(model).__name__


class Careful(nn.Module):
    """Calls a child that raises deep inside, then another child, then computes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Linear(16, 24), nn.Sequential(nn.Linear(24, 32), nn.Linear(31, 8))
        )
        self.second = nn.Linear(16, 8)
        self.weight = nn.Parameter(torch.rand(8, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            x = self.first(x)
        except RuntimeError:
            x = self.second(x)
        return x @ self.weight


def test_work_after_a_childs_exception_counts_for_the_module_that_does_it() -> None:
    definition = ModelDefinition(
        Careful, lambda batch: (torch.rand(batch, 16), torch.zeros(batch).long()), None
    )
    structure = trace(TrainingStepSpec(definition, {}, None, {"name": "adamw"}), 4)
    layers = {one.name: one for one in structure.layers}
    flops = {name: one.forward_flops for name, one in layers.items() if one.forward_flops}
    assert flops == {
        "first.0": 2 * 4 * 16 * 24,
        "first.1.0": 2 * 4 * 24 * 32,
        "second": 2 * 4 * 16 * 8,
        "Careful": 2 * 4 * 8 * 10,
    }
    assert layers["first.1.1"].output_shape == ()
    assert layers["Careful"].output_shape == (4, 10)
