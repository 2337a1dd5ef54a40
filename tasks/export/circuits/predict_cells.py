"""Predicts a circuit's cells before anything is synthesised.

Pipelined: a product with a constant is a sum of shifted inputs, one for each nonzero digit of the
constant's canonical signed-digit form; da4ml then shares adders. So the size of a layer is

    adder bits = positions · FACTOR · adders^POWER · (input bits + OFFSET)^WIDTH_POWER
    cells      = CELLS_PER_ADDER_BIT · adder bits + CELLS_PER_REGISTER_BIT · register bits

with REGISTERS register bits for each adder bit. Once da4ml has shared the adders and placed the
registers, its own counts of both replace the estimates. Sequential:

    cells = FIXED + PER_SUM_BIT · bits of the sum + PER_ADDRESS_BIT · layers · bits of an address

The constants are fits: of adder bits to random layers, of cells to the first ten nets of
`tests/benchmarks/export/circuits.py --fresh 10 --seed 100`. Other seeds give nets to judge by.
"""

from __future__ import annotations

from typing import Any

import numpy as np  # noqa: TID253 - only what exports imports this module, in functions

from trainwright.tasks.export.circuits.integer_model import IntegerLayer, IntegerModel
from trainwright.tasks.export.circuits.pipelined import PipelinedCircuit
from trainwright.tasks.export.circuits.sequential import SequentialCircuit

Array = np.ndarray[Any, Any]
_FACTOR, _POWER = 2.746, 0.934
_OFFSET, _WIDTH_POWER = -0.459, 0.66
_COMPARED = 1.7
"""adder bits of a comparison, for each bit of its values"""
CELLS_PER_ADDER_BIT = {"ice40": 1.12, "ecp5": 1.52}
CELLS_PER_REGISTER_BIT = {"ice40": 0.36, "ecp5": 0.0}
REGISTERS = 0.48
_FIXED = {"ice40": 45.3, "ecp5": 26.6}
_PER_SUM_BIT = {"ice40": 4.54, "ecp5": 10.5}
_PER_ADDRESS_BIT = {"ice40": 6.49, "ecp5": 6.11}
"""for each bit of an address of values, and each layer"""
_DSP_BITS, _PRODUCT_CELLS = 11, 2.29
"""a narrower product is made of lookup tables on iCE40, so many for each pair of bits"""


def cells_of_adders(bits: float, family: str) -> float:
    """Four-input lookup tables of a pipelined circuit with these adder bits, before it is made."""
    return bits * (CELLS_PER_ADDER_BIT[family] + REGISTERS * CELLS_PER_REGISTER_BIT[family])


def pipelined_cells(circuit: PipelinedCircuit, family: str) -> float:
    """Four-input lookup tables of a pipelined circuit."""
    adders = CELLS_PER_ADDER_BIT[family] * circuit.adder_bits
    return adders + CELLS_PER_REGISTER_BIT[family] * circuit.register_bits


def sequential_cells(circuit: SequentialCircuit, layers: int, family: str) -> float:
    """Four-input lookup tables of a sequential circuit. Its memories are blocks."""
    addresses = layers * (circuit.values - 1).bit_length()
    cells = _FIXED[family] + _PER_SUM_BIT[family] * circuit.sum_bits
    cells += _PER_ADDRESS_BIT[family] * addresses
    if family == "ice40" and circuit.value_bits + circuit.weight_bits < _DSP_BITS:
        cells += _PRODUCT_CELLS * circuit.value_bits * circuit.weight_bits
    return cells


def adder_bits(model: IntegerModel) -> list[float]:
    """By layer: the bits of its adders in a pipelined circuit."""
    ranges = model.ranges()
    return [_layer_bits(layer, *ranges[at]) for at, layer in enumerate(model.layers)]


def _layer_bits(layer: IntegerLayer, low: int, high: int) -> float:
    shape = layer.shape
    width = max(high, -low - 1, 1).bit_length() + int(low < 0)
    if shape.kind == "max-pool":
        return _COMPARED * shape.count * (shape.terms - 1) * width
    adders = float(np.maximum(signed_digits(layer.weights).sum(1) - 1, 0).sum())
    of_one = _FACTOR * (adders + 1) ** _POWER * (width + _OFFSET) ** _WIDTH_POWER
    return float(shape.positions * of_one)


def signed_digits(numbers: Array) -> Array:
    """How many nonzero digits each number has in canonical signed-digit form.

    Their count is that of the ones in n XOR 3n, where n is the number's size.
    """
    size = np.abs(numbers).astype(np.int64)
    changed = size ^ (3 * size)
    count = np.zeros_like(changed)
    while changed.any():
        count += changed & 1
        changed >>= 1
    return count
