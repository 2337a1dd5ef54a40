"""Estimates the energy of one inference from a circuit's cells.

    pipelined:   E = cells · E_cell
    sequential:  E = cycles · (cells · E_cell + bits read from memories · E_bit)

One 8-bit addition takes 0.03 pJ, and a read of 64 bits from an 8 KiB memory 10 pJ, in 45 nm logic
(Horowitz, "Computing's energy problem", ISSCC 2014, figure 1.1.9). The logic of an FPGA takes 14
times the dynamic power of an ASIC's (Kuon and Rose, "Measuring the gap between FPGAs and ASICs",
IEEE TCAD 26(2), 2007); its memories are as an ASIC's. A lookup table counts as one bit of an adder
that works with every clock. Leakage, clock tree, pins and multiplier
blocks are left out.
"""

from __future__ import annotations

from trainwright.tasks.export.circuits.pipelined import PipelinedCircuit
from trainwright.tasks.export.circuits.sequential import SequentialCircuit

_CELL_J = 0.03e-12 / 8 * 14
_READ_BIT_J = 10e-12 / 64
SOURCE = (
    "estimate, dynamic only: cells as one-bit adders of Horowitz (ISSCC 2014, 45 nm) times 14 for "
    "an FPGA (Kuon and Rose 2007)"
)


def energy_j(circuit: PipelinedCircuit | SequentialCircuit, lookup_tables: int) -> float:
    """Joules of one inference."""
    if isinstance(circuit, PipelinedCircuit):
        return lookup_tables * _CELL_J
    read = circuit.value_bits + circuit.weight_bits + circuit.sum_bits
    return circuit.latency_cycles * (lookup_tables * _CELL_J + read * _READ_BIT_J)
