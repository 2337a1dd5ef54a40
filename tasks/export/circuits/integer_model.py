"""The model as integers: what the circuit computes, bit for bit, in numpy alone.

An export has a copy of this file, so it imports nothing else of this package. A model runs in three
parts: `prepare` makes the circuit's input integers from rows (on the host, in floating point),
`run` is the circuit, and `outputs` turns its integers into the trained model's outputs.

    model = load("model.npz")
    outputs = model.outputs(model.run(model.prepare({"inputs": rows})))

The process that writes the file also runs the code of a user's model. So `load` checks and bounds
every field, and a host program is refused before an array of it is too large.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np  # noqa: TID253 - only what exports imports this module, in functions

Array = np.ndarray[Any, Any]
KINDS = ("dense", "convolution", "depthwise", "sum-pool", "max-pool")
_MOST_EXACT = 2**53
"""sums of products are exact in float64 below this, where matrices multiply fast"""
_MOST_BYTES = 2**26
"""of all arrays of a file"""
_MOST_PRODUCTS = 2**24
"""of a layer, for one row; of a model, for the rows that `run` computes at once"""
_MOST_VALUES = 2**28
"""of all arrays that a host program makes of some rows"""
_MOST_STEPS = 1_000
"""layers, or steps of a host program"""
_MOST_SHIFT = 52


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

    @property
    def padded(self) -> int:
        """Inputs, with those that padding adds."""
        channels, height, width = self.inputs
        return channels * (height + 2 * self.padding[0]) * (width + 2 * self.padding[1])


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
        """The program's result for these inputs, by row.

        Raises ValueError for a step that can't be computed, or would make too large an array.
        """
        values: dict[str, Any] = {**self.constants, **inputs}
        made = 0

        def found(argument: Any) -> Any:
            if isinstance(argument, str):
                return values[argument]
            return [found(one) for one in argument] if isinstance(argument, list) else argument

        try:
            for operation, result, arguments in self.steps:
                given = [found(one) for one in arguments]
                made += _size_of_result(operation, given)
                if made > _MOST_VALUES:
                    raise ValueError(f"more than {_MOST_VALUES:,} values")
                values[result] = HOST_OPERATIONS[operation](*given)
            return np.asarray(values[self.result])
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
            raise ValueError(f"a host program can't be computed: {error}") from error


def _size_of_result(operation: str, arguments: list[Any]) -> int:
    """How many values an operation's result has at most. Raises ValueError for wrong arguments."""
    of_lists = {"cat": 0, "columns": 1, "reshape": 1}
    for place, argument in enumerate(arguments):
        if isinstance(argument, list) and of_lists.get(operation) != place:
            raise ValueError(f"{operation} of a list")
    if operation == "cat":
        return sum(one.size for one in arguments[0])
    arrays = [one for one in arguments if isinstance(one, np.ndarray)]
    if not arrays:
        raise ValueError(f"{operation} without an array")
    if operation == "one_hot_sum":
        return int(arrays[0].size * arguments[1])
    if operation == "columns":
        others = math.prod(arrays[0].shape[2:])
        return int(len(arrays[0]) * np.asarray(arguments[1]).size * others)
    if operation == "slice" and arguments[1] not in range(arrays[0].ndim):
        raise ValueError(f"a slice of dimension {arguments[1]}")
    return math.prod(np.broadcast_shapes(*(one.shape for one in arrays)))


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
        """The input integers of rows, given as arrays by name: (rows, inputs), int64.

        Raises ValueError if the host program does not give the circuit's inputs for each row.
        """
        numbers = self.before.run(rows)
        count, wanted = len(next(iter(rows.values()))), math.prod(self.input_shape)
        if numbers.size != count * wanted:
            raise ValueError(f"{numbers.size} numbers for {count} rows of {wanted} inputs")
        return self.quantised(numbers.reshape(count, -1))

    def quantised(self, numbers: Array) -> Array:
        """The input integers of numbers, (rows, inputs)."""
        scaled = np.floor((numbers.astype(np.float64) - self.centre) * self.scale + 0.5)
        return np.asarray(np.clip(scaled, self.low, self.high).astype(np.int64))

    def run(self, integers: Array) -> Array:
        """The circuit: (rows, inputs) -> (rows, outputs), int64."""
        rows = integers.reshape(-1, *self.input_shape).astype(np.int64)
        sizes = [max(one.shape.count * one.shape.terms, one.shape.padded) for one in self.layers]
        at_once = max(_MOST_PRODUCTS // max(sizes), 1)
        parts = []
        for at in range(0, max(len(rows), 1), at_once):
            values = rows[at : at + at_once]
            for layer in self.layers:
                values = layer.run(values)
            parts.append(values.reshape(len(values), self.layers[-1].shape.count))
        return np.concatenate(parts)

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
    """The model in a .npz file. Nothing in it is unpickled.

    Raises ValueError, in one line, if a field is missing, unknown, too large or does not fit.
    """
    try:
        model = _read(_arrays(path))
        _require_consistent(model)
        return model
    except (
        *(ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError),
        *(zipfile.BadZipFile, EOFError),
    ) as error:
        said = " ".join(str(error).split())[:200]
        raise ValueError(f"model.npz is not an integer model: {said}") from error


def _arrays(path: str | Path) -> dict[str, Array]:
    """The arrays of a file by name, read only if they are numbers and as large as they say."""
    found = {}
    with zipfile.ZipFile(path) as archive:
        total = sum(one.file_size for one in archive.infolist())
        _require(total <= _MOST_BYTES, f"{total:,} bytes; allowed: {_MOST_BYTES:,}")
        for one in archive.infolist():
            _require(one.compress_type == zipfile.ZIP_STORED, f"{one.filename} is compressed")
            content = archive.read(one)
            file = io.BytesIO(content)
            _require(np.lib.format.read_magic(file) == (1, 0), f"the format of {one.filename}")
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            fits = math.prod(shape) * dtype.itemsize == len(content) - file.tell()
            _require(dtype.kind in "biuf" and fits, f"the array {one.filename}")
            array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
            found[one.filename.removesuffix(".npy")] = array
    return found


def _read(arrays: dict[str, Array]) -> IntegerModel:
    said = json.loads(bytes(arrays["text"]))
    _require(0 < len(said["layers"]) <= _MOST_STEPS, f"{len(said['layers'])} layers")
    layers = [
        IntegerLayer(
            _shape(one["shape"]),
            _integers(arrays[f"weights-{number}"]),
            _integers(arrays[f"bias-{number}"]),
            _whole(one["shift"], 0, _MOST_SHIFT),
            None if one["low"] is None else _whole(one["low"]),
            None if one["high"] is None else _whole(one["high"]),
            bool(one["relu"]),
        )
        for number, one in enumerate(said["layers"])
    ]
    before, after = (_program(name, said["programs"][name], arrays) for name in ("before", "after"))
    return IntegerModel(
        before,
        arrays["centre"],
        arrays["scale"],
        _whole(said["low"]),
        _whole(said["high"]),
        tuple(layers),
        float(said["output_scale"]),
        after,
    )


def _program(name: str, said: dict[str, Any], arrays: dict[str, Array]) -> HostProgram:
    """A stored host program, of known operations."""
    _require(len(said["steps"]) <= _MOST_STEPS, f"{len(said['steps'])} steps")
    for operation, result, arguments in said["steps"]:
        _require(operation in HOST_OPERATIONS, f"the operation {operation!r}")
        _require(isinstance(result, str) and isinstance(arguments, list), f"a step {operation}")
    constants = {
        key.removeprefix(f"{name}-"): value
        for key, value in arrays.items()
        if key.startswith(f"{name}-")
    }
    steps = tuple((operation, result, tuple(given)) for operation, result, given in said["steps"])
    return HostProgram(steps, str(said["result"]), constants)


def _shape(said: dict[str, Any]) -> LayerShape:
    """A stored shape. Only whole numbers and known kinds, because they end up in Verilog."""
    _require(said["kind"] in KINDS, f"a layer of the kind {said['kind']!r}")
    inputs, outputs = ([_whole(one, 1) for one in said[name]] for name in ("inputs", "outputs"))
    kernel, stride = ([_whole(one, 1) for one in said[name]] for name in ("kernel", "stride"))
    top, left = (_whole(one, 0) for one in said["padding"])
    return LayerShape(
        str(said["name"]),
        said["kind"],
        (inputs[0], inputs[1], inputs[2]),
        (outputs[0], outputs[1], outputs[2]),
        (kernel[0], kernel[1]),
        (stride[0], stride[1]),
        (top, left),
    )


def _require_consistent(model: IntegerModel) -> None:
    """Raises ValueError unless layers fit together and every sum is exact in 53 bits."""
    inputs = math.prod(model.input_shape)
    for name, array in (("centre", model.centre), ("scale", model.scale)):
        _require(array.shape in ((1,), (inputs,)), f"{name} of the shape {array.shape}")
        _require(bool(np.isfinite(array).all()), f"{name} is not finite")
    _require(math.isfinite(model.output_scale), "output_scale is not finite")
    _require(model.low <= model.high, f"inputs from {model.low} to {model.high}")
    ends, given = (model.low, model.high), model.input_shape
    for number, layer in enumerate(model.layers):
        _require(layer.shape.inputs == given, f"layer {number} takes {layer.shape.inputs}")
        _require_layer(number, layer)
        most = float(max(map(abs, ends)))
        if layer.shape.kind != "max-pool":
            products = np.abs(layer.weights.astype(np.float64)).sum(1) * most
            most = float((products + np.abs(layer.bias.astype(np.float64))).max())
        most += 2.0**layer.shift
        _require(most < _MOST_EXACT, f"layer {number} has sums of more than 53 bits")
        ends, given = layer.output_range(*ends), layer.shape.outputs


def _require_layer(number: int, layer: IntegerLayer) -> None:
    """Raises ValueError unless sizes and arrays of a layer fit together."""
    shape, what = layer.shape, f"layer {number}: "
    large = max(shape.count * shape.terms, shape.padded)
    _require(large <= _MOST_PRODUCTS, f"{what}{large:,} products; allowed: {_MOST_PRODUCTS:,}")
    for side in (0, 1):
        room = shape.inputs[side + 1] + 2 * shape.padding[side] - shape.kernel[side]
        fits = room >= 0 and shape.outputs[side + 1] <= room // shape.stride[side] + 1
        _require(fits, f"{what}its kernel does not give {shape.outputs}")
    _require(not shape.by_channel or shape.inputs[0] == shape.outputs[0], f"{what}its channels")
    bounded = layer.low is not None and layer.high is not None
    _require(bounded or (layer.low is None and layer.high is None), f"{what}one bound")
    _require(not bounded or (layer.low or 0) <= (layer.high or 0), f"{what}low above high")
    if shape.kind != "max-pool":
        wanted = (shape.outputs[0], shape.terms)
        _require(layer.weights.shape == wanted, f"{what}weights of {layer.weights.shape}")
        _require(layer.bias.shape == wanted[:1], f"{what}biases of {layer.bias.shape}")


def _whole(value: Any, low: int = -(2**31), high: int = 2**31) -> int:
    """A whole number in a range."""
    fits = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    _require(fits, f"got {str(value)[:40]}; allowed: whole numbers from {low} to {high}")
    return int(value)


def _integers(array: Array) -> Array:
    _require(array.dtype.kind == "i", f"weights of the type {array.dtype}")
    return array.astype(np.int64)


def _require(fits: bool, what: str) -> None:
    if not fits:
        raise ValueError(what)
