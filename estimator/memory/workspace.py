"""The memory that an operation needs while it runs, beyond its arguments and results: workspace.

Arithmetic on sizes; loads no torch. The formulas describe oneDNN on a CPU. Convolutions copy
images, filters and results into blocked layouts (16 channels a block) and back. Recurrent layers
pack their weights and keep the gates of all steps. Other operations are assumed to need nothing.
The formulas were fitted to allocations in torch's profiler; `tests/benchmarks/estimator/memory.py`
compares them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from trainwright.estimator.structure import REQUIRED_DIMS, Operation

BLOCK = 16
_ITEM = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_SCRATCH = 40_000.0  # bytes of oneDNN's strided and transposed convolutions, approximately
_FEW_CHANNELS = 3  # images with at most these are not copied for the filters' gradient
_SMALL_KERNEL = 9  # places; depthwise kernels up to this size are summed in registers
_PARTS = 256  # larger kernels with channels last are summed from this many parts


def operation_workspace_bytes(operation: Operation, batch_size: int) -> float:
    """The workspace of each call of an operation in a step with this many samples."""
    if operation.family not in REQUIRED_DIMS:
        return 0.0
    sizes = {name: line(batch_size) for name, line in operation.dims.items()}
    return workspace_bytes(operation.family, operation.dtype, {**sizes, **operation.layout})


def workspace_bytes(family: str, dtype: str, dims: Mapping[str, float]) -> float:
    """The most bytes that one call needs at a time, beyond its arguments and results."""
    item = _ITEM.get(dtype, 4)
    if family == "rnn" and "steps" in dims:
        return _recurrent(dims, item)
    if family in ("conv", "conv_backward") and "filters" in dims and dtype != "float64":
        return _convolution(dims, item) if family == "conv" else _convolution_backward(dims, item)
    return 0.0


def padded(size: float) -> float:
    """A leading dimension in oneDNN's layout: a multiple of 16, plus 16 if a multiple of 256."""
    aligned = 16 * math.ceil(size / 16)
    return float(aligned + 16 if aligned % 256 == 0 else aligned)


def _blocked(channels: float) -> float:
    return BLOCK * math.ceil(channels / BLOCK)


class _Sizes:
    """Bytes of a convolution's tensors, plain and in oneDNN's blocks."""

    def __init__(self, dims: Mapping[str, float], item: float) -> None:
        channels, filters, groups = dims["channels"], dims["filters"], max(dims["groups"], 1.0)
        self.depthwise = groups == channels == filters and groups > 1
        one = item * dims["batch"] * dims["points_in"]
        self.images, self.blocked_images = one * channels, one * _blocked(channels)
        one = item * dims["batch"] * dims["points_out"]
        self.results, self.blocked_results = one * filters, one * _blocked(filters)
        self.weights = item * dims["kernel"] * filters * channels / groups
        if self.depthwise:
            self.blocked_weights = item * dims["kernel"] * _blocked(filters)
        elif groups > 1:
            self.blocked_weights = self.weights
        else:
            self.blocked_weights = item * dims["kernel"] * _blocked(filters) * _blocked(channels)


def _by_onednn(dims: Mapping[str, float]) -> bool:
    """Whether torch uses oneDNN for a convolution.

    ConvParams::use_mkldnn for one thread (aten/native/Convolution.cpp).
    """
    least = dims.get("least_kernel", 2.0)
    pointwise = dims["kernel"] == 1
    worth_it = dims.get("stepped") or dims["batch"] >= 16 or not pointwise
    images = dims["batch"] * dims["channels"] * dims["points_in"]
    return bool(
        worth_it and (dims["groups"] > 1 or least > 3 or dims["batch"] > 1 or images > 20_480)
    )


def _copies(dims: Mapping[str, float], size: _Sizes) -> tuple[float, float]:
    """Bytes of images and of results' gradients that are copied first because of their layout."""
    return (
        size.images if dims.get("images_copied") else 0.0,
        size.results if dims.get("gradient_copied") else 0.0,
    )


def _columns(dims: Mapping[str, float], item: float) -> float:
    """Bytes of im2col for torch's own convolution."""
    if dims["kernel"] == 1:
        return 0.0
    places = (
        dims["filters"] * dims["points_in"]
        if dims.get("transposed")
        else dims["channels"] * dims["points_out"]
    )
    return item * dims["batch"] * dims["kernel"] * places


def _convolution(dims: Mapping[str, float], item: float) -> float:
    """The larger of two moments: images, filters and result in blocks; result blocked and plain."""
    size, kernel = _Sizes(dims, item), dims["kernel"]
    transposed = bool(dims.get("transposed"))
    copied_images, _ = _copies(dims, size)
    if not _by_onednn(dims):
        return copied_images + (size.results if dims["groups"] > 1 else _columns(dims, item))
    copied = 0.0 if kernel == 1 or size.depthwise else size.weights
    if dims.get("channels_last"):
        return copied + size.blocked_weights
    as_it_lies = kernel > 1 and dims["channels"] < BLOCK and dims["groups"] == 1 and not transposed
    if as_it_lies:
        weights = size.weights / dims["filters"] * _blocked(dims["filters"])
        return copied_images + max(
            weights + size.blocked_results - size.results, size.blocked_results
        )
    images = size.blocked_images
    if transposed:  # the result has channels last, is copied, and copied again
        return copied_images + max(images + size.blocked_weights + _SCRATCH, 2 * size.results)
    first = images + size.blocked_weights + size.blocked_results - size.results
    return copied_images + max(first, size.blocked_results)


def _convolution_backward(dims: Mapping[str, float], item: float) -> float:
    """The images' gradient is computed first, then the filters'; both need arguments in blocks."""
    size, kernel = _Sizes(dims, item), dims["kernel"]
    transposed, needs_input = bool(dims.get("transposed")), bool(dims.get("needs_input"))
    copied_images, copied_results = _copies(dims, size)
    made = size.weights + (size.images if needs_input else 0.0)
    if not _by_onednn(dims):
        return (
            copied_results + copied_images + (made if dims["groups"] > 1 else _columns(dims, item))
        )
    if dims.get("channels_last"):
        copied = 0.0 if kernel == 1 or size.depthwise else size.weights
        if size.depthwise:
            return (
                copied_results
                + (_PARTS if kernel > _SMALL_KERNEL else 1) * size.weights
                + size.weights
            )
        return copied_results + copied + 2 * size.blocked_weights
    images, inputs, results = size.blocked_images, 0.0, size.blocked_results
    if transposed and dims["filters"] <= BLOCK / 2:
        results = size.results
    if needs_input:
        read = 0.0 if transposed and kernel > 1 and dims["filters"] < BLOCK else results
        inputs = read + size.blocked_weights + images
        thrice = dims.get("stepped") and dims["groups"] == 1 and not transposed
        inputs = max(
            inputs + (_SCRATCH if thrice else 0.0),
            3 * size.images if thrice else images + size.images,
        )
    filters = size.blocked_weights
    if not transposed and dims["channels"] <= _FEW_CHANNELS and dims["groups"] == 1 and kernel > 1:
        images, filters = 0.0, size.weights / dims["filters"] * _blocked(dims["filters"])
    weights = (size.images if needs_input else 0.0) + results + filters + images
    if size.depthwise and kernel > _SMALL_KERNEL:
        weights += 2 * size.weights + _SCRATCH - results - filters - images
    weights = max(weights, made + filters)
    return copied_results + copied_images + max(inputs, weights) - made


def _recurrent(dims: Mapping[str, float], item: float) -> float:
    """Packed weights and the gates of all steps.

    The backward pass packs weights again if their rows are not aligned.
    """
    gates = 4 * dims["hidden"]
    sides = (dims["inputs"], dims["hidden"])
    packed = sum(sides) * padded(gates) + 2 * gates
    if dims.get("backward"):
        packed += sum(gates * padded(side) for side in sides if padded(side) != side)
    scratch = (
        dims["steps"] * dims["batch"] * padded(gates) + 2 * dims["batch"] * dims["hidden"] + 1_850
    )
    return item * (packed + scratch)
