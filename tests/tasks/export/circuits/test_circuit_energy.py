"""The estimated energy of an inference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainwright.tasks.export.circuits.circuit_energy import energy_j
from trainwright.tasks.export.circuits.pipelined import PipelinedCircuit
from trainwright.tasks.export.circuits.sequential import SequentialCircuit

PIPELINED = PipelinedCircuit((), "top", 3, 900.0, 400, (4, 5), (2, 9, 0))
SEQUENTIAL = SequentialCircuit(
    (),
    (),
    "top",
    input_bits=4,
    value_bits=6,
    weight_bits=4,
    sum_bits=14,
    values=20,
    weights=80,
    biases=12,
    products=80,
    latency_cycles=200,
)


def test_a_pipelined_circuit_takes_the_energy_of_its_cells_once() -> None:
    assert energy_j(PIPELINED, 800) == pytest.approx(800 / 8 * 0.03e-12 * 14)


def test_a_sequential_circuit_takes_that_of_its_cells_and_memories_with_every_cycle() -> None:
    of_cycle = 240 / 8 * 0.03e-12 * 14 + (6 + 4 + 14) / 64 * 10e-12
    assert energy_j(SEQUENTIAL, 240) == pytest.approx(200 * of_cycle)
    longer = replace(SEQUENTIAL, latency_cycles=400)
    assert energy_j(longer, 240) == pytest.approx(2 * energy_j(SEQUENTIAL, 240))
