"""Describes an operation of PyTorch for the cost model: family, FLOPs, bytes moved, and sizes.

`recorder` uses it, with fake tensors and with real ones. Loads torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch  # noqa: TID253 - recording runs in a separate process
from torch.utils._pytree import tree_leaves  # noqa: TID253
from torch.utils.flop_counter import flop_registry  # noqa: TID253

from trainwright.estimator.memory.workspace import padded

_FAMILIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("conv_backward", ("convolution_backward",)),
    ("conv", ("convolution", "mkldnn_convolution", "slow_conv", "thnn_conv")),
    ("attention", ("_scaled_dot_product", "_flash_attention", "_efficient_attention")),
    (
        "matmul",
        (
            "mm",
            "addmm",
            "bmm",
            "baddbmm",
            "addbmm",
            "linear",
            "matmul",
            "mv",
            "addmv",
            "dot",
            "mkldnn_linear",
        ),
    ),
    ("rnn", ("mkldnn_rnn_layer", "_cudnn_rnn", "lstm", "gru", "rnn_")),
    (
        "norm",
        (
            "native_batch_norm",
            "native_layer_norm",
            "native_group_norm",
            "_native_batch_norm",
            "_fused_rms_norm",
            "batch_norm_backward",
            "cudnn_batch_norm",
        ),
    ),
    ("softmax", ("_softmax", "_log_softmax", "_safe_softmax", "nll_loss", "logsumexp")),
    (
        "pool",
        (
            "max_pool",
            "avg_pool",
            "adaptive_",
            "_adaptive_",
            "upsample",
            "_upsample",
            "grid_sampler",
            "im2col",
            "col2im",
            "unfold",
        ),
    ),
    (
        "index",
        (
            "embedding",
            "_embedding",
            "index",
            "gather",
            "scatter",
            "take",
            "sort",
            "topk",
            "argsort",
            "cumsum",
            "cumprod",
            "nonzero",
            "masked_",
            "roll",
            "slice_backward",
            "select_backward",
            "slice_scatter",
            "unique",
            "searchsorted",
            "flip",
            "tril",
            "triu",
            "one_hot",
            "bincount",
        ),
    ),
    (
        "random",
        ("native_dropout", "bernoulli", "normal", "uniform", "rand", "multinomial", "exponential"),
    ),
    (
        "reduction",
        (
            "sum",
            "mean",
            "var",
            "std",
            "amax",
            "amin",
            "max",
            "min",
            "norm",
            "linalg_vector_norm",
            "argmax",
            "argmin",
            "prod",
            "any",
            "all",
            "mse_loss",
            "smooth_l1_loss",
            "huber_loss",
            "binary_cross_entropy",
        ),
    ),
    (
        "copy",
        (
            "copy",
            "clone",
            "_to_copy",
            "cat",
            "stack",
            "contiguous",
            "constant_pad",
            "reflection_pad",
            "replication_pad",
            "repeat",
            "pixel_shuffle",
            "pixel_unshuffle",
            "_reshape_copy",
            "new_empty_strided",
        ),
    ),
    (
        "fill",
        (
            "zero",
            "fill",
            "ones",
            "full",
            "empty",
            "new_",
            "arange",
            "scalar_tensor",
            "eye",
            "linspace",
        ),
    ),
    (
        "other",
        (
            "fft",
            "_fft",
            "linalg",
            "_linalg",
            "cholesky",
            "svd",
            "cdist",
            "_cdist",
            "ctc_loss",
            "_ctc_loss",
        ),
    ),
)


_PICKS = ("embedding", "_embedding_bag", "index_select", "gather", "take")
"""Operations that read only selected rows of a table."""


@dataclass(slots=True)
class OperationCall:
    """One call. `dims` are the sizes on which its time depends, in a fixed order for each family.

    `layout` describes how its tensors are laid out and how its filters move. Only its memory
    depends on the layout.
    """

    kind: str
    family: str
    dtype: str
    flops: float
    bytes: float
    dims: dict[str, float]
    layout: dict[str, float] = field(default_factory=dict)
    live_bytes: float = 0.0


def family_of(name: str) -> str:
    """The family of an operator's name, without its namespace; elementwise if it is in no table."""
    for family, prefixes in _FAMILIES:
        if name.startswith(prefixes):
            return family
    return "elementwise"


def tensors(*trees: Any) -> list[torch.Tensor]:
    """The dense tensors among arguments or results."""
    return [
        one
        for one in tree_leaves(trees)
        if isinstance(one, torch.Tensor) and one.layout is torch.strided
    ]


def describe(func: Any, args: Any, kwargs: Any, out: Any) -> OperationCall:
    """Describe a call that the dispatcher saw, from its arguments and results."""
    packet = func._overloadpacket
    kind = str(packet)
    inputs, results = tensors(args, kwargs), tensors(out)
    known = {one.untyped_storage()._cdata for one in inputs}
    writes = func._schema.is_mutable or any(
        one.untyped_storage()._cdata not in known for one in results
    )
    if func.is_view or not writes:  # or a reshape without a copy, which costs only its call
        return OperationCall(kind, "view", "", 0.0, 0.0, {})
    name = kind.partition(".")[2]
    family = "elementwise" if kind.partition(".")[0] != "aten" else family_of(name)
    # Leave out what a recurrent layer keeps for its backward pass: fake tensors do not know its
    # size (`hidden_bytes`).
    kept = torch.uint8 if family == "rnn" else None
    moved = float(
        sum(one.numel() * one.element_size() for one in (*inputs, *results) if one.dtype != kept)
    )
    if family == "rnn":
        flops = _rnn_flops(name, args)
    else:
        flops = (
            float(flop_registry[packet](*args, **kwargs, out_val=out))
            if packet in flop_registry
            else 0.0
        )
    sizes = _DIMS.get(family, _plain)
    try:
        dims = sizes(name, args, inputs, results)
    except (IndexError, TypeError, AttributeError):  # an operator with other arguments
        dims = _plain(name, args, inputs, results)
    if name.startswith("convolution_backward") and "filters" in dims:
        flops = _conv_backward_flops(args)
    if name.startswith(_PICKS):
        moved = float(sum(2 * one.numel() * one.element_size() for one in results)) + 8 * dims.get(
            "picked", 0.0
        )
    dtype = str((results or inputs)[0].dtype).removeprefix("torch.") if results or inputs else ""
    layout = (
        _conv_layout(name, args)
        if family in ("conv", "conv_backward") and "filters" in dims
        else {}
    )
    return OperationCall(kind, family, dtype, flops, moved, dims, layout)


def hidden_bytes(func: Any, args: Any, out: Any) -> float:
    """Bytes of results whose size fake tensors do not know.

    A oneDNN recurrent layer keeps them for its backward pass. Fitted to oneDNN's allocations
    (within 1 % for layers over 100 KiB): 2 · gates + 6 · states of the wider side + states + 3
    pages, leading dimensions padded.
    """
    if not str(func._overloadpacket).endswith("mkldnn_rnn_layer") or tensors(out)[-1].numel():
        return 0.0
    steps, batch, inputs = args[0].shape
    hidden = args[5].shape[-1]
    wide, narrow = padded(max(inputs, hidden)), padded(hidden)
    width = 4 * batch
    return float(
        2 * steps * width * padded(4 * hidden)
        + (6 * wide + narrow) * (steps + 1) * width
        + 2 * width * narrow
        + 3 * 4096
    )


def _rnn_flops(name: str, args: Any) -> float:
    """2 · T · N · (I + H) · 4H for the gates of an LSTM, twice that backward.

    Torch's own counter has none for them. cuDNN gets the weights of all layers in a list; each
    multiplies every row of the sequences.
    """
    if name.startswith("_cudnn_rnn"):
        rows = args[0].numel() // max(1, args[0].shape[-1])
        forward = float(2 * rows * sum(one.numel() for one in args[1] if one.dim() == 2))
    else:
        steps, batch, inputs = args[0].shape
        gates, hidden = args[2].shape
        forward = float(2 * steps * batch * (inputs + hidden) * gates)
    return 2 * forward if name.endswith("backward") else forward


def _conv_backward_flops(args: Any) -> float:
    """The forward FLOPs for each requested gradient. Torch's own counter ignores groups here."""
    out, images, weight, mask = args[0], args[1], args[2], args[10]
    points = images if args[7] else out  # a transposed convolution spreads each input point
    forward = 2.0 * images.shape[0] * math.prod(points.shape[2:]) * weight.numel()
    return float(forward * sum(map(bool, mask[:2])))


def _strided(*given: Any) -> float:
    """The number of these tensors that are not contiguous."""
    return float(sum(isinstance(one, torch.Tensor) and not one.is_contiguous() for one in given))


def _plain(
    name: str, args: Any, inputs: list[torch.Tensor], results: list[torch.Tensor]
) -> dict[str, float]:
    given = max((one.numel() for one in inputs), default=0)
    return {
        "given": float(given),
        "made": float(max((one.numel() for one in results), default=0)),
        "tensors": float(len(inputs)),
        "last": float(inputs[0].shape[-1]) if inputs and inputs[0].dim() else 1.0,
        "strided": _strided(*inputs, *results[:1]),
    }


def _index(
    name: str, args: Any, inputs: list[torch.Tensor], results: list[torch.Tensor]
) -> dict[str, float]:
    """`picked` is the number of rows that are looked up."""
    places = [one.numel() for one in inputs if not one.is_floating_point() and one.dim()]
    return _plain(name, args, inputs, results) | {"picked": float(max(places, default=0))}


def _softmax(
    name: str, args: Any, inputs: list[torch.Tensor], results: list[torch.Tensor]
) -> dict[str, float]:
    whole = max(inputs, key=lambda one: one.numel())
    place = next((one for one in args if isinstance(one, int) and not isinstance(one, bool)), -1)
    along = place if -whole.dim() <= place < whole.dim() else -1
    return _plain(name, args, inputs, results) | {
        "along": float(whole.shape[along]) if whole.dim() else 1.0,
        "inner": float(math.prod(whole.shape[along + 1 :])) if along != -1 else 1.0,
    }


def _conv(
    name: str, args: Any, inputs: list[torch.Tensor], results: list[torch.Tensor]
) -> dict[str, float]:
    backward = name.startswith("convolution_backward")
    images, weight = (args[1], args[2]) if backward else (args[0], args[1])
    out = args[0] if backward else results[0]
    groups = args[9] if backward else args[8]
    transposed = bool(args[7] if backward else args[6])
    return {
        "batch": float(images.shape[0]),
        "channels": float(images.shape[1]),
        "filters": float(out.shape[1]),
        "groups": float(groups),
        "kernel": float(math.prod(weight.shape[2:])),
        "points_in": float(math.prod(images.shape[2:])),
        "points_out": float(math.prod(out.shape[2:])),
        "spatial": float(weight.dim() - 2),
        "blocked_channels": float(16 * math.ceil(images.shape[1] / float(groups) / 16)),
        "blocked_filters": float(16 * math.ceil(out.shape[1] / float(groups) / 16)),
        "transposed": float(transposed),
        "needs_input": float(bool(args[10][0])) if backward else 0.0,
        "strided": _strided(images, weight),
    }


def _conv_layout(name: str, args: Any) -> dict[str, float]:
    """How torch computes a convolution, and what it copies before (aten/native/Convolution.cpp)."""
    backward = name.startswith("convolution_backward")
    images, weight = (args[1], args[2]) if backward else (args[0], args[1])
    strides, dilations = (args[4], args[6]) if backward else (args[3], args[5])
    last = (
        torch.channels_last
        if images.dim() == 4
        else torch.channels_last_3d
        if images.dim() == 5
        else None
    )
    channels_last = last is not None and any(
        one.is_contiguous(memory_format=last) and not one.is_contiguous()
        for one in (images, weight)
    )
    wanted = last if channels_last and last is not None else torch.contiguous_format
    return {
        "channels_last": float(channels_last),
        "images_copied": float(not images.is_contiguous(memory_format=wanted)),
        "gradient_copied": float(backward and not args[0].is_contiguous(memory_format=wanted)),
        "stepped": float(any(one != 1 for one in (*strides, *dilations))),
        "least_kernel": float(min(weight.shape[-2:])) if weight.dim() > 3 else 1.0,
    }


def _matmul(
    name: str, args: Any, inputs: list[torch.Tensor], results: list[torch.Tensor]
) -> dict[str, float]:
    left, right = [one for one in inputs if one.dim() >= 2][-2:]
    return {
        "batch": float(math.prod(left.shape[:-2])) if left.dim() > 2 else 1.0,
        "rows": float(left.shape[-2]),
        "inner": float(left.shape[-1]),
        "columns": float(right.shape[-1]),
        "left_transposed": float(left.stride(-1) != 1),
        "right_transposed": float(right.stride(-1) != 1),
    }


def _attention(
    name: str, args: Any, inputs: list[torch.Tensor], results: list[torch.Tensor]
) -> dict[str, float]:
    query, key = (
        [one for one in inputs if one.dim() == 4][-2:]
        if "backward" not in name
        else (args[1], args[2])
    )
    return {
        "heads": float(query.shape[0] * query.shape[1]),
        "queries": float(query.shape[2]),
        "keys": float(key.shape[2]),
        "width": float(query.shape[3]),
        "backward": float("backward" in name),
    }


def _rnn(
    name: str, args: Any, inputs: list[torch.Tensor], results: list[torch.Tensor]
) -> dict[str, float]:
    steps, batch, width = args[0].shape
    return {
        "steps": float(steps),
        "batch": float(batch),
        "inputs": float(width),
        "hidden": float(args[2].shape[-1]),
        "backward": float(name.endswith("backward")),
    }


def _norm(
    name: str, args: Any, inputs: list[torch.Tensor], results: list[torch.Tensor]
) -> dict[str, float]:
    whole = max(inputs, key=lambda one: one.numel())
    return {
        "given": float(whole.numel()),
        "channels": float(min((one.numel() for one in inputs if one.dim() == 1), default=1)),
        "last": float(whole.shape[-1]),
        "strided": _strided(*inputs),
    }


_DIMS = {
    "conv": _conv,
    "conv_backward": _conv,
    "matmul": _matmul,
    "attention": _attention,
    "rnn": _rnn,
    "norm": _norm,
    "softmax": _softmax,
    "index": _index,
}
