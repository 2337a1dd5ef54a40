"""A model's structure: the operations and memory of one training step.

`estimator.trace` makes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from trainwright.estimator.curves import Affine, Knots
from trainwright.estimator.frozen_model import FrozenModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

Precision = Literal["fp32", "fp64", "bf16", "amp"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


_NOTHING = Affine(fixed=0.0, per_sample=0.0)


class Module(FrozenModel):
    """A module, named by its path in the model; the model itself is named by its class.

    The shape is empty if the module did not run or returned no tensor.
    """

    name: str
    kind: str
    output_shape: tuple[int, ...]


class Layer(FrozenModel):
    """A module without children, or with parameters or arithmetic of its own.

    Counts leave out its children and are of one forward pass of the traced batch, so that those of
    all layers add up to the model's.
    """

    name: str
    kind: str
    output_shape: tuple[int, ...]
    parameters: int
    forward_flops: float


class DenseProduct(FrozenModel):
    """A layer that multiplies rows by one weight: `outputs` × `inputs`, an embedding's transposed.

    A layer in the middle of a sequence has several rows for each sample.
    """

    kind: Literal["linear", "pointwise", "embedding"] = Field(
        description="pointwise: a convolution of 1 × 1; embedding: picks rows of a table"
    )
    rows_per_sample: float
    inputs: int
    outputs: int


class LayerFacts(FrozenModel):
    """The finest part of a model that a layout treats apart: a module without its children.

    Its code computes something itself; the last one of a model is the loss.
    """

    name: str
    kind: str
    parameters: dict[str, int] = Field(
        default_factory=dict,
        description="elements of each trained parameter that it is the first to use",
    )
    parameter_bytes: float = 0.0
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

    forward: Calls = ()
    input_gradient: Calls = ()
    weight_gradient: Calls = ()

    def facts(self) -> LayerFacts:
        """The layer without its operations."""
        return LayerFacts(**{name: getattr(self, name) for name in LayerFacts.model_fields})


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
    dtype: str = "float32"
    count: int = Field(ge=0, le=10**9)
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


class Lifetimes(FrozenModel):
    """The storages that a first step and later ones make and free, in order.

    A code n >= 0 makes a storage of `sizes[n]` bytes; from len(sizes) on it is the workspace of an
    operation of the trace, which is freed at once. A code n < 0 frees storage number (-1 - n). The
    count of the step continues that of the start.
    """

    sizes: tuple[Affine, ...]
    start: tuple[int, ...] = Field(description="the model, the batch, and the first step")
    step: tuple[int, ...]
    graphs: tuple[tuple[int, int, int], ...] | None = Field(
        default=None,
        description="for each micro-batch the places, counted from the start, where autograd's "
        "graph begins, where the backward pass begins and where it has ended; None: not known",
    )

    @model_validator(mode="after")
    def _numbers_name_something(self) -> Lifetimes:
        made, ended = 0, set()
        for code in (*self.start, *self.step):
            if code < -made or code in ended:
                raise ValueError(
                    f"lifetimes: {code} frees a storage that does not exist; {made} were made"
                )
            made += 0 <= code < len(self.sizes)
            if code < 0:
                ended.add(code)
        if max(self.start, default=-1) >= len(self.sizes):
            raise ValueError("lifetimes: the start can only make storages")
        for graph in self.graphs or ():
            if not 0 <= graph[0] <= graph[1] <= graph[2] <= len(self.start) + len(self.step):
                raise ValueError(f"lifetimes: graphs {graph} are not increasing indices")
        return self

    def made_bytes(self, batch_size: int, workspaces: Sequence[float], least_bytes: float) -> float:
        """Bytes that a step allocates in storages of `least_bytes` or more.

        `workspaces` are those of the trace's operations.
        """
        import numpy as np

        bytes_of = np.array([*(line(batch_size) for line in self.sizes), *workspaces])
        if not (bytes_of >= least_bytes).any():
            return 0.0
        codes = np.array([code for code in self.step if code >= 0], dtype=np.int64)
        made = bytes_of[codes]
        return float(made[made >= least_bytes].sum())

    def events(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """The events of the start and one step, in order, as three arrays of one length.

        The number of the storage, in order of creation (-1 for a workspace); the code that made it;
        1 if it is made, -1 if it is freed, 0 for a workspace.
        """
        import numpy as np

        codes = np.array((*self.start, *self.step), dtype=np.int64)
        made, ended = (codes >= 0) & (codes < len(self.sizes)), codes < 0
        numbers = np.where(made, np.cumsum(made) - 1, -1)
        numbers[ended] = -1 - codes[ended]
        made_by = codes[made]
        codes[ended] = made_by[numbers[ended]]
        return numbers, codes, made.astype(np.int64) - ended

    def successors(self) -> dict[int, int]:
        """Pairs of storages of the same size: one that the step frees, and one that replaces it.

        The next step frees the replacement.
        """
        of = [code for code in (*self.start, *self.step) if 0 <= code < len(self.sizes)]
        found = sum(code >= 0 for code in self.start)
        ended = {-1 - code for code in self.step if code < 0}
        left: dict[int, list[int]] = {}
        for number in range(len(of) - 1, found - 1, -1):
            if number not in ended:
                left.setdefault(of[number], []).append(number)
        return {
            one: left[of[one]].pop() for one in sorted(ended) if one < found and left.get(of[one])
        }


class Structure(FrozenModel):
    """structure.json"""

    FILE: ClassVar[str] = "structure.json"
    schema_version: int = 2
    torch: str | None = Field(default=None, description="version of torch that traced it")
    batch_size: int = Field(ge=1)
    optimizer: str
    precision: Precision
    accumulation: int = Field(default=1, ge=1, description="micro-batches in a step")
    method: Literal["fake tensors", "real step"]
    parameters: int
    parameter_bytes: int
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
