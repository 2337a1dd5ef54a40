"""One training step of a model, as ranks run it: forward, loss, backward, optimizer.

Tracing with fake tensors and measuring time and memory use the same step. Loads torch and runs the
user's code.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch  # noqa: TID253 - code that runs steps is in a separate process
from torch.utils._pytree import tree_leaves  # noqa: TID253

from trainwright.estimator.errors import BadInput, TrainwrightError
from trainwright.estimator.precision import PARAMETER_DTYPES, autocast, for_loss
from trainwright.estimator.structure import Precision
from trainwright.estimator.trace import source as model_source
from trainwright.estimator.trace.batch_loss import BatchLoss, loss_function
from trainwright.estimator.trace.checked_rows import RealRows
from trainwright.estimator.trace.output_forms import forms_of
from trainwright.estimator.trace.recorder import OperationRecorder
from trainwright.estimator.trace.source import BatchSpec, ModelDefinition
from trainwright.estimator.trace.trainable_model import require_trainable


@dataclass(frozen=True)
class TrainingStepSpec:
    """How to make a step from a model.

    `estimator.precision` explains the precisions. `accumulation` is the number of micro-batches
    whose gradients a step sums.
    """

    definition: ModelDefinition
    config: dict[str, Any]
    spec: BatchSpec | None
    optimizer: dict[str, Any]
    precision: Precision = "fp32"
    accumulation: int = 1
    label_smoothing: float = 0.0
    rows: RealRows | None = None
    """real rows, on which the source's loss is checked; None: it is not"""

    def build(self) -> torch.nn.Module:
        """The model, in its precision."""
        with default_dtype(self.precision):
            return model_source.build(self.definition, self.config)

    @property
    def loss(self) -> BatchLoss:
        """The loss of training."""
        task = self.spec.task if self.spec else "image-classification"
        return loss_function(self.definition, task, self.label_smoothing)


@dataclass
class TrainingStep:
    """A model with its optimizer and batches, ready to step."""

    what: TrainingStepSpec
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    micro_batches: list[tuple[Any, Any]]
    input_shapes: list[tuple[int, ...]] = field(default_factory=list)
    activation_bytes: float = 0.0
    outputs: Any = None
    """forms of the model's outputs for a micro-batch; see `loss_check`"""

    def __call__(self, recorder: OperationRecorder | None = None) -> None:
        """Do one step. Raises BadInput if the model or its loss fails."""
        self.optimizer.zero_grad(set_to_none=True)
        for inputs, targets in self.micro_batches:
            self._forward_backward(inputs, targets, recorder)
        if recorder is not None:
            recorder.optimizing = True
        self.optimizer.step()
        if recorder is not None:
            recorder.optimizing = False

    def _forward_backward(
        self, inputs: Any, targets: Any, recorder: OperationRecorder | None
    ) -> None:
        before = recorder.live_bytes if recorder else 0.0
        with autocast(self.what.precision):
            if recorder is not None:
                recorder.graph_begins()
                recorder.forward = True
            with _user_code("model", "its forward pass"):
                outputs = self.model(inputs)
            if recorder is not None:
                recorder.forward = False
                self.activation_bytes = max(0.0, recorder.live_bytes - before)
            self._check_outputs(outputs, targets)
            self.outputs = forms_of(outputs)
            with _user_code("loss", "it"):
                loss = self.what.loss(for_loss(outputs), targets)
        if not loss.requires_grad:
            dtype = str(loss.dtype).removeprefix("torch.")
            raise BadInput(
                f"loss: returned a tensor ({dtype}) without a gradient; allowed: one that "
                "depends on the model's parameters"
            )
        if recorder is not None:
            recorder.graph_goes_on()
        with _user_code("model", "its backward pass"):
            (loss / len(self.micro_batches) if len(self.micro_batches) > 1 else loss).backward()
        if recorder is not None:
            recorder.graph_goes_on()

    def _check_outputs(self, outputs: Any, targets: Any) -> None:
        """Compare the width of the output with the number of classes.

        Fake labels are never out of range, so a wrong width would cause no error.
        """
        if (
            self.what.definition.loss is not None
            or self.what.spec is None
            or not isinstance(outputs, torch.Tensor)
        ):
            return
        classes = self.what.spec.classes
        if classes is not None:
            width = outputs.shape[1] if outputs.dim() > 1 else 1
            if width < classes:
                raise BadInput(
                    f"model: returns {width} outputs, but the data has {classes} classes"
                )
        elif isinstance(targets, torch.Tensor) and outputs.numel() != targets.numel():
            raise BadInput(
                f"model: returns {tuple(outputs.shape)}, but the data's targets are "
                f"{tuple(targets.shape)}"
            )


def prepare(what: TrainingStepSpec, model: torch.nn.Module, batch_size: int) -> TrainingStep:
    """A step of `batch_size` samples for a built model, in `what.accumulation` micro-batches."""
    if batch_size % what.accumulation:
        raise BadInput(
            f"accumulation: got {what.accumulation}; allowed: a divisor of the batch size "
            f"{batch_size}"
        )
    require_trainable(model)
    parameters = [one for one in model.parameters() if one.requires_grad]
    if not parameters:
        raise BadInput("model: has no parameters to train")
    micro = batch_size // what.accumulation
    batches = [example(what, micro) for _ in range(what.accumulation)]
    made = TrainingStep(what, model, _optimizer(parameters, what.optimizer), batches)
    made.input_shapes = _shapes(batches[0][0])
    return made


@contextlib.contextmanager
def default_dtype(precision: str) -> Iterator[None]:
    """Creates tensors in the precision's type: fake models can't be converted afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(PARAMETER_DTYPES[precision])
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _user_code(field: str, doing: str) -> Iterator[None]:
    try:
        yield
    except TrainwrightError:
        raise
    except Exception as error:
        raise BadInput(f"{field}: {doing} raised {model_source.described(error)}") from error


def example(what: TrainingStepSpec, size: int) -> tuple[Any, Any]:
    """A batch of inputs and targets. Raises BadInput if the source's `example_batch` fails."""
    dtype = PARAMETER_DTYPES[what.precision]
    if what.spec is None:
        batch_of = what.definition.example_batch
        if batch_of is None:
            raise BadInput(
                "model.source: defines no example_batch(batch_size), and there is no data to take "
                "the shapes from; `trainwright plan JOB` takes them from the job's data"
            )
        with _user_code("model.source", f"example_batch({size})"):
            batch = batch_of(size)
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            many = isinstance(batch, tuple | list)
            gave = (
                f"{len(batch)} values"
                if many
                else "a tensor"
                if torch.is_tensor(batch)
                else type(batch).__name__
            )
            raise BadInput(
                f"model.source: example_batch({size}) returned {gave}; allowed: a pair "
                "(inputs, targets)"
            )
        other = size - 1 if size > 1 else 2
        with _user_code("model.source", f"example_batch({other})"):
            if _shapes(batch_of(other)) == _shapes(batch):
                raise BadInput(
                    f"model.source: example_batch({other}) returns the same shapes as "
                    f"example_batch({size}); allowed: the requested number of samples"
                )
        return batch[0], batch[1]
    made = {
        name: torch.zeros((size, *shape), dtype=_input_dtype(what.spec.input_dtypes[name], dtype))
        for name, shape in what.spec.inputs.items()
    }
    inputs = model_source.nested(made, what.spec.nesting)
    targets = (size, *what.spec.target_shape)
    return inputs, torch.zeros(targets, dtype=_input_dtype(what.spec.target_dtype, dtype))


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    return [tuple(one.shape) for one in tree_leaves(batch) if isinstance(one, torch.Tensor)]


def _input_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return dtype if name.startswith("float") else torch.int64


def decay_groups(parameters: list[Any], exclude: str) -> list[Any]:
    """The parameters as an optimizer takes them, as one group or two.

    With `vectors`, those of fewer than two dimensions are the second group, without weight decay.
    """
    if exclude == "none":
        return parameters
    vectors = [one for one in parameters if one.ndim < 2]
    others = [one for one in parameters if one.ndim >= 2]
    groups = ({"params": others}, {"params": vectors, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


def uncompiled(kind: type[AnyOptimizer]) -> type[AnyOptimizer]:
    """A subclass of a torch optimizer that computes the same without loading `torch.compile`.

    torch excludes its optimizers' methods from compilation. Each of them imports the compiler to do
    so, which takes over a second and 70 MiB in a process that compiles nothing.
    """
    methods = {
        name: inspect.unwrap(method)
        for name, method in vars(torch.optim.Optimizer).items()
        if inspect.isfunction(method) and hasattr(method, "__wrapped__")
    }
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), {**methods, "step": step})


def _optimizer(parameters: list[Any], spec: dict[str, Any]) -> torch.optim.Optimizer:
    name, decay = spec.get("name", "adamw"), spec.get("weight_decay", 0.0)
    parameters = decay_groups(parameters, spec.get("decay_exclude", "none"))
    if name in ("sgd", "momentum"):
        momentum = spec.get("momentum", 0.9) if name == "momentum" else 0.0
        sgd = uncompiled(torch.optim.SGD)
        return sgd(parameters, lr=1e-3, momentum=momentum, weight_decay=decay)
    kind = uncompiled(torch.optim.Adam if name == "adam" else torch.optim.AdamW)
    return kind(parameters, lr=1e-3, weight_decay=decay)
