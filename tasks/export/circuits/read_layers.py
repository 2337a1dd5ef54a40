"""Reads a trained torch module as a chain of layers that a circuit can have.

`torch.export` gives the graph of operations. What stands before the first dense or convolutional
layer, and after the last one, becomes a program for the host; what stands between must be a chain
of the operations listed in `ALLOWED`. Runs in the sandbox, because tracing runs the user's code.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np  # noqa: TID253 - this is a separate process
import torch  # noqa: TID253

from trainwright.estimator.errors import BadInput
from trainwright.estimator.trace.source import described
from trainwright.tasks.export.circuits.integer_model import HostProgram, LayerShape
from trainwright.tasks.export.failing_module import failing_module

Array = np.ndarray[Any, Any]
ALLOWED = (
    "dense and convolutional layers, batch normalisation, ReLU, max- and average-pooling, "
    "flatten, one after the other"
)


@dataclass(frozen=True)
class FloatLayer:
    """A layer with the trained numbers; a ReLU belongs to the layer before it."""

    shape: LayerShape
    weights: Array
    """(outputs, terms), or (channels, terms) by channel; empty for a max-pool"""
    bias: Array
    relu: bool = False


@dataclass(frozen=True)
class FloatCircuit:
    """A trained model: what the host does, the layers, what the host does with their outputs."""

    before: HostProgram
    layers: tuple[FloatLayer, ...]
    after: HostProgram


@dataclass(frozen=True)
class _OnHost:
    """A value by row that the host computes, before any layer or after the last one."""

    name: str
    shape: tuple[int, ...]
    of_circuit: bool = False


@dataclass(frozen=True)
class _Embedded:
    """Rows of an embedding's weights, which a sum over columns makes a dense layer."""

    codes: _OnHost
    weights: torch.Tensor


@dataclass(frozen=True)
class _DenseSum:
    """A sum of dense layers of host values: one dense layer of all these values together."""

    parts: tuple[tuple[_OnHost, torch.Tensor], ...]
    bias: torch.Tensor
    module: str


@dataclass(frozen=True)
class _Signal:
    """The output of a chain of layers."""

    source: _OnHost
    layers: tuple[FloatLayer, ...]
    shape: tuple[int, ...]
    """of one row, as torch sees it"""
    gain: float = 1.0
    """the value is the layers' output times this, which the next weights take over"""


def read(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> FloatCircuit:
    """The layers of a model in eval mode, traced with these few rows.

    Raises BadInput that names the module and the operation that a circuit can't have.
    """
    given: Any = next(iter(inputs.values())) if len(inputs) == 1 else inputs
    model.eval()

    def trace() -> torch.export.ExportedProgram:
        return torch.export.export(model, (given,))

    try:
        exported = trace()
    except Exception as error:
        where = failing_module(model, trace)
        raise BadInput(
            f"model: {where}can't be traced by torch.export: {described(error)}; allowed for --to "
            f"rtl: {ALLOWED}"
        ) from error
    return _Reader(exported, inputs).circuit()


class _Reader:
    """Walks through the graph; each node is a constant, a host value or a value of the circuit."""

    def __init__(self, exported: Any, inputs: dict[str, torch.Tensor]) -> None:
        self._graph, self._rows = exported.graph, len(next(iter(inputs.values())))
        self._steps: list[tuple[str, str, tuple[Any, ...]]] = []
        self._after: list[tuple[str, str, tuple[Any, ...]]] = []
        self._constants: dict[str, Array] = {}
        self._values: dict[str, Any] = {}
        signature = exported.graph_signature
        stored = {**exported.state_dict, **exported.constants}
        for specification in signature.input_specs:
            if specification.target is not None:
                tensor = stored[specification.target].detach()
                self._values[specification.arg.name] = tensor
        for name, given in zip(inputs, signature.user_inputs, strict=True):
            self._values[given] = _OnHost(name, tuple(inputs[name].shape[1:]))
        self._input_shapes = {name: tuple(one.shape[1:]) for name, one in inputs.items()}

    def circuit(self) -> FloatCircuit:
        """Raises BadInput at the first node that does not fit."""
        returned: Any = None
        for node in self._graph.nodes:
            if node.op == "output":
                returned = node.args[0]
            elif node.op == "call_function":
                self._values[node.name] = self._value(node)
        if not isinstance(returned, tuple | list) or len(returned) != 1:
            raise BadInput("model: returns several tensors; allowed for --to rtl: a single tensor")
        return self._finished(self._values[returned[0].name])

    def _finished(self, value: Any) -> FloatCircuit:
        value = self._to_host(value)
        if not isinstance(value, _OnHost) or not value.of_circuit:
            raise BadInput(
                "model: has no dense or convolutional layer; allowed for --to rtl: a model with one"
            )
        signal = self._signal
        names = {one for step in self._after for one in _names(step[2])}
        before = {one for step in self._steps for one in _names(step[2])}
        constants = self._constants.items()
        return FloatCircuit(
            HostProgram(
                tuple(self._steps),
                signal.source.name,
                {name: array for name, array in constants if name in before},
            ),
            signal.layers,
            HostProgram(
                tuple(self._after),
                value.name,
                {name: array for name, array in constants if name in names},
            ),
        )

    def _value(self, node: Any) -> Any:
        """What a node computes."""
        name = _operation(node)
        arguments = [self._found(one) for one in node.args]
        keywords = {key: self._found(one) for key, one in node.kwargs.items()}
        if not _any_row_value([*arguments, *keywords.values()]):
            return node.target(*arguments, **keywords)
        if name.startswith("_assert") or name == "sym_size":
            return None
        first = arguments[0]
        if name in _IDENTITIES and not isinstance(first, _OnHost):
            return first
        if name in _LAYERS and isinstance(first, _OnHost | _DenseSum | _Signal | torch.Tensor):
            return _LAYERS[name](self, node, *arguments, **keywords)
        if name == "add" and any(isinstance(one, _DenseSum) for one in arguments):
            return self._sum(node, *arguments)
        return self._host_step(node, name, arguments, keywords)

    def _found(self, argument: Any) -> Any:
        if isinstance(argument, torch.fx.Node):
            return self._values[argument.name]
        if isinstance(argument, list | tuple):
            return [self._found(one) for one in argument]
        return argument

    # Layers

    def _linear(
        self, node: Any, x: Any, weights: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Any:
        bias = torch.zeros(len(weights)) if bias is None else bias
        if isinstance(x, _OnHost) and not x.of_circuit and len(x.shape) == 1:
            return _DenseSum(((x, weights.double()),), bias.double(), _module(node))
        signal = self._as_signal(node, x)
        if len(signal.shape) != 1:
            raise self._refused(node, "a dense layer of an input that is not flat")
        inputs = _three(signal)
        shape = LayerShape(
            _module(node), "dense", inputs, (len(weights), 1, 1), (inputs[1], inputs[2])
        )
        return self._with(signal, shape, weights, bias)

    def _convolution(
        self,
        node: Any,
        x: Any,
        weights: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        signal = self._as_signal(node, x)
        if len(signal.shape) != 3:
            raise self._refused(node, "a convolution of anything but (channels, height, width)")
        kernel = (int(weights.shape[2]), int(weights.shape[3]))
        if padding in ("same", "valid"):
            if padding == "same" and any(one % 2 == 0 for one in kernel):
                raise self._refused(node, "padding 'same' with an even kernel")
            padding = [one // 2 if padding == "same" else 0 for one in kernel]
        channels = signal.shape[0]
        if _pair(dilation) != (1, 1):
            raise self._refused(node, "a convolution with dilation")
        if groups not in (1, channels) or (groups > 1 and len(weights) != channels):
            raise self._refused(node, "a convolution with groups")
        kind = "depthwise" if groups > 1 else "convolution"
        outputs = _windows(signal.shape, kernel, _pair(stride), _pair(padding))
        shape = LayerShape(
            _module(node),
            kind,
            _three(signal),
            (len(weights), *outputs),
            kernel,
            _pair(stride),
            _pair(padding),
        )
        bias = torch.zeros(len(weights)) if bias is None else bias
        return self._with(signal, shape, weights.reshape(len(weights), -1), bias)

    def _norm(
        self,
        node: Any,
        x: Any,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor | None,
        variance: torch.Tensor | None,
        training: bool,
        momentum: float,
        epsilon: float,
        *_: Any,
    ) -> Any:
        if training or mean is None or variance is None:
            raise self._refused(node, "batch normalisation without stored statistics")
        scale = (variance.double() + epsilon).rsqrt() * (1 if weight is None else weight.double())
        shift = (0 if bias is None else bias.double()) - mean.double() * scale
        shift = torch.as_tensor(shift).expand_as(scale)
        if isinstance(x, _OnHost):
            by_channel = (-1, *(1,) * (len(x.shape) - 1))
            scaled = self._step(x, "mul", [x.name, self._constant(scale.reshape(by_channel))])
            return self._step(x, "add", [scaled.name, self._constant(shift.reshape(by_channel))])
        signal = self._as_signal(node, x)
        last = signal.layers[-1]
        weighs = last.shape.kind in ("dense", "convolution", "depthwise")
        if weighs and not last.relu and signal.gain == 1:
            weights = last.weights * scale.numpy()[:, None]
            folded = replace(last, weights=weights, bias=last.bias * scale.numpy() + shift.numpy())
            return replace(signal, layers=(*signal.layers[:-1], folded))
        three = _three(signal)
        shape = LayerShape(_module(node), "depthwise", three, three, (1, 1))
        if len(signal.shape) != 3 and three[1:] != (1, 1):
            raise self._refused(node, "batch normalisation of a flattened image")
        return self._with(signal, shape, scale[:, None], shift)

    def _relu(self, node: Any, x: Any, *_: Any) -> Any:
        if isinstance(x, _OnHost):
            return self._step(x, "relu", [x.name])
        signal = self._as_signal(node, x)
        at = len(signal.layers) - 1
        while at > 0 and signal.layers[at].shape.kind == "max-pool":
            at -= 1  # the positive part of the largest is the largest of the positive parts
        layers = list(signal.layers)
        layers[at] = replace(layers[at], relu=True)
        return replace(signal, layers=tuple(layers))

    def _max_pool(
        self,
        node: Any,
        x: Any,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:
        signal = self._pooled(node, x)
        padded = _pair(padding) != (0, 0)
        if _pair(dilation) != (1, 1) or ceil_mode:
            raise self._refused(node, "max-pooling with dilation or ceil_mode")
        if padded and not any(layer.relu for layer in signal.layers[-1:]):
            raise self._refused(node, "max-pooling with padding, but without a ReLU before it")
        return self._pool(node, signal, "max-pool", kernel, stride, padding)

    def _average_pool(
        self,
        node: Any,
        x: Any,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor: int | None = None,
    ) -> Any:
        signal = self._pooled(node, x)
        if ceil_mode or (_pair(padding) != (0, 0) and not count_include_pad):
            raise self._refused(node, "average-pooling with ceil_mode or count_include_pad=False")
        pooled = self._pool(node, signal, "sum-pool", kernel, stride, padding)
        count = divisor or math.prod(_pair(kernel))
        return replace(pooled, gain=pooled.gain / count)

    def _adaptive(self, node: Any, x: Any, size: Any) -> Any:
        signal = self._pooled(node, x)
        wanted = [one or have for one, have in zip(_pair(size), signal.shape[1:], strict=True)]
        if any(have % one for one, have in zip(wanted, signal.shape[1:], strict=True)):
            raise self._refused(node, "adaptive pooling into windows of different sizes")
        kernel = [have // one for one, have in zip(wanted, signal.shape[1:], strict=True)]
        return self._average_pool(node, signal, kernel)

    def _mean(self, node: Any, x: Any, dims: Any = None, keep: bool = False, **_: Any) -> Any:
        signal = self._pooled(node, x)
        if sorted(one % 4 for one in dims or ()) != [2, 3]:
            raise self._refused(node, "a mean of anything but height and width")
        found = self._average_pool(node, signal, signal.shape[1:])
        return found if keep else replace(found, shape=found.shape[:1])

    def _reshape(self, node: Any, x: Any, *_: Any) -> Any:
        shape = tuple(node.meta["val"].shape)
        if isinstance(x, torch.Tensor) or shape[:1] != (self._rows,):
            raise self._refused(node, "a reshape that mixes rows")
        wanted = shape[1:]
        if isinstance(x, _OnHost):
            return self._step(x, "reshape", [x.name, list(wanted)], wanted)
        signal = self._as_signal(node, x)
        three = _three(signal)
        flat = wanted == (math.prod(three),)
        if not flat and wanted not in (three, three[:1]):
            raise self._refused(node, f"a reshape of {signal.shape} into {wanted}")
        return replace(signal, shape=wanted)

    def _embedding(self, node: Any, weights: Any, codes: Any, *_: Any) -> Any:
        if not isinstance(weights, torch.Tensor) or not isinstance(codes, _OnHost):
            raise self._refused(node, "an embedding of computed codes")
        return _Embedded(codes, weights)

    # Helpers

    def _sum(self, node: Any, x: Any, y: Any, *more: Any) -> Any:
        """A sum of dense layers and constants. Several layers are one of all their inputs."""
        affine, other = (x, y) if isinstance(x, _DenseSum) else (y, x)
        if more:
            raise self._refused(node, "a scaled sum")
        if isinstance(other, _DenseSum):
            parts = affine.parts + other.parts
            return replace(affine, parts=parts, bias=affine.bias + other.bias)
        if isinstance(other, torch.Tensor | float | int):
            return replace(affine, bias=affine.bias + other)
        raise self._refused(node, "a sum of a layer's output and its input")

    def _as_signal(self, node: Any, value: Any) -> _Signal:
        """A value as the output of layers; a dense layer of host values is completed."""
        if isinstance(value, _Signal):
            return value
        if isinstance(value, _DenseSum):
            source = value.parts[0][0]
            if len(value.parts) > 1:
                names: list[Any] = [[part.name for part, _ in value.parts], 1]
                width = sum(part.shape[0] for part, _ in value.parts)
                source = self._step(source, "cat", names, (width,))
            weights = torch.cat([weights for _, weights in value.parts], 1)
            shape = LayerShape(
                value.module,
                "dense",
                (weights.shape[1], 1, 1),
                (len(weights), 1, 1),
                (1, 1),
            )
            start = _Signal(source, (), source.shape)
            return self._with(start, shape, weights, value.bias.expand(len(weights)))
        if isinstance(value, _OnHost) and not value.of_circuit and len(value.shape) in (1, 3):
            return _Signal(value, (), value.shape)
        raise self._refused(node, "on a value that is not a layer's output")

    def _pooled(self, node: Any, value: Any) -> _Signal:
        signal = self._as_signal(node, value)
        if not signal.layers or len(signal.shape) != 3:
            raise self._refused(node, "pooling that does not follow a convolution")
        return signal

    def _pool(
        self, node: Any, signal: _Signal, kind: str, kernel: Any, stride: Any, padding: Any
    ) -> _Signal:
        size = _pair(kernel)
        step = _pair(stride) if stride not in ((), [], None) else size
        outputs = (signal.shape[0], *_windows(signal.shape, size, step, _pair(padding)))
        shape = LayerShape(_module(node), kind, _three(signal), outputs, size, step, _pair(padding))
        channels = signal.shape[0]
        if kind == "max-pool":
            layer = FloatLayer(shape, np.zeros((channels, 0)), np.zeros(channels))
            layer = replace(layer, relu=signal.layers[-1].relu)
            return replace(signal, layers=(*signal.layers, layer), shape=outputs)
        ones = np.ones((channels, size[0] * size[1]))
        layer = FloatLayer(shape, ones, np.zeros(channels))
        return replace(signal, layers=(*signal.layers, layer), shape=outputs)

    def _with(
        self, signal: _Signal, shape: LayerShape, weights: torch.Tensor, bias: torch.Tensor
    ) -> _Signal:
        """A signal after one more layer with weights."""
        layer = FloatLayer(
            shape,
            weights.detach().double().numpy() * signal.gain,
            bias.detach().double().numpy().copy(),
        )
        outputs = shape.outputs[:1] if shape.kind == "dense" else shape.outputs
        if shape.kind == "depthwise" and len(signal.shape) == 1:
            outputs = signal.shape
        return replace(signal, layers=(*signal.layers, layer), shape=outputs, gain=1.0)

    def _to_host(self, value: Any) -> Any:
        """A value of the circuit as the host gets it: the circuit ends here."""
        if isinstance(value, _DenseSum):
            value = self._as_signal(None, value)
        if not isinstance(value, _Signal):
            return value
        self._signal = value
        result = _OnHost("circuit", value.shape, of_circuit=True)
        if value.gain != 1:
            result = self._step(result, "mul", [result.name, value.gain])
        return self._step(result, "reshape", [result.name, list(value.shape)], value.shape)

    def _host_step(
        self, node: Any, name: str, arguments: list[Any], keywords: dict[str, Any]
    ) -> Any:
        """An operation that the host does, before the circuit or after it."""
        if name == "sum" and isinstance(arguments[0], _Embedded) and arguments[1] == [1]:
            embedded = arguments[0]
            count = len(embedded.weights)
            codes = self._step(
                embedded.codes, "one_hot_sum", [embedded.codes.name, count], (count,)
            )
            weights = embedded.weights.double().T
            return _DenseSum(((codes, weights),), torch.zeros(1).double(), _module(node))
        arguments = [self._to_host(one) for one in arguments]
        rows = [one for one in _flat(arguments) if isinstance(one, _OnHost)]
        if not rows or len({one.of_circuit for one in rows}) > 1:
            raise self._refused(node, f"the operation {name}")
        if not isinstance(node.meta["val"], torch.Tensor):  # such as the pair of a decomposition
            raise self._refused(node, f"the operation {name}")
        shape = tuple(node.meta["val"].shape[1:])
        step = _host_arguments(name, arguments, keywords, shape)
        if step is None or any(isinstance(one, _Embedded | _DenseSum) for one in _flat(arguments)):
            raise self._refused(node, f"the operation {name}")
        operation, wanted = step
        return self._step(rows[0], operation, [self._written(one) for one in wanted], shape)

    def _step(
        self, row: _OnHost, operation: str, arguments: list[Any], shape: Any = None
    ) -> _OnHost:
        steps = self._after if row.of_circuit else self._steps
        name = f"v{len(self._steps) + len(self._after)}"
        steps.append((operation, name, tuple(arguments)))
        return _OnHost(name, row.shape if shape is None else shape, row.of_circuit)

    def _written(self, argument: Any) -> Any:
        if isinstance(argument, _OnHost):
            return argument.name
        if isinstance(argument, torch.Tensor):
            return self._constant(argument)
        if isinstance(argument, list) and any(isinstance(one, _OnHost) for one in argument):
            return [self._written(one) for one in argument]
        return argument

    def _constant(self, tensor: torch.Tensor) -> str:
        name = f"c{len(self._constants)}"
        kept = tensor.float() if tensor.is_floating_point() else tensor
        self._constants[name] = kept.detach().numpy()
        return name

    def _refused(self, node: Any, what: str) -> BadInput:
        module = _module(node) if node is not None else ""
        where = f"its module {module!r}" if module else "its forward pass"
        operation = "" if node is None else _operation(node)
        kind = f" ({operation})" if operation and what != f"the operation {operation}" else ""
        return BadInput(
            f"model: {where} has {what}{kind}, which no circuit is made of; allowed for --to rtl: "
            f"{ALLOWED}"
        )


_IDENTITIES = ("dropout", "to", "contiguous", "clone", "detach", "alias", "feature_dropout")
_LAYERS: dict[str, Callable[..., Any]] = {
    "linear": _Reader._linear,
    "conv2d": _Reader._convolution,
    "batch_norm": _Reader._norm,
    "relu": _Reader._relu,
    "relu_": _Reader._relu,
    "max_pool2d": _Reader._max_pool,
    "avg_pool2d": _Reader._average_pool,
    "adaptive_avg_pool2d": _Reader._adaptive,
    "mean": _Reader._mean,
    "flatten": _Reader._reshape,
    "view": _Reader._reshape,
    "reshape": _Reader._reshape,
    "embedding": _Reader._embedding,
}
_PLAIN = frozenset(
    (
        *("add", "sub", "rsub", "mul", "div", "neg", "abs", "sqrt", "square", "pow", "exp"),
        *("log", "log1p", "tanh", "sigmoid", "clamp", "isnan", "nan_to_num", "where"),
        "logical_not",
    )
)


def _host_arguments(
    name: str, arguments: list[Any], keywords: dict[str, Any], shape: tuple[int, ...]
) -> tuple[str, list[Any]] | None:
    """A torch operation as one of `HOST_OPERATIONS`, or None if there is none."""
    if name in _PLAIN:
        alpha = [keywords["alpha"]] if "alpha" in keywords else []
        return name, [*arguments, *alpha]
    if name == "to" or name in _IDENTITIES:
        return "float", arguments[:1]
    if name == "cat":
        return "cat", [arguments[0], arguments[1] if len(arguments) > 1 else 0]
    if name in ("squeeze", "unsqueeze", "view", "reshape", "flatten"):
        return "reshape", [arguments[0], list(shape)]
    if name in ("softmax", "log_softmax"):
        return name, arguments[:2]
    if name == "slice" and arguments[1] > 0:
        return "slice", arguments[:4]
    if name == "index" and len(arguments[1]) == 2 and arguments[1][0] is None:
        return "columns", [arguments[0], arguments[1][1]]
    return None


def _operation(node: Any) -> str:
    """An ATen operation's name without its overload: `add.Tensor` is `add`."""
    if node.target is operator.getitem:
        return "getitem"
    name = str(getattr(node.target, "__name__", node.target)).split(".")[0]
    return "softmax" if name == "_softmax" else name


def _module(node: Any) -> str:
    """The path of the module that a node belongs to."""
    stack = list((node.meta.get("nn_module_stack") or {}).values()) if node is not None else []
    return str(stack[-1][0]) if stack else ""


def _any_row_value(arguments: list[Any]) -> bool:
    kinds = (_OnHost, _Embedded, _DenseSum, _Signal)
    return any(isinstance(one, kinds) for one in _flat(arguments))


def _flat(arguments: list[Any]) -> list[Any]:
    return [
        inner for one in arguments for inner in (_flat(one) if isinstance(one, list) else [one])
    ]


def _names(arguments: tuple[Any, ...]) -> list[str]:
    return [one for one in _flat(list(arguments)) if isinstance(one, str)]


def _three(signal: _Signal) -> tuple[int, int, int]:
    """The channels, height and width of what the last layer gives."""
    shape = signal.layers[-1].shape.outputs if signal.layers else (*signal.shape, 1, 1)[:3]
    return (shape[0], shape[1], shape[2])


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return (value, value)
    return (int(value[0]), int(value[-1]))


def _windows(
    shape: tuple[int, ...],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> tuple[int, int]:
    """How many windows fit, down and across."""
    down, across = (
        (shape[1 + axis] + 2 * padding[axis] - kernel[axis]) // stride[axis] + 1 for axis in (0, 1)
    )
    return down, across
