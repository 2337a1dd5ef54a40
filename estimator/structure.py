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
    features: dict[str, float] = Field(description="the quantified vector: layers, filters, widths, image and batch size")
    operations: dict[str, int] = Field(description="count by kind, for a whole training step")
    trace: list[Operation]
