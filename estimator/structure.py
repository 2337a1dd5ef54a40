"""A model's structure: the operations and memory of one training step.

`estimator.trace` makes it.
"""

from __future__ import annotations

import hashlib
import json
from typing import ClassVar, Literal, get_args

from pydantic import Field, model_validator

from trainwright.estimator.curves import Affine, Knots
from trainwright.estimator.frozen_model import FrozenModel
from trainwright.estimator.lifetimes import Lifetimes

Precision = Literal["fp32", "fp64", "bf16", "amp"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


_NOTHING = Affine(fixed=0.0, per_sample=0.0)


class Module(FrozenModel):
    """A module, named by its path in the model; the model itself is named by its class.

    The shape is empty if the module did not run or returned no tensor.
    """

    name: str = Field(description="of the module")
    kind: str = Field(description="class of the module")
    output_shape: tuple[int, ...] = Field(description="at the traced batch")


class Layer(FrozenModel):
    """A module without children, or with parameters or arithmetic of its own.

    Counts leave out its children and are of one forward pass of the traced batch, so that those of
    all layers add up to the model's.
    """

    name: str = Field(description="of the module")
    kind: str = Field(description="class of the module")
    output_shape: tuple[int, ...] = Field(description="at the traced batch")
    parameters: int = Field(description="numbers of its own")
    forward_flops: float = Field(description="of the traced batch")


class DenseProduct(FrozenModel):
    """A layer that multiplies rows by one weight: `outputs` × `inputs`, an embedding's transposed.

    A layer in the middle of a sequence has several rows for each sample.
    """

    kind: Literal["linear", "pointwise", "embedding"] = Field(
        description="pointwise: a convolution of 1 × 1; embedding: picks rows of a table"
    )
    rows_per_sample: float = Field(description="rows that one sample gives")
    inputs: int = Field(description="columns of the weight")
    outputs: int = Field(description="rows of the weight")


class LayerFacts(FrozenModel):
    """The finest part of a model that a layout treats apart: a module without its children.

    Its code computes something itself; the last one of a model is the loss.
    """

    name: str = Field(description="of the layer")
    kind: str = Field(description="class of the module")
    parameters: dict[str, int] = Field(
        default_factory=dict,
        description="elements of each trained parameter that it is the first to use",
    )
    parameter_bytes: float = Field(default=0.0, description="of its own parameters")
    shared: bool = Field(
        default=False, description="whether another layer uses one of these parameters too"
    )
    dense: DenseProduct | None = None
    calls: int = Field(default=1, ge=0, description="how often it runs in a forward pass")
    output_bytes: Affine = _NOTHING
    kept_bytes: Affine = Field(
        default=_NOTHING,
        description="made in a forward pass and needed by the backward pass, results included",
    )


Calls = tuple[tuple[int, float], ...]


class LayerWork(LayerFacts):
    """A layer with its operations in a step of the structure's batch.

    Operations are pairs: the index in the structure's `trace`, and how many of these calls belong
    to this layer and phase (a fraction, if one call does two things).
    """

    forward: Calls = Field(default=(), description="work of the forward pass")
    input_gradient: Calls = Field(default=(), description="work of the gradient of its inputs")
    weight_gradient: Calls = Field(default=(), description="work of the gradient of its weights")

    def facts(self) -> LayerFacts:
        """The layer without its operations."""
        return LayerFacts(**{name: getattr(self, name) for name in LayerFacts.model_fields})


class Unit(FrozenModel):
    """A part of the model between two places where it can be cut, in the order of a forward pass.

    A stage of a pipeline runs some units that follow each other.
    """

    name: str = Field(description="the first module in it that no earlier unit runs")
    modules: list[str] = Field(description="the modules that it runs, in order")
    layers: list[str] = Field(
        default_factory=list, description="names in `layer_work` that compute in it, in order"
    )
    crossing_bytes: Affine = Field(
        default=_NOTHING,
        description="of tensors that are alive after it and used later, over the samples of a "
        "micro-batch: what a stage sends if the model is cut here",
    )
    tied: list[str] = Field(
        default_factory=list,
        description="trained parameters that it uses and an earlier unit is the first to use",
    )
    dropouts: int = Field(
        default=0, ge=0, description="dropout calls in it: a mask is keyed by the call's number"
    )
    batch_statistics: bool = Field(
        default=False, description="whether a layer in it normalises by statistics of the batch"
    )


_MOST = 1e24
"""A bound on an operation's FLOPs and bytes, far beyond any real one."""
_CONVOLUTION = ("batch", "channels", "filters", "groups", "kernel", "points_in", "points_out")
REQUIRED_DIMS = {
    "conv": _CONVOLUTION,
    "conv_backward": _CONVOLUTION,
    "rnn": ("steps", "batch", "inputs", "hidden"),
}
"""The families whose operations need a workspace (`memory.workspace`), and the sizes for it."""


class Operation(FrozenModel):
    """Similar operations of the training step: their count, and the size of each by batch size."""

    kind: str = Field(description="the operator's name, such as aten.convolution")
    family: str = Field(
        description="the family for calibration: conv, conv_backward, matmul, elementwise …"
    )
    dtype: str = Field(default="float32", description="type of its numbers")
    count: int = Field(ge=0, le=10**9, description="how often it occurs in a step")
    flops: Affine
    bytes: Affine = Field(description="bytes of its arguments and results")
    dims: dict[str, Affine] = Field(
        default_factory=dict, description="the sizes on which its time depends, by name"
    )
    layout: dict[str, float] = Field(
        default_factory=dict, description="the layout of its tensors, on which its memory depends"
    )
    live_bytes: Affine = Field(
        default=Affine(fixed=0.0, per_sample=0.0),
        description="bytes of tensors alive after it ran; the most of any of the similar ones",
    )

    @model_validator(mode="after")
    def _no_less_than_nothing(self) -> Operation:
        sizes = [(f"dims.{name}", line) for name, line in self.dims.items()]
        for name, line in [
            ("flops", self.flops),
            ("bytes", self.bytes),
            ("live_bytes", self.live_bytes),
            *sizes,
        ]:
            if not (0 <= line.fixed <= _MOST and 0 <= line.per_sample <= _MOST):
                raise ValueError(
                    f"{name} of 0 to {_MOST:g}, {self.kind[:80]!r} has {line.fixed:g} "
                    f"and {line.per_sample:g} a sample"
                )
        return self

    @model_validator(mode="after")
    def _has_its_sizes(self) -> Operation:
        """Checks the sizes of convolutions and recurrent layers.

        They have all sizes or, if they were called with other arguments, those of any operation
        (`given`).
        """
        sizes = REQUIRED_DIMS.get(self.family, ())
        missing = [name for name in sizes if name not in self.dims]
        if missing and ("given" not in self.dims or len(missing) < len(sizes)):
            raise ValueError(
                f"dims with {', '.join(sizes)}; {self.kind[:80]!r} has no {', '.join(missing)}"
            )
        return self


class RecordedStep(FrozenModel):
    """The storages of a step, and the operations whose workspaces are among them."""

    lifetimes: Lifetimes
    operations: tuple[Operation, ...]


class Structure(FrozenModel):
    """structure.json"""

    FILE: ClassVar[str] = "structure.json"
    schema_version: int = Field(default=2, description="version of the file's form")
    torch: str | None = Field(default=None, description="version of torch that traced it")
    batch_size: int = Field(ge=1, description="samples of the traced step")
    optimizer: str = Field(description="whose state and updates are in it")
    precision: Precision = Field(description="of parameters and arithmetic")
    accumulation: int = Field(default=1, ge=1, description="micro-batches in a step")
    method: Literal["fake tensors", "real step"] = Field(
        description="how the step was read: with fake tensors, or by real steps of tiny batches"
    )
    parameters: int = Field(description="numbers in the model")
    parameter_bytes: int = Field(description="of all parameters")
    parameter_tensors: int | None = Field(
        default=None, description="trained parameters; None: not counted"
    )
    forward_flops_per_sample: float = Field(
        description="as torch's FlopCounterMode counts, which leaves out fused recurrent layers; "
        "`trace` includes them"
    )
    activation_bytes_per_sample: float = Field(
        description="bytes kept from the forward pass for the backward pass"
    )
    idle_bytes: Affine = Field(
        default=Affine(fixed=0.0, per_sample=0.0),
        description="bytes alive between steps: parameters, gradients, optimizer state, the batch",
    )
    peak_memory_bytes: Affine = Field(
        description="most bytes of tensors alive at once in a step, parameters included"
    )
    layers: list[Layer]
    modules: list[Module] = Field(
        default_factory=list,
        description="all modules in the model's order; the first is the model itself",
    )
    features: dict[str, float] = Field(
        description="features: layers, filters, widths, image and batch size"
    )
    operations: dict[str, int] = Field(description="count by kind, for a whole training step")
    trace: list[Operation]
    layer_work: list[LayerWork] = Field(
        default_factory=list,
        description="modules that compute something, in the order in which they first do; the "
        "last is the loss; empty: not recorded",
    )
    units: list[Unit] = Field(
        default_factory=list,
        description="parts between places where the model can be cut into stages of a pipeline; "
        "empty: it can't be cut, or not known",
    )
    not_cut: str = Field(
        default="", description="why the model can't be cut: the operation and its module"
    )
    builds_parts: bool = Field(
        default=False,
        description="whether a rank can build some tensors without memory for the others: the "
        "model's code reads no values, and its source has no `adapt`",
    )
    loss_notice: str = Field(
        default="",
        description="why the source's loss is not the mean that ranks join, and what to add; "
        "empty: it is, or was not checked",
    )
    lifetimes: Lifetimes | None = Field(
        default=None,
        description="None: the order of operations depends on the batch size",
    )
    most_held_bytes: Knots | None = Field(
        default=None,
        description="the most that a model of the heap holds over the batch size: the maximum of "
        "several simulations of the lifetimes; None: not simulated",
    )

    @model_validator(mode="after")
    def _workspaces_are_of_the_trace(self) -> Structure:
        lives = self.lifetimes
        if lives is not None and max(lives.step, default=-1) >= len(lives.sizes) + len(self.trace):
            raise ValueError("lifetimes: a workspace of an operation that the trace does not have")
        return self

    def recorded_step(self) -> RecordedStep | None:
        """The storages of a step, if it is known which calls of modules keep them."""
        lives = self.lifetimes
        if lives is None or not lives.calls:
            return None
        known = len(lives.sizes)
        used = sorted({code for code in lives.step if code >= known})
        places = {code: known + place for place, code in enumerate(used)}
        return RecordedStep(
            lifetimes=lives.model_copy(
                update={"step": tuple(places.get(code, code) for code in lives.step)}
            ),
            operations=tuple(self.trace[code - known] for code in used),
        )

    def fingerprint(self) -> str:
        """Equal for equal models trained the same way, at any traced batch size and layer names."""
        flops_per_sample = sum(one.count * one.flops.per_sample for one in self.trace)
        what = [
            self.optimizer,
            self.precision,
            self.accumulation,
            self.parameters,
            f"{flops_per_sample:.3g}",
            [[layer.kind, layer.parameters] for layer in self.layers],
        ]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()
