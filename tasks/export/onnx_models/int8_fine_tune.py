"""Trains a model again for a short time with the rounding of 8-bit integers.

Source: B. Jacob et al., Quantization and training of neural networks, CVPR 2018.

    weights       w -> s round(w / s), s = max |w| / 64 for each output channel
    activations   x -> s (round(x / s + z) - z) at the input of a layer, s and z by the range on
                  training rows

The gradient passes through `round` as if it were not there. Norms keep their statistics. Layers are
found by the functions that a forward pass calls, so that they need not be modules; weights are what
does not depend on a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch  # noqa: TID253 - this runs in a separate process
from torch.nn import functional  # noqa: TID253
from torch.overrides import TorchFunctionMode  # noqa: TID253
from torch.utils._pytree import tree_leaves  # noqa: TID253

from trainwright.tasks.export.learn_outputs import Teacher, learn
from trainwright.tasks.export.onnx_models.torch_to_onnx import PlainModel

EPOCHS = 10
_RATE = 1e-3
_MOST = 64
"""the largest weight, as in int8_quantise"""
_CHANNELS: dict[Any, int] = {
    functional.linear: 0,
    functional.conv1d: 0,
    functional.conv2d: 0,
    functional.conv3d: 0,
    functional.conv_transpose1d: 1,
    functional.conv_transpose2d: 1,
    torch.matmul: -1,
    torch.Tensor.matmul: -1,
    torch.Tensor.__matmul__: -1,
}
"""The output channels' dimension of a function's second argument, its weights."""
_OF_ROWS = "_depends_on_rows"
"""The mark of a tensor that is made of rows."""


class RoundedLayers(TorchFunctionMode):
    """Layers compute with rounded weights and inputs. The first pass only notes the ranges."""

    def __init__(self) -> None:
        super().__init__()
        self._ranges: list[tuple[float, float]] = []
        self._noting, self._place = True, 0

    def __enter__(self) -> RoundedLayers:
        self._place = 0
        super().__enter__()  # type: ignore[no-untyped-call]  # of torch
        return self

    def round_from_now(self) -> None:
        """End noting ranges."""
        self._noting = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function; those of layers with rounded arguments."""
        kwargs = kwargs or {}
        of_rows = any(hasattr(one, _OF_ROWS) for one in tree_leaves((args, kwargs)))
        if func in _CHANNELS and len(args) > 1 and not hasattr(args[1], _OF_ROWS):
            weights = _rounded_weights(args[1], _CHANNELS[func])
            args = (self._activation(args[0]), weights, *args[2:])
        elif func is functional.embedding and len(args) > 1:
            args = (args[0], _rounded_weights(args[1], None), *args[2:])
        found = func(*args, **kwargs)
        if of_rows:
            mark_rows(tree_leaves(found))
        return found

    def _activation(self, values: torch.Tensor) -> torch.Tensor:
        """A layer's inputs; layers are told apart by the order of calls."""
        place, self._place = self._place, self._place + 1
        if self._noting:
            low, high = float(values.min().clamp(max=0)), float(values.max().clamp(min=0))
            if place == len(self._ranges):
                self._ranges.append((low, high))
            before = self._ranges[place]
            self._ranges[place] = min(low, before[0]), max(high, before[1])
            return values
        low, high = self._ranges[place]
        scale = max((high - low) / 255, 1e-12)
        zero = round(-low / scale)
        return torch.fake_quantize_per_tensor_affine(values.float(), scale, zero, 0, 255)


def mark_rows(values: Iterable[Any]) -> None:
    """Note of tensors that they depend on rows."""
    for one in values:
        if isinstance(one, torch.Tensor):
            setattr(one, _OF_ROWS, True)


def _rounded_weights(weights: torch.Tensor, axis: int | None) -> torch.Tensor:
    """Weights with one scale for each channel, or one scale if `axis` is None."""
    if axis is None:
        scale = float(weights.detach().abs().max().clamp(min=1e-12)) / _MOST
        return torch.fake_quantize_per_tensor_affine(weights, scale, 0, -_MOST, _MOST)
    axis %= weights.dim()
    others = [one for one in range(weights.dim()) if one != axis]
    scales = weights.detach().abs().amax(others).clamp(min=1e-12) / _MOST
    zeros = torch.zeros(len(scales), dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(weights, scales, zeros, axis, -_MOST, _MOST)


def fine_tune(
    model: PlainModel,
    rows: dict[str, torch.Tensor],
    taught: torch.Tensor,
    classes: bool,
    fall: Callable[[Callable[..., tuple[torch.Tensor, ...]]], float],
) -> int:
    """Train a model on rows, in place, and keep the epoch with the least `fall`. Returns the epoch.

    `taught`: the model's outputs for the rows. `fall`: how much worse the metric of a function from
    inputs to outputs is on the validation rows. Epoch 0 is the model as it was.
    """
    torch.manual_seed(0)
    layers, given = RoundedLayers(), [rows[name] for name in model.names]

    def outputs(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mark_rows(tensors)
        with layers:
            found: tuple[torch.Tensor, ...] = model(*tensors)
        return found

    with torch.no_grad():
        for batch in torch.arange(len(taught)).split(512):
            outputs(*(one[batch] for one in given))
    layers.round_from_now()
    best: list[tuple[float, int, dict[str, torch.Tensor]]] = []
    epoch = 0

    def keep() -> None:
        nonlocal epoch
        with torch.no_grad():
            found = fall(outputs)
        if not best or found < best[0][0]:
            best[:] = [(found, epoch, {n: one.clone() for n, one in model.state_dict().items()})]
        epoch += 1

    keep()
    learn(
        lambda batch: outputs(*(one[batch] for one in given))[0],
        model.parameters(),
        Teacher(taught, classes),
        rows=len(taught),
        epochs=EPOCHS,
        rate=_RATE,
        after_epoch=keep,
    )
    model.load_state_dict(best[0][2])
    return best[0][1]
