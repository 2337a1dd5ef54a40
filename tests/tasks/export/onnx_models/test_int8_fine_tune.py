"""A short training with the rounding of 8-bit integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from trainwright.tasks.export.onnx_models.int8_fine_tune import (
    EPOCHS,
    RoundedLayers,
    fine_tune,
    mark_rows,
)
from trainwright.tasks.export.onnx_models.torch_to_onnx import PlainModel

ROWS = 200


class Scaled(nn.Module):
    """A dense layer whose weights are computed, and a product of two things made of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.size = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.ones(8, 1))

    def forward(self, x: torch.Tensor) -> Any:
        x = functional.linear(x, self.weight * self.size)
        return (x[:, :, None] @ x[:, None]).sum(2)


def uneven() -> nn.Module:
    """A net whose weights for one input are large, so that the others are rounded much."""
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    with torch.no_grad():
        net[0].weight[:, 0] *= 50
    return net


def uneven_rows() -> torch.Tensor:
    """Rows whose first number is small."""
    return torch.randn(1000, 8) * torch.tensor([0.02] + 7 * [1.0])


def rounded(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """The outputs with rounding by ranges of the same rows."""
    layers = RoundedLayers()
    mark_rows([rows])
    with torch.no_grad():
        with layers:
            model(rows)
        layers.round_from_now()
        with layers:
            found: torch.Tensor = model(rows)
    return found


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).square().mean().sqrt() / other.std())


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(8, 8),
        nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, 3), nn.Flatten()),
        nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.ConvTranspose2d(2, 4, 2), nn.Flatten()),
        Scaled(),
    ],
    ids=["dense", "convolution", "transposed", "computed weights"],
)
def test_layers_compute_with_rounded_numbers(model: nn.Module) -> None:
    rows = torch.randn(ROWS, 8)
    with torch.no_grad():
        exact = model(rows)
    assert 0 < distance(rounded(model, rows), exact) < 0.05


def test_embeddings_are_rounded() -> None:
    table, rows = nn.Embedding(50, 8), torch.arange(50)
    with torch.no_grad():
        assert 0 < distance(rounded(table, rows), table(rows)) < 0.05


def test_products_of_rows_with_rows_stay_exact() -> None:
    rows = torch.randn(ROWS, 8)
    product = nn.Sequential(nn.Unflatten(1, (4, 2)))
    product.forward = lambda x: x.reshape(-1, 4, 2) @ x.reshape(-1, 2, 4)  # type: ignore[method-assign]
    assert torch.equal(rounded(product, rows), product(rows))


def distance_to(taught: torch.Tensor, rows: torch.Tensor) -> Callable[[Any], float]:
    return lambda outputs: distance(outputs(rows)[0], taught)


def test_a_model_learns_to_give_its_outputs_with_rounded_numbers() -> None:
    torch.manual_seed(3)
    model, rows = PlainModel(uneven().eval(), ["x"]), uneven_rows()
    with torch.no_grad():
        taught = model(rows)[0]
    before = distance(rounded(model.model, rows), taught)
    epoch = fine_tune(model, {"x": rows}, taught, False, distance_to(taught, rows))
    assert 1 <= epoch <= EPOCHS
    assert distance(rounded(model.model, rows), taught) < 0.8 * before


def test_the_model_stays_as_it_was_if_no_epoch_is_better() -> None:
    model, rows = PlainModel(uneven().eval(), ["x"]), uneven_rows()
    with torch.no_grad():
        taught = model(rows)[0]
    assert fine_tune(model, {"x": rows}, taught, True, lambda _: 0.0) == 0
    with torch.no_grad():
        assert torch.equal(model(rows)[0], taught)
