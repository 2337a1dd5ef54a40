"""Nets of random sizes and bit widths, trained for a moment, and the cells of their circuits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import sklearn.datasets
import torch
from torch import nn

from trainwright.tasks.export.circuits.fine_tune import TuneLimits, tuned_to
from trainwright.tasks.export.circuits.integer_model import IntegerModel
from trainwright.tasks.export.circuits.pipelined import PipelinedCircuit, write_pipelined
from trainwright.tasks.export.circuits.predict_cells import (
    adder_bits,
    cells_of_adders,
    pipelined_cells,
    sequential_cells,
)
from trainwright.tasks.export.circuits.quantised_network import BitWidths
from trainwright.tasks.export.circuits.read_layers import read
from trainwright.tasks.export.circuits.sequential import SequentialCircuit, write_sequential
from trainwright.tasks.export.circuits.synthesize import (
    FAMILIES,
    cells_of,
    lookup_tables,
    smallest_fpga,
)

_DATA = ("digits", "wine", "breast_cancer", "iris")
_EPOCHS, _BATCH, _RATE = 15, 64, 5e-3
_LIMITS = TuneLimits(0.01, trial_epochs=3)


@dataclass(frozen=True)
class FreshCircuit:
    """A circuit of a net, with its cells by family."""

    said: str
    model: IntegerModel
    circuit: PipelinedCircuit | SequentialCircuit
    early: dict[str, float]
    """as predicted from the weights alone; none for a sequential circuit"""
    predicted: dict[str, float]
    found: dict[str, int]


def circuits(count: int, seed: int, timeout_s: float) -> Iterator[FreshCircuit]:
    """The pipelined and the sequential circuit of each of `count` nets."""
    for number in range(count):
        rng = np.random.default_rng([seed, number])
        said, model = _model(rng)
        for write in (write_pipelined, write_sequential):
            with tempfile.TemporaryDirectory() as folder:
                yield _made(said, model, write(model, Path(folder)), Path(folder), timeout_s)


def _made(
    said: str,
    model: IntegerModel,
    circuit: PipelinedCircuit | SequentialCircuit,
    folder: Path,
    timeout_s: float,
) -> FreshCircuit:
    early, predicted, found = {}, {}, {}
    names = [path.name for path in circuit.files]
    for family in FAMILIES:
        if isinstance(circuit, PipelinedCircuit):
            early[family] = cells_of_adders(sum(adder_bits(model)), family)
            predicted[family] = pipelined_cells(circuit, family)
        else:
            predicted[family] = sequential_cells(circuit, len(model.layers), family)
        fpga = smallest_fpga(family, predicted[family])
        kinds = cells_of(fpga, names, circuit.top, family, folder, timeout_s)
        found[family] = lookup_tables(family, kinds)
    return FreshCircuit(said, model, circuit, early, predicted, found)


def _model(rng: np.random.Generator) -> tuple[str, IntegerModel]:
    """A trained net in integers, and what it is."""
    data = str(rng.choice(_DATA))
    loaded = getattr(sklearn.datasets, f"load_{data}")()
    rows = (loaded.data / np.abs(loaded.data).max(0).clip(1e-6)).astype(np.float32)
    classes = int(loaded.target.max()) + 1
    convolves = data == "digits" and bool(rng.integers(2))
    if convolves:
        channels, second = int(rng.integers(2, 7)), int(rng.integers(2, 9))
        layers = [nn.Conv2d(1, channels, 3, 2, 1), nn.ReLU(), nn.Conv2d(channels, second, 3, 2, 1)]
        layers += [nn.ReLU(), nn.Flatten(), nn.Linear(4 * second, classes)]
        rows = rows.reshape(-1, 1, 8, 8)
        size = f"{channels} and {second} channels"
    else:
        widths = [rows.shape[1], *rng.integers(3, 25, rng.integers(1, 3)).tolist(), classes]
        layers = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        layers = layers[:-1]
        size = "-".join(map(str, widths))
    torch.manual_seed(int(rng.integers(2**31)))
    net = _trained(nn.Sequential(*layers), rows, loaded.target)
    circuit = read(net, {"inputs": torch.from_numpy(rows[:3])})
    weighs = [layer.shape.kind != "max-pool" for layer in circuit.layers]
    bits = BitWidths(
        int(rng.integers(2, 7)),
        tuple(int(rng.integers(2, 7)) for _ in weighs),
        (*(int(rng.integers(2, 7)) for _ in weighs[1:]), 0),
    )
    model = tuned_to(circuit, rows.reshape(len(rows), -1).astype(float), True, bits, _LIMITS)
    return f"{data} {size}, bits {bits.inputs} {bits.weights} {bits.outputs}", model


def _trained(net: nn.Module, rows: np.ndarray, targets: np.ndarray) -> nn.Module:
    optimizer = torch.optim.AdamW(net.parameters(), _RATE)
    inputs, wanted = torch.from_numpy(rows), torch.from_numpy(targets)
    for _ in range(_EPOCHS):
        for batch in torch.randperm(len(rows)).split(_BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs[batch]), wanted[batch]).backward()
            optimizer.step()
    return net.eval()
