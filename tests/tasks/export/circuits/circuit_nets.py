"""Small nets for tests of circuits, quantised without training."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from trainwright.tasks.export.circuits.integer_model import IntegerModel
from trainwright.tasks.export.circuits.quantised_network import (
    InputScale,
    QuantisedNetwork,
    same_widths,
)
from trainwright.tasks.export.circuits.read_layers import FloatCircuit, read


def dense() -> tuple[nn.Module, tuple[int, ...]]:
    """Two dense layers; the first one's outputs are signed."""
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), (6,)


def convolutional() -> tuple[nn.Module, tuple[int, ...]]:
    """Every kind of layer, padding, strides, and a ReLU after a pool."""
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.BatchNorm2d(2),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(2, 2, 3, stride=2, padding=1, groups=2),
        nn.ReLU(),
        nn.AvgPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(2, 3),
    )
    norm = net[1]
    assert isinstance(norm, nn.BatchNorm2d)
    with torch.no_grad():
        assert norm.running_mean is not None
        norm.running_mean += 0.1
        norm.weight *= -1.5
    return net, (1, 8, 8)


def rows(shape: tuple[int, ...], count: int, signed: bool = False) -> np.ndarray:
    """Random inputs in 0..1, or around 0."""
    found = np.random.default_rng(0).random((count, *shape), dtype=np.float32)
    return 4 * found - 2 if signed else found


def circuit_of(net: nn.Module, given: np.ndarray) -> FloatCircuit:
    """The layers of a net of one input."""
    return read(net, {"inputs": torch.from_numpy(given[:3])})


def quantised(circuit: FloatCircuit, given: np.ndarray, bits: int) -> QuantisedNetwork:
    """With the same bits everywhere."""
    numbers = circuit.before.run({"inputs": given}).reshape(len(given), -1)
    scale = InputScale.of(numbers, of_table=False)
    network = QuantisedNetwork(circuit, scale, scale.normalised(numbers))
    network.choose_scales(same_widths(circuit.layers, bits))
    return network


def integers_of(net: nn.Module, given: np.ndarray, bits: int) -> IntegerModel:
    """A net as integers."""
    return quantised(circuit_of(net, given), given, bits).integer_model()
