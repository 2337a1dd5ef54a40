"""Trains a quantised network to give the float model's outputs, in as few cells as it can.

The float model is the teacher (`learn_outputs`). Bit widths are searched greedily: the one whose
next bit saves most predicted cells is tried first, and kept if the held-out rows permit it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np  # noqa: TID253 - this is a separate process
import torch  # noqa: TID253

from trainwright.tasks.export.circuits.integer_model import IntegerModel
from trainwright.tasks.export.circuits.quantised_network import (
    BitWidths,
    InputScale,
    QuantisedNetwork,
    float_outputs,
    narrower,
    same_widths,
)
from trainwright.tasks.export.circuits.read_layers import FloatCircuit
from trainwright.tasks.export.learn_outputs import Teacher, learn

Array = np.ndarray[Any, Any]
_RATE = 0.002
_START_BITS, _MOST_BITS = 6, 8
_FEWEST = {"inputs": 1, "weights": 2, "outputs": 2}
_HELD_OUT = 0.25
_SHARE = 0.5
"""of the tolerance, which the search may use up on the held-out rows"""


@dataclass(frozen=True)
class TuneLimits:
    """How long the search takes."""

    tolerance: float
    search_s: float = 60.0
    trial_epochs: int = 3
    final_epochs: int = 30


@dataclass(frozen=True)
class Tuned:
    """A model of the search, and what it costs."""

    model: IntegerModel
    widths: BitWidths
    cells: float
    """predicted"""


def tune(
    circuit: FloatCircuit,
    numbers: Array,
    classes: bool,
    of_table: bool,
    cost: Callable[[IntegerModel], float],
    limits: TuneLimits,
) -> list[Tuned]:
    """Integer models from the narrowest to the widest; the last one has wide numbers everywhere.

    `numbers`: the circuit's inputs for training rows, (rows, inputs). `classes`: whether the
    outputs are logits, of which only the largest counts. `of_table`: whether inputs are columns
    of a table, with ranges of their own. `cost`: predicted cells.
    """
    torch.manual_seed(0)
    search = _WidthSearch(circuit, numbers, classes, of_table, cost, limits)
    return search.run()


def tuned_to(
    circuit: FloatCircuit, numbers: Array, classes: bool, widths: BitWidths, limits: TuneLimits
) -> IntegerModel:
    """The integers of a model trained shortly with these widths, without a search."""
    search = _WidthSearch(circuit, numbers, classes, False, lambda _: 0.0, limits)
    return search.trained_with(widths)


class _WidthSearch:
    def __init__(
        self,
        circuit: FloatCircuit,
        numbers: Array,
        classes: bool,
        of_table: bool,
        cost: Callable[[IntegerModel], float],
        limits: TuneLimits,
    ) -> None:
        dense = circuit.layers[0].shape.kind == "dense"
        scale = InputScale.of(numbers, of_table and dense)
        order = np.random.default_rng(0).permutation(len(numbers))
        numbers = numbers[order]
        self._inputs = scale.normalised(numbers)
        self._teacher = Teacher(float_outputs(circuit, numbers).float(), classes)
        self._cost, self._limits = cost, limits
        self._held_out = max(1, round(_HELD_OUT * len(numbers)))
        self._network = QuantisedNetwork(circuit, scale, self._inputs[-512:])
        self._circuit = circuit

    def run(self) -> list[Tuned]:
        """Wide, then narrow as long as the held-out rows permit it."""
        end = time.process_time() + self._limits.search_s
        layers = self._circuit.layers
        network = self._trained(self._network, same_widths(layers, _MOST_BITS))
        wide, best = self._finished(network), self._error(network)
        allowed = best + _SHARE * self._limits.tolerance
        kept = [wide]
        start = self._trained(network, same_widths(layers, _START_BITS))
        if self._error(start) <= allowed:
            network = start
            kept.append(self._finished(network))
        refused: set[tuple[str, int]] = set()
        while time.process_time() < end:
            step = self._next(network, refused)
            if step is None:
                break
            trial = self._trained(network, narrower(network.widths, *step))
            if self._error(trial) <= allowed:
                network = trial
            else:
                refused.add(step)
        if network is not start or len(kept) == 1:
            kept.append(self._finished(network))
        return kept[::-1]

    def trained_with(self, widths: BitWidths) -> IntegerModel:
        """With these widths, trained for `trial_epochs`."""
        return self._trained(self._network, widths).integer_model()

    def _next(self, network: QuantisedNetwork, refused: set[tuple[str, int]]) -> Any:
        """The bit whose loss saves most predicted cells."""
        now = self._cost(network.integer_model())
        saved = {}
        for step in _steps(network.widths):
            if step not in refused:
                trial = copy.deepcopy(network)
                trial.choose_scales(narrower(network.widths, *step))
                saved[step] = now - self._cost(trial.integer_model())
        return max(saved, key=lambda one: saved[one], default=None)

    def _trained(self, network: QuantisedNetwork, widths: BitWidths) -> QuantisedNetwork:
        """A copy with these widths, trained shortly on the rows that are not held out."""
        trial = copy.deepcopy(network)
        trial.choose_scales(widths)
        self._train(trial, self._limits.trial_epochs, len(self._inputs) - self._held_out)
        return trial

    def _finished(self, network: QuantisedNetwork) -> Tuned:
        """Trained longer, on all rows."""
        final = copy.deepcopy(network)
        self._train(final, self._limits.final_epochs, len(self._inputs))
        model = final.integer_model()
        return Tuned(model, final.widths, self._cost(model))

    def _train(self, network: QuantisedNetwork, epochs: int, rows: int) -> None:
        learn(
            lambda batch: network(self._inputs[batch]),
            network.parameters(),
            self._teacher,
            rows=rows,
            epochs=epochs,
            rate=_RATE,
        )

    @torch.no_grad()
    def _error(self, network: QuantisedNetwork) -> float:
        """On the held-out rows: other decisions than the float model's, or relative deviation."""
        outputs = network(self._inputs[-self._held_out :])
        taught = self._teacher.outputs[-self._held_out :]
        if self._teacher.classes:
            return float((outputs.argmax(1) != taught.argmax(1)).float().mean())
        return float((outputs - taught).square().mean().sqrt() / self._teacher.spread)


def _steps(widths: BitWidths) -> Iterator[tuple[str, int]]:
    if widths.inputs > _FEWEST["inputs"]:
        yield "inputs", 0
    for part in ("weights", "outputs"):
        for layer, bits in enumerate(getattr(widths, part)):
            if bits > _FEWEST[part]:
                yield part, layer
