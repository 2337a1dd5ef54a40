"""A model's structure: what one training step does, read from its code (`estimator.trace`). Values only; loads no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainwright.estimator.curves import Affine


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Layer(_Value):
    """A module without children. Counts are for one forward pass of the traced batch."""

    name: str
    kind: str
    output_shape: tuple[int, ...]
    parameters: int
    forward_flops: float


class Operation(_Value):
    """A kind of operation of the training step, at one shape: how often, and what each costs over the batch size."""

    kind: str = Field(description="the operator's name, such as aten.convolution")
    family: str = Field(description="what it is calibrated as: conv, conv_backward, matmul, elementwise …")
    count: int
    flops: Affine
    bytes: Affine


class Structure(_Value):
    """structure.json"""

    FILE: ClassVar[str] = "structure.json"
    schema_version: int = 1
    batch_size: int
    optimizer: str
    precision: str
    method: Literal["fake tensors", "real step"]
    parameters: int
    parameter_bytes: int
    forward_flops_per_sample: float
    activation_bytes_per_sample: float = Field(description="kept from the forward for the backward pass")
    peak_memory_bytes: Affine = Field(description="most bytes of tensors alive at once in a step, parameters included")
    layers: list[Layer]
    features: dict[str, float] = Field(
        description="the quantified vector: layers, filters, widths, image and batch size"
    )
    operations: dict[str, int] = Field(description="count by kind, for a whole training step")
    trace: list[Operation]


_FAMILIES = {
    "conv": ("convolution", "conv1d", "conv2d", "conv3d", "mkldnn_convolution"),
    "conv_backward": ("convolution_backward",),
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_scaled_dot_product"),
    "norm": ("native_batch_norm", "native_layer_norm", "native_group_norm", "softmax", "log_softmax", "nll_loss"),
    "pool": ("pool",),
    "other": (
        "rnn",
        "lstm",
        "gru",
        "embedding",
        "index",
        "gather",
        "scatter",
        "sort",
        "topk",
        "cumsum",
        "upsample",
        "grid_sampler",
        "fft",
        "linalg",
        "cdist",
    ),
}
_ANYWHERE = ("norm", "pool", "other")  # their names stand within the operator's


def family_of(kind: str, flops: Affine, moved: Affine) -> str:
    """What an operation is calibrated as; `other` is not. One that moves no bytes is a view: it costs its call only."""
    name = kind.removeprefix("aten.").lstrip("_")
    if flops(1) == 0 and moved(1) == 0:
        return "view"
    if name.startswith("convolution_backward"):
        return "conv_backward"
    for family, names in _FAMILIES.items():
        if any(one in name if family in _ANYWHERE else name.startswith(one.lstrip("_")) for one in names):
            return family
    return "elementwise"
