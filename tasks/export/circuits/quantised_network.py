"""A chain of layers in torch that computes with integers, and learns through their rounding.

Every scale is a power of two, so that a layer's outputs become the next one's inputs by a shift:

    x = q_x 2^e_x,  w = q_w 2^e_w,  b = q_b 2^(e_x + e_w),  q_y = clip(floor(y / 2^e_y + 1/2))

The forward pass rounds; the gradient passes through as if it had not (the straight-through
estimator, Bengio et al. 2013, arXiv:1308.3432). Values clipped get no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np  # noqa: TID253 - this is a separate process
import torch  # noqa: TID253
from torch.nn import functional  # noqa: TID253

from trainwright.tasks.export.circuits.integer_model import IntegerLayer, IntegerModel
from trainwright.tasks.export.circuits.read_layers import FloatCircuit, FloatLayer

Array = np.ndarray[Any, Any]
_EXPONENTS_TRIED = 4
_ALIKE = 4.0
"""inputs whose ranges differ by more than this get a scale of their own"""


@dataclass(frozen=True)
class BitWidths:
    """Bits of the input, and of each layer's weights and outputs (0 where there are none)."""

    inputs: int
    weights: tuple[int, ...]
    outputs: tuple[int, ...]


def same_widths(layers: Sequence[FloatLayer], bits: int) -> BitWidths:
    """Everything in as many bits."""
    last = len(layers) - 1
    return BitWidths(
        bits,
        tuple(bits if _learns(layer) else 0 for layer in layers),
        tuple(bits if _weighs(layer) and at < last else 0 for at, layer in enumerate(layers)),
    )


@dataclass(frozen=True)
class InputScale:
    """normalised = (number - centre) / unit, one for each input or one for all."""

    centre: Array
    unit: Array

    @classmethod
    def of(cls, numbers: Array, of_table: bool) -> InputScale:
        """By training rows, (rows, inputs): common unless they are columns of different ranges."""
        size = np.abs(numbers).max(0)
        there = size[size > 0]
        if not of_table or not len(there) or there.max() <= _ALIKE * there.min():
            return cls(np.zeros(1), np.ones(1))
        low, high = np.quantile(numbers, [0.002, 0.998], axis=0)
        low, high = np.minimum(low, high), np.maximum(low, high)
        unit = np.where(high > low, (high - low) / 2, np.maximum(size, 1.0))
        return cls((low + high) / 2, unit)

    def normalised(self, numbers: Array) -> torch.Tensor:
        """(rows, inputs) in units of the scale."""
        return torch.from_numpy((numbers - self.centre) / self.unit).float()


class QuantisedNetwork(torch.nn.Module):
    """The layers with trainable weights, and the scales by which they are rounded."""

    def __init__(self, circuit: FloatCircuit, scale: InputScale, sample: torch.Tensor) -> None:
        """`sample`: normalised inputs, (rows, inputs), that scales are chosen by."""
        super().__init__()
        self._circuit, self._scale, self._sample = circuit, scale, sample
        self._signed_input = bool((sample < 0).any())
        self.weights = torch.nn.ParameterList()
        self.biases = torch.nn.ParameterList()
        for number, layer in enumerate(circuit.layers):
            weights, bias = layer.weights, layer.bias
            if number == 0:
                if scale.centre.any():
                    bias = bias + weights @ scale.centre
                weights = weights * scale.unit
            learns = _learns(layer)
            for values, kept in ((weights, self.weights), (bias, self.biases)):
                tensor = torch.tensor(values, dtype=torch.float32)
                kept.append(torch.nn.Parameter(tensor, requires_grad=learns))
        self.choose_scales(same_widths(circuit.layers, 8))

    @torch.no_grad()
    def choose_scales(self, widths: BitWidths) -> None:
        """For these widths, the exponents with the smallest error on the sample."""
        self.widths = widths
        signed = self._signed_input
        self._low = -(1 << (widths.inputs - 1)) if signed else 0
        self._high = (1 << (widths.inputs - int(signed))) - 1
        self._input_exponent = _best_exponent(self._sample, self._low, self._high)
        self._weight_exponents: list[int] = []
        self._output_exponents: list[int] = []
        values = self._shaped(self._rounded_inputs(self._sample))
        exponent, unsigned = self._input_exponent, not signed
        for number, layer in enumerate(self._circuit.layers):
            bits = widths.weights[number]
            most = (1 << (bits - 1)) - 1 if bits > 1 else 1
            found = _best_exponent(self.weights[number], -most, most) if bits else 0
            self._weight_exponents.append(found)
            values = self._sums(number, values, exponent)
            exponent += found
            if layer.relu and layer.shape.kind != "max-pool":
                values, unsigned = values.clamp(min=0), True
            if width := widths.outputs[number]:
                if layer.shape.kind in ("dense", "convolution", "depthwise") and not layer.relu:
                    unsigned = False
                low, high = _limits(width, unsigned)
                exponent = max(exponent, _best_exponent(values, low, high))
                values = _round(values, exponent, low, high)
            self._output_exponents.append(exponent)
        self._unsigned = self._signs()

    def _signs(self) -> list[bool]:
        """For each layer, whether its outputs are never negative."""
        found, unsigned = [], not self._signed_input
        for layer in self._circuit.layers:
            if layer.shape.kind in ("dense", "convolution", "depthwise"):
                unsigned = layer.relu
            unsigned = unsigned or layer.relu
            found.append(unsigned)
        return found

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalised inputs, (rows, inputs) -> what the circuit's output integers stand for."""
        values, exponent = self._shaped(self._rounded_inputs(inputs)), self._input_exponent
        for number, layer in enumerate(self._circuit.layers):
            values = self._sums(number, values, exponent)
            exponent = self._output_exponents[number]
            if width := self.widths.outputs[number]:
                values = _round(values, exponent, *_limits(width, self._unsigned[number]))
            elif layer.relu and layer.shape.kind != "max-pool":
                values = values.clamp(min=0)
        return values.flatten(1)

    def _rounded_inputs(self, inputs: torch.Tensor) -> torch.Tensor:
        return _round(inputs, self._input_exponent, self._low, self._high)

    def _shaped(self, values: torch.Tensor) -> torch.Tensor:
        return values.reshape(-1, *self._circuit.layers[0].shape.inputs)

    def _sums(self, number: int, values: torch.Tensor, exponent: int) -> torch.Tensor:
        layer = self._circuit.layers[number]
        shape = layer.shape
        if shape.kind == "max-pool":
            return functional.max_pool2d(values, shape.kernel, shape.stride, shape.padding)
        weights, bias = self.weights[number], self.biases[number]
        if bits := self.widths.weights[number]:
            most = (1 << (bits - 1)) - 1 if bits > 1 else 1
            weights = _round(weights, self._weight_exponents[number], -most, most)
        bias = _round(bias, exponent + self._weight_exponents[number], -math.inf, math.inf)
        groups = shape.inputs[0] if shape.by_channel else 1
        kernels = weights.reshape(len(weights), shape.inputs[0] // groups, *shape.kernel)
        return functional.conv2d(values, kernels, bias, shape.stride, shape.padding, groups=groups)

    @torch.no_grad()
    def integer_layers(self) -> tuple[IntegerLayer, ...]:
        """The layers' integers, as they are now."""
        found, exponent = [], self._input_exponent
        for number, layer in enumerate(self._circuit.layers):
            own = exponent + self._weight_exponents[number]
            weights, bias = self.weights[number], self.biases[number]
            if bits := self.widths.weights[number]:
                most = (1 << (bits - 1)) - 1 if bits > 1 else 1
                weights = _round(weights, self._weight_exponents[number], -most, most)
                weights = weights / 2.0 ** self._weight_exponents[number]
            bias = _round(bias, own, -math.inf, math.inf) / 2.0**own
            low, high, shift = None, None, 0
            if width := self.widths.outputs[number]:
                low, high = _limits(width, self._unsigned[number])
                shift = self._output_exponents[number] - own
            pools = layer.shape.kind == "max-pool"
            found.append(
                IntegerLayer(
                    layer.shape,
                    weights.round().numpy().astype(np.int64),
                    bias.round().numpy().astype(np.int64),
                    shift,
                    low,
                    high,
                    layer.relu and not pools,
                )
            )
            exponent = self._output_exponents[number]
        return tuple(found)

    def integer_model(self) -> IntegerModel:
        """What the circuit computes."""
        circuit, scale = self._circuit, self._scale
        return IntegerModel(
            circuit.before,
            scale.centre,
            1 / (scale.unit * 2.0**self._input_exponent),
            self._low,
            self._high,
            self.integer_layers(),
            2.0 ** self._output_exponents[-1],
            circuit.after,
        )


def float_outputs(circuit: FloatCircuit, numbers: Array) -> torch.Tensor:
    """The trained layers' outputs, unrounded, for inputs (rows, inputs)."""
    values = torch.from_numpy(numbers).double()
    values = values.reshape(-1, *circuit.layers[0].shape.inputs)
    for layer in circuit.layers:
        shape = layer.shape
        if shape.kind == "max-pool":
            values = functional.max_pool2d(values, shape.kernel, shape.stride, shape.padding)
            continue
        groups = shape.inputs[0] if shape.by_channel else 1
        kernels = torch.from_numpy(layer.weights).reshape(
            len(layer.weights), shape.inputs[0] // groups, *shape.kernel
        )
        values = functional.conv2d(
            values,
            kernels,
            torch.from_numpy(layer.bias),
            shape.stride,
            shape.padding,
            groups=groups,
        )
        values = values.clamp(min=0) if layer.relu else values
    return values.flatten(1)


def narrower(widths: BitWidths, part: str, layer: int) -> BitWidths:
    """The same widths, with one bit less in the `weights` or `outputs` of a layer, or `inputs`."""
    if part == "inputs":
        return replace(widths, inputs=widths.inputs - 1)
    bits = list(widths.weights if part == "weights" else widths.outputs)
    bits[layer] -= 1
    if part == "weights":
        return replace(widths, weights=tuple(bits))
    return replace(widths, outputs=tuple(bits))


def _learns(layer: FloatLayer) -> bool:
    return layer.shape.kind in ("dense", "convolution", "depthwise")


def _weighs(layer: FloatLayer) -> bool:
    return layer.shape.kind != "max-pool"


def _limits(bits: int, unsigned: bool) -> tuple[int, int]:
    return (0, (1 << bits) - 1) if unsigned else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def _round(values: torch.Tensor, exponent: int, low: float, high: float) -> torch.Tensor:
    """The nearest multiple of 2^exponent in its limits; its gradient is 1 within them, else 0."""
    step = 2.0**exponent
    inside = values.clamp(low * step, high * step)
    rounded = ((values / step + 0.5).floor()).clamp(low, high) * step
    return inside + (rounded - inside).detach()


def _best_exponent(values: torch.Tensor, low: int, high: int) -> int:
    """The exponent whose multiples, within the limits, are nearest to the values."""
    most = max(float(values.max()) / max(high, 1), float(values.min()) / min(low, -1), 1e-30)
    widest = math.ceil(math.log2(most))
    tried = range(widest, widest - _EXPONENTS_TRIED, -1)
    errors = [float((_round(values, one, low, high) - values).square().mean()) for one in tried]
    return tried[int(np.argmin(errors))]
