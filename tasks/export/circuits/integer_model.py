"""The model as integers: what the circuit computes, bit for bit, in numpy alone.

An export has a copy of this file, so it imports nothing else of this package. A model runs in three
parts: `prepare` makes the circuit's input integers from rows (on the host, in floating point),
`run` is the circuit, and `outputs` turns its integers into the trained model's outputs.

    model = load("model.npz")
    outputs = model.outputs(model.run(model.prepare({"inputs": rows})))
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np  # noqa: TID253 - only what exports imports this module, in functions

Array = np.ndarray[Any, Any]
KINDS = ("dense", "convolution", "depthwise", "sum-pool", "max-pool")
_MOST_EXACT = 2**53
"""sums of products are exact in float64 below this, where matrices multiply fast"""


@dataclass(frozen=True)
class LayerShape:
    """Where a layer reads and writes. A dense layer's kernel is its whole input."""

    name: str
    """the module's path in the user's model, for messages and reports only"""
    kind: str
    """one of KINDS"""
    inputs: tuple[int, int, int]
    """channels, height, width; a vector of n values is (n, 1, 1)"""
    outputs: tuple[int, int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)

    @property
    def by_channel(self) -> bool:
        """Whether an output depends on one input channel only."""
        return self.kind in ("depthwise", "sum-pool", "max-pool")

    @property
    def terms(self) -> int:
        """Products, or compared values, of one output."""
        channels = 1 if self.by_channel else self.inputs[0]
        return channels * self.kernel[0] * self.kernel[1]

    @property
    def positions(self) -> int:
        """Outputs per output channel."""
        return self.outputs[1] * self.outputs[2]

    @property
    def count(self) -> int:
        """Outputs."""
        return self.outputs[0] * self.positions


@dataclass(frozen=True)
class IntegerLayer:
    """y = clip((W·x + b + half) >> shift, low, high); a max-pool has neither W, b nor shift.

    Without `low` and `high` (the last layer) the sum itself is the output, or its positive part.
    """

    shape: LayerShape
    weights: Array
    """(outputs, terms) for a dense layer or a convolution, (channels, terms) by channel; int64"""
    bias: Array
    """one for each output channel; int64"""
    shift: int = 0
    low: int | None = None
    high: int | None = None
    relu: bool = False

    def sums(self, inputs: Array) -> Array:
        """W·x + b, or the largest value of each window. (rows, c, h, w) -> (rows, c, h, w)."""
        shape = self.shape
        (top, left), (down, right) = shape.padding, shape.stride
        padded = np.pad(inputs, ((0, 0), (0, 0), (top, top), (left, left)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, shape.kernel, (2, 3))
        windows = windows[:, :, ::down, ::right][:, :, : shape.outputs[1], : shape.outputs[2]]
        if shape.kind == "max-pool":
            return np.asarray(windows.max((4, 5)))
        rows = windows.shape[0]
        if shape.by_channel:
            flat = windows.reshape(*windows.shape[:4], -1)
            found = np.einsum("rchwk,ck->rchw", flat, self.weights)
        else:
            flat = windows.transpose(0, 2, 3, 1, 4, 5).reshape(rows * shape.positions, -1)
            product = _product(flat, self.weights.T).reshape(rows, *shape.outputs[1:], -1)
            found = product.transpose(0, 3, 1, 2)
        return np.asarray(found + self.bias[:, None, None])

    def run(self, inputs: Array) -> Array:
        """The outputs for these inputs, (rows, channels, height, width), int64."""
        found = self.sums(inputs)
        if self.low is None or self.high is None:
            return np.asarray(np.maximum(found, 0)) if self.relu else found
        half = 1 << (self.shift - 1) if self.shift else 0
        return np.asarray(np.clip((found + half) >> self.shift, self.low, self.high))

    def sum_range(self, low: int, high: int) -> tuple[int, int]:
        """The smallest and the largest sum, on the way to it too, for inputs in low..high."""
        if self.shape.kind == "max-pool":
            return low, high
        ends = self.weights * low, self.weights * high
        padded = any(self.shape.padding)
        least, most = np.minimum(*ends), np.maximum(*ends)
        if padded or low > 0 or high < 0:
            least, most = np.minimum(least, 0), np.maximum(most, 0)
        lows = np.minimum(least, 0).sum(1) + np.minimum(self.bias, 0)
        highs = np.maximum(most, 0).sum(1) + np.maximum(self.bias, 0)
        return int(lows.min()), int(highs.max())

    def output_range(self, low: int, high: int) -> tuple[int, int]:
        """The smallest and the largest output for inputs in low..high."""
        if self.shape.kind == "max-pool":
            return low, high
        if self.low is None or self.high is None:
            least, most = self.sum_range(low, high)
            return (0, max(most, 0)) if self.relu else (least, most)
        return self.low, self.high


def _product(left: Array, right: Array) -> Array:
    """A matrix product of integers, exact."""
    bound = float(np.abs(left).max(initial=0)) * float(np.abs(right).sum(0).max(initial=0))
    if bound < _MOST_EXACT:
        return np.asarray((left.astype(np.float64) @ right.astype(np.float64)).astype(np.int64))
    return np.asarray(left @ right)


@dataclass(frozen=True)
class HostProgram:
    """Elementwise work of the host, before or after the circuit.

    A step is (operation, result, arguments). An argument that is a text names a value: an input, a
    constant or an earlier result.
    """

    steps: tuple[tuple[str, str, tuple[Any, ...]], ...]
    result: str
    constants: dict[str, Array] = field(default_factory=dict)

    def run(self, inputs: Mapping[str, Array]) -> Array:
        """The program's result for these inputs, by row."""
        values: dict[str, Any] = {**self.constants, **inputs}

        def found(argument: Any) -> Any:
            if isinstance(argument, str):
                return values[argument]
            return [found(one) for one in argument] if isinstance(argument, list) else argument

        for operation, result, arguments in self.steps:
            values[result] = HOST_OPERATIONS[operation](*map(found, arguments))
        return np.asarray(values[self.result])


def _clamp(x: Array, low: Any = None, high: Any = None) -> Array:
    x = x if low is None else np.maximum(x, low)
    return x if high is None else np.minimum(x, high)


def _one_hot_sum(codes: Array, count: int) -> Array:
    """How often each code occurs in a row. (rows, columns) -> (rows, count)."""
    return np.asarray((codes[:, :, None] == np.arange(count)).sum(1).astype(np.float32))


def _softmax(x: Array, dim: int) -> Array:
    powers = np.exp(x - x.max(dim, keepdims=True))
    return np.asarray(powers / powers.sum(dim, keepdims=True))


HOST_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y, alpha=1: x + alpha * y,
    "sub": lambda x, y, alpha=1: x - alpha * y,
    "rsub": lambda x, y, alpha=1: y - alpha * x,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "square": np.square,
    "pow": lambda x, y: x**y,
    "exp": np.exp,
    "log": np.log,
    "log1p": np.log1p,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "clamp": _clamp,
    "isnan": np.isnan,
    "nan_to_num": lambda x, *_: np.nan_to_num(x),
    "where": np.where,
    "logical_not": np.logical_not,
    "cat": lambda parts, dim=0: np.concatenate(
        [np.asarray(one, dtype=np.float32) for one in parts], dim
    ),
    "columns": lambda x, columns: x[:, columns],
    "slice": lambda x, dim, start, end: x[(slice(None),) * dim + (slice(start, end),)],
    "reshape": lambda x, shape: x.reshape(-1, *shape),
    "float": lambda x: np.asarray(x, dtype=np.float32),
    "one_hot_sum": _one_hot_sum,
    "softmax": _softmax,
    "log_softmax": lambda x, dim: np.log(_softmax(x, dim)),
}


@dataclass(frozen=True)
class IntegerModel:
    """A host program, a circuit, a host program. `load` and `save` keep it in one .npz file."""

    before: HostProgram
    """rows -> the circuit's input as numbers"""
    centre: Array
    scale: Array
    """input integer = round((number - centre) * scale), one for each input or one for all"""
    low: int
    high: int
    """the range of the input integers"""
    layers: tuple[IntegerLayer, ...]
    output_scale: float
    """the value of 1 in the circuit's output"""
    after: HostProgram
    """numbers of the circuit's output, named `circuit` -> the model's outputs"""

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return self.layers[0].shape.inputs

    def prepare(self, rows: Mapping[str, Array]) -> Array:
        """The input integers of rows, given as arrays by name: (rows, inputs), int64."""
        numbers = self.before.run(rows)
        return self.quantised(numbers.reshape(len(numbers), -1))

    def quantised(self, numbers: Array) -> Array:
        """The input integers of numbers, (rows, inputs)."""
        scaled = np.floor((numbers.astype(np.float64) - self.centre) * self.scale + 0.5)
        return np.asarray(np.clip(scaled, self.low, self.high).astype(np.int64))

    def run(self, integers: Array) -> Array:
        """The circuit: (rows, inputs) -> (rows, outputs), int64."""
        values = integers.reshape(-1, *self.input_shape).astype(np.int64)
        for layer in self.layers:
            values = layer.run(values)
        return values.reshape(len(values), -1)

    def outputs(self, integers: Array) -> Array:
        """The trained model's outputs, from the circuit's."""
        return self.after.run({"circuit": integers * self.output_scale})

    def ranges(self) -> list[tuple[int, int]]:
        """The smallest and the largest value: of the input, then of each layer's outputs."""
        found = [(self.low, self.high)]
        for layer in self.layers:
            found.append(layer.output_range(*found[-1]))
        return found

    def save(self, path: Path) -> None:
        """Write one .npz file."""
        arrays: dict[str, Array] = {"centre": self.centre, "scale": self.scale}
        layers = []
        for number, layer in enumerate(self.layers):
            arrays[f"weights-{number}"], arrays[f"bias-{number}"] = layer.weights, layer.bias
            layers.append(
                {
                    "shape": asdict(layer.shape),
                    "shift": layer.shift,
                    "low": layer.low,
                    "high": layer.high,
                    "relu": layer.relu,
                }
            )
        programs = {}
        for name, program in (("before", self.before), ("after", self.after)):
            programs[name] = {"steps": program.steps, "result": program.result}
            arrays |= {f"{name}-{one}": value for one, value in program.constants.items()}
        numbers = {"low": self.low, "high": self.high, "output_scale": self.output_scale}
        text = json.dumps({"layers": layers, "programs": programs, **numbers})
        arrays["text"] = np.frombuffer(text.encode(), dtype=np.uint8)
        with open(path, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)


def load(path: str | Path) -> IntegerModel:
    """The model in a .npz file. Nothing in it is unpickled."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    said = json.loads(bytes(arrays["text"]))
    layers = [
        IntegerLayer(
            _shape(one["shape"]),
            arrays[f"weights-{number}"].astype(np.int64),
            arrays[f"bias-{number}"].astype(np.int64),
            int(one["shift"]),
            None if one["low"] is None else int(one["low"]),
            None if one["high"] is None else int(one["high"]),
            bool(one["relu"]),
        )
        for number, one in enumerate(said["layers"])
    ]
    programs = {}
    for name in ("before", "after"):
        steps = tuple(
            (step[0], step[1], tuple(step[2])) for step in said["programs"][name]["steps"]
        )
        constants = {
            key.removeprefix(f"{name}-"): value
            for key, value in arrays.items()
            if key.startswith(f"{name}-")
        }
        programs[name] = HostProgram(steps, said["programs"][name]["result"], constants)
    return IntegerModel(
        programs["before"],
        arrays["centre"],
        arrays["scale"],
        int(said["low"]),
        int(said["high"]),
        tuple(layers),
        float(said["output_scale"]),
        programs["after"],
    )


def _shape(said: dict[str, Any]) -> LayerShape:
    """A stored shape. Only whole numbers and known kinds, because they end up in Verilog."""
    if said["kind"] not in KINDS:
        raise ValueError(f"a layer of the kind {said['kind']!r}")
    inputs, outputs = (tuple(map(int, said[name])) for name in ("inputs", "outputs"))
    kernel, stride, padding = (tuple(map(int, said[n])) for n in ("kernel", "stride", "padding"))
    return LayerShape(
        str(said["name"]),
        said["kind"],
        (inputs[0], inputs[1], inputs[2]),
        (outputs[0], outputs[1], outputs[2]),
        (kernel[0], kernel[1]),
        (stride[0], stride[1]),
        (padding[0], padding[1]),
    )
