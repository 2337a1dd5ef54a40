"""Memory that an operation needs while it runs, beyond its arguments and results. Arithmetic on sizes; loads no torch.

What oneDNN does on a CPU: convolutions copy images, filters and results into blocked layouts (16 channels to a block) and back;
recurrent layers pack their weights and keep the gates of all steps. Every other operation is taken to need nothing. The formulas
were fitted to the allocations that torch's profiler shows; `tests/benchmarks/estimator/memory.py` compares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

BLOCK = 16
_ITEM = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_FIRST_CHANNELS = 3  # images of so few channels are read as they lie
_SCRATCH = 20_736.0


def workspace_bytes(family: str, kind: str, dtype: str, dims: Mapping[str, float]) -> float:
    """Bytes at the worst moment of one call."""
    item = _ITEM.get(dtype, 4)
    if family == "rnn" and "steps" in dims:
        return _recurrent(dims, item)
    if family in ("conv", "conv_backward") and "filters" in dims and dtype != "float64":
        return _convolution(dims, item) if family == "conv" else _convolution_backward(dims, item)
    return 0.0


def padded(size: float) -> float:
    """A leading dimension as oneDNN lays it out: in sixteens, and by sixteen more where it is a multiple of 256."""
    aligned = 16 * math.ceil(size / 16)
    return float(aligned + 16 if aligned % 256 == 0 else aligned)


def _blocked(channels: float) -> float:
    return BLOCK * math.ceil(channels / BLOCK)


def _parts(dims: Mapping[str, float], item: float) -> tuple[float, float, float, float]:
    """Bytes of images (as read), images (in blocks), filters, results, of a convolution."""
    images = item * dims["batch"] * dims["points_in"]
    channels, filters, groups = dims["channels"], dims["filters"], max(dims["groups"], 1.0)
    depthwise = groups == channels == filters
    weights = item * dims["kernel"] * filters * (1 if depthwise else channels / groups)
    return (
        0.0 if channels <= _FIRST_CHANNELS and groups == 1 else images * _blocked(channels),
        images * _blocked(channels),
        weights,
        item * dims["batch"] * dims["points_out"] * _blocked(filters),
    )


def _convolution(dims: Mapping[str, float], item: float) -> float:
    """First images and filters in blocks beside the result in blocks; then that beside the plain result."""
    if dims.get("strided"):
        return 2 * _parts(dims, item)[2]
    images, _, weights, results = _parts(dims, item)
    return max(images + weights, results)


def _convolution_backward(dims: Mapping[str, float], item: float) -> float:
    """The images' gradient is made first, the filters' then; each needs its arguments in blocks."""
    images, padded_images, weights, results = _parts(dims, item)
    plain_images = item * dims["batch"] * dims["points_in"] * dims["channels"]
    made = weights + (plain_images if dims.get("needs_input") else 0.0)
    if dims.get("strided"):
        return weights + _SCRATCH
    wide = (
        item * dims["kernel"] * _blocked(dims["filters"]) * (1.0 if dims["groups"] > 1 else _blocked(dims["channels"]))
    )
    first = results + wide + padded_images - made if dims.get("needs_input") else 0.0
    return max(first, results + images + weights + _SCRATCH, 0.0)


def _recurrent(dims: Mapping[str, float], item: float) -> float:
    """Weights packed, for the backward pass a second time where their rows are not aligned; the gates of all steps."""
    gates = 4 * dims["hidden"]
    sides = (dims["inputs"], dims["hidden"])
    packed = sum(sides) * padded(gates) + 2 * gates
    if dims.get("backward"):
        packed += sum(gates * padded(side) for side in sides if padded(side) != side)
    scratch = dims["steps"] * dims["batch"] * padded(gates) + 2 * dims["batch"] * dims["hidden"] + 1_850
    return item * (packed + scratch)
