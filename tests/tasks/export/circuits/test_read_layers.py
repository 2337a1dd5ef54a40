"""Layers read from torch modules are the modules, and what no circuit can have is named."""

from __future__ import annotations

from typing import Any

import circuit_nets
import numpy as np
import pytest
import torch
from torch import nn

from trainwright.estimator.errors import BadInput
from trainwright.tasks.export.circuits.quantised_network import float_outputs
from trainwright.tasks.export.circuits.read_layers import read


def chain_outputs(net: nn.Module, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """What the layers, as read, make of rows."""
    circuit = read(net, {name: torch.from_numpy(one[:3]) for name, one in arrays.items()})
    numbers = circuit.before.run(arrays)
    found = float_outputs(circuit, numbers.reshape(len(numbers), -1).astype(np.float64))
    return circuit.after.run({"circuit": found.numpy()})


@pytest.mark.parametrize("make", [circuit_nets.dense, circuit_nets.convolutional])
def test_layers_as_read_give_the_modules_outputs(make: Any) -> None:
    torch.manual_seed(0)
    net, shape = make()
    given = circuit_nets.rows(shape, 20, signed=True)
    exact = net.eval()(torch.from_numpy(given)).detach().numpy()
    assert np.allclose(chain_outputs(net, {"inputs": given}), exact, atol=1e-5)


class Table(nn.Module):
    """Scaled numbers and categories in, a number in its unit out, as generated models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Buffer(torch.tensor([1.0, -2.0]))
        self.ends = nn.Buffer(torch.tensor([3.0, 2.0, -1.0, 1.0]))
        self.dense = nn.Linear(3, 1, bias=False)
        self.categories = nn.Embedding(5, 1)
        self.offsets = nn.Buffer(torch.tensor([0, 2]))
        self.bias = nn.Parameter(torch.zeros(1) + 0.2)

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        numbers = inputs["numbers"]
        missing = numbers.isnan()
        scaled = torch.where(missing, 0, (numbers - self.centre) * 0.5).clamp(-9, 9)
        clipped = scaled / (1 + (scaled / 3).square()).sqrt()
        features = torch.cat([clipped, missing[:, [1]].to(clipped.dtype)], 1)
        found = self.bias + self.dense(features)
        found = found + self.categories(inputs["categories"] + self.offsets).sum(1)
        mean, deviation, low, high = self.ends.unbind()
        return mean + deviation * found.squeeze(1).clamp(low, high)


def test_scaling_and_categories_of_a_table_are_the_hosts_work() -> None:
    torch.manual_seed(0)
    net = Table().eval()
    numbers = circuit_nets.rows((2,), 20, signed=True)
    numbers[3, 1] = np.nan
    codes = np.random.default_rng(1).integers(0, [2, 3], (20, 2))
    arrays = {"numbers": numbers, "categories": codes}
    exact = net({name: torch.from_numpy(one) for name, one in arrays.items()}).detach().numpy()
    assert np.allclose(chain_outputs(net, arrays), exact, atol=1e-5)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.relu(self.inner(x))) + self.inner(x)


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else 2 * x


class Decomposed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.qr(x)[1]


@pytest.mark.parametrize(
    ("net", "named"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)), "'1'.*gelu"),
        (nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2)), "'2'.*linear"),
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "'1'.*layer_norm"),
        (nn.Sequential(nn.Linear(4, 4), Branch()), r"1 \(Branch\) can't be traced"),
        (nn.Sequential(nn.Linear(4, 4), Decomposed()), "'1'.*linalg_qr"),
        (nn.Sequential(Decomposed(), nn.Linear(4, 2)), "'0'.*linalg_qr"),
        (nn.Softmax(1), "no dense or convolutional layer"),
        (Residual(), "add"),
    ],
)
def test_what_no_circuit_can_have_is_named_with_its_module(net: nn.Module, named: str) -> None:
    with pytest.raises(BadInput, match=f"(?s){named}.*allowed"):
        chain_outputs(net, {"inputs": circuit_nets.rows((4,), 4)})
