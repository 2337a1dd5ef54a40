"""The circuit that takes a vector with every clock: all layers at once, as adders in stages.

da4ml (Sun et al. 2025, arXiv:2507.04535) turns products with constants into shared adders and
writes the Verilog. Here the integer model is repeated with its symbolic arrays.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np  # noqa: TID253 - only what exports imports this module, in functions

from trainwright.tasks.export.circuits.integer_model import IntegerLayer, IntegerModel

Array = np.ndarray[Any, Any]
MODULE = "pipelined"
_ADDERS_PER_STAGE = 3
"""the most adders between two registers"""


@dataclass(frozen=True)
class PipelinedCircuit:
    """The files of the circuit, and how its ports are packed."""

    files: tuple[Path, ...]
    top: str
    stages: int
    adder_bits: float
    """da4ml's cost: bits of all adders"""
    register_bits: int
    inputs: tuple[int, int]
    """number, bits of each"""
    outputs: tuple[int, int, int]
    """number, bits of each, and how many zeros were left out at each one's end"""

    style = "pipelined"

    @property
    def latency_cycles(self) -> int:
        """From a vector at the input to its outputs."""
        return self.stages + 1


def write_pipelined(model: IntegerModel, folder: Path) -> PipelinedCircuit:
    """Verilog files in `folder`; the top module is `pipelined_wrapper`."""
    from da4ml.codegen import VerilogModel
    from da4ml.trace import comb_trace
    from da4ml.trace.fixed_variable import rd
    from da4ml.trace.fixed_variable_array import FixedVariableArray
    from da4ml.types import minimal_kif

    rd.seed(0)
    random.seed(0)
    count = int(np.prod(model.input_shape))
    bits = input_bits(model)
    signed = int(model.low < 0)
    whole = np.full(count, bits - signed), np.zeros(count, dtype=int)
    inputs = FixedVariableArray.from_kif(np.full(count, signed), *whole)
    values: Any = inputs.reshape(model.input_shape)
    for layer in model.layers:
        values = _traced(values, layer)
    traced = comb_trace(inputs, values.reshape(-1), keep_dead_inputs=True)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with tempfile.TemporaryDirectory(prefix="trainwright-circuit-") as name:
        written = VerilogModel(
            traced, MODULE, name, latency_cutoff=_ADDERS_PER_STAGE, print_latency=False
        )
        written.write()
        for path in sorted(Path(name, "src").rglob("*.v")):
            if path.name != "lookup_table.v":  # not used, and yosys can't read it
                files.append(Path(shutil.copy(path, folder / path.name)))
    kifs = [minimal_kif(one) for one in traced.out_qint]
    fraction = max(int(one[2]) for one in kifs)
    width = max(int(one[0] + one[1]) for one in kifs) + fraction
    pipe = written._pipe
    return PipelinedCircuit(
        tuple(files),
        f"{MODULE}_wrapper",
        len(pipe.solutions),
        float(traced.cost),
        int(pipe.reg_bits),
        (count, bits),
        (len(kifs), width, -fraction),
    )


def input_bits(model: IntegerModel) -> int:
    """Bits of one input integer, its sign included."""
    return max(1, model.high.bit_length() + int(model.low < 0))


def _traced(values: Any, layer: IntegerLayer) -> Any:
    """A layer on symbolic values, (channels, height, width)."""
    shape = layer.shape
    windows = _windows(values, layer)
    if shape.kind == "max-pool":
        return np.amax(windows.reshape((*shape.outputs, shape.terms)), axis=-1)
    if shape.by_channel:
        found = np.stack(
            [
                (windows[channel].reshape((shape.positions, shape.terms)) @ weights[:, None])
                for channel, weights in enumerate(layer.weights)
            ]
        ).reshape(shape.outputs)
    else:
        flat = np.moveaxis(windows, 0, 2).reshape((shape.positions, shape.terms))
        found = (flat @ layer.weights.T).T.reshape(shape.outputs)
    found = found + np.broadcast_to(layer.bias[:, None, None], shape.outputs)
    if layer.low is None or layer.high is None:
        return found.relu() if layer.relu else found
    # da4ml rounds half up, and saturates, as `IntegerLayer.run` does.
    signed = int(layer.low < 0)
    whole = layer.high.bit_length() + layer.shift
    if signed:
        found = found.quantize(1, whole, -layer.shift, "SAT", "RND")
    else:
        found = found.relu().quantize(0, whole, -layer.shift, "SAT", "RND")
    return found * 2.0**-layer.shift


def _windows(values: Any, layer: IntegerLayer) -> Any:
    """(channels, down, across, kernel height, kernel width)"""
    shape = layer.shape
    (top, left), (down, right) = shape.padding, shape.stride
    if top or left:
        values = np.pad(values, ((0, 0), (top, top), (left, left)))
    rows = [
        [
            values[
                :,
                y * down : y * down + shape.kernel[0],
                x * right : x * right + shape.kernel[1],
            ]
            for x in range(shape.outputs[2])
        ]
        for y in range(shape.outputs[1])
    ]
    return np.moveaxis(np.stack([np.stack(row) for row in rows]), 2, 0)
