"""Traces one training step of a model with fake tensors: `python -m trainwright.estimator.trace REQUEST RESULT`.

Two whole steps are run, the second is recorded (the optimizer's state exists by then), at two batch sizes, so that every
operation's FLOPs and bytes are known as a line over the batch size. No tensor is allocated. A model that looks at data while it
is built or run can't be traced so: then real steps of tiny batches are recorded instead, and the structure says so. What fails
there too is the model's own failure.

Runs the user's code, so it belongs in a process of its own (`tasks.extract` starts it with limits).
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch  # noqa: TID253 - this is a process of its own
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: TID253
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: TID253
from torch.utils._pytree import tree_leaves  # noqa: TID253
from torch.utils.flop_counter import flop_registry  # noqa: TID253

from trainwright.estimator import source as model_source
from trainwright.estimator.curves import Affine
from trainwright.estimator.errors import BadInput, TrainwrightError
from trainwright.estimator.source import BatchSpec, ModelDefinition
from trainwright.estimator.structure import Layer, Operation, Structure, family_of

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass
class _Recorded:
    """One operation as it ran."""

    kind: str
    flops: float
    bytes: float


@dataclass
class _Layer:
    kind: str
    output_shape: tuple[int, ...] = ()
    parameters: int = 0
    flops: float = 0.0


@dataclass
class _Step:
    """What one recorded step did."""

    operations: list[_Recorded] = field(default_factory=list)
    forward_flops: float = 0.0
    activation_bytes: float = 0.0
    peak_bytes: float = 0.0
    layers: dict[str, _Layer] = field(default_factory=dict)
    input_shapes: list[tuple[int, ...]] = field(default_factory=list)
    parameters: int = 0
    features: dict[str, float] = field(default_factory=dict)


class _Recorder(TorchDispatchMode):
    """Sees every operation below autograd, and every storage from its birth to its end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not say its types here
        self.step = _Step()
        self.recording = False
        self.forward = False
        self.optimizing = False
        self.live_bytes = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        self.layers: list[_Layer] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.optimizing and func is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # the optimizer reads its step count; which one does not matter
        out = func(*args, **kwargs)
        if func.namespace in ("prim", "profiler"):
            return out  # bookkeeping, not work
        results = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
        inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        for one in results:
            self.watch(one)
        if self.recording:
            self._record(func, args, kwargs, out, inputs, results)
        return out

    def _record(self, func: Any, args: Any, kwargs: Any, out: Any, inputs: Any, results: Any) -> None:
        packet = func._overloadpacket
        flops = float(flop_registry[packet](*args, **kwargs, out_val=out)) if packet in flop_registry else 0.0
        if self.forward:
            self.step.forward_flops += flops
            for layer in self.layers:
                layer.flops += flops
        known = {one.untyped_storage()._cdata for one in inputs}
        writes = func._schema.is_mutable or any(one.untyped_storage()._cdata not in known for one in results)
        moved = 0.0
        if writes and not func.is_view:  # otherwise a view, or a reshape that needs no copy
            moved = float(sum(one.numel() * one.element_size() for one in (*inputs, *results)))
        self.step.operations.append(_Recorded(str(packet), flops, moved))

    def watch(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage as alive until it ends."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages and self._storages[key]() is not None:
            return
        size = storage.nbytes()

        def ended(_: Any, key: int = key, size: int = size) -> None:
            self.live_bytes -= size
            self._storages.pop(key, None)

        self._storages[key] = weakref.ref(storage, ended)
        self.live_bytes += size
        if self.recording:
            self.step.peak_bytes = max(self.step.peak_bytes, self.live_bytes)


@dataclass(frozen=True)
class StepSpec:
    """How a step is to be made of a model."""

    definition: ModelDefinition
    config: dict[str, Any]
    spec: BatchSpec | None
    optimizer: dict[str, Any]
    precision: str


def trace(what: StepSpec, batch_size: int) -> Structure:
    """The structure of a model's training step. Raises BadInput where the model can't do one."""
    try:
        with _quiet_initialisers():
            first = _record(what, batch_size, fake=True)
            second = _record(what, 2 * batch_size, fake=True)
        return _structure(what, batch_size, batch_size, first, second, "fake tensors")
    except BadInput as error:
        if error.__cause__ is None:
            raise  # our own finding; an exception of the model's may be due to the fake tensors only
    small = min(batch_size, 2)
    first, second = _record(what, small, fake=False), _record(what, 2 * small, fake=False)
    return _structure(what, batch_size, small, first, second, "real step")


def _record(what: StepSpec, batch_size: int, *, fake: bool) -> _Step:
    """Run two steps of this batch; what the second did."""
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
    recorder = _Recorder()
    dtype = _DTYPES[what.precision]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with mode:
            model = model_source.build(what.definition, what.config)  # in the default dtype: fake models can't be cast
        with mode, recorder:
            for one in (*model.parameters(), *model.buffers()):
                recorder.watch(one)
            parameters = [one for one in model.parameters() if one.requires_grad]
            if not parameters:
                raise BadInput("model: has no parameters to train")
            optimizer = _optimizer(parameters, what.optimizer)
            _name_layers(model, recorder)
            for recording in (False, True):
                recorder.recording = recording
                recorder.step.peak_bytes = float(recorder.live_bytes)
                _one_step(what, model, optimizer, recorder, batch_size, dtype)
    finally:
        torch.set_default_dtype(before)
    recorder.step.parameters = sum(one.numel() for one in model.parameters())
    recorder.step.features = _features(model, recorder.step.input_shapes)
    return recorder.step


def _one_step(
    what: StepSpec, model: torch.nn.Module, optimizer: Any, recorder: _Recorder, batch_size: int, dtype: torch.dtype
) -> None:
    optimizer.zero_grad(set_to_none=True)
    recording, recorder.recording = recorder.recording, False
    inputs, targets = _batch(what, batch_size, dtype)
    recorder.recording = recording
    recorder.step.input_shapes = [tuple(one.shape) for one in tree_leaves(inputs) if isinstance(one, torch.Tensor)]
    for one in tree_leaves((inputs, targets)):
        if isinstance(one, torch.Tensor):
            recorder.watch(one)
    loss_of = model_source.loss_function(what.definition, what.spec.task if what.spec else "image-classification")
    before = recorder.live_bytes
    recorder.forward = True
    with _user_code("model", "its forward pass"):
        outputs = model(inputs)
    recorder.forward = False
    recorder.step.activation_bytes = max(0.0, recorder.live_bytes - before)
    _check_outputs(what, outputs)
    with _user_code("loss", "it"):
        loss = loss_of(outputs, targets)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise BadInput(f"loss: gave {shape}; allowed: a scalar tensor, the mean over the batch")
    with _user_code("model", "its backward pass"):
        loss.backward()
    recorder.optimizing = True
    optimizer.step()
    recorder.optimizing = False


@contextlib.contextmanager
def _user_code(field: str, doing: str) -> Iterator[None]:
    try:
        yield
    except TrainwrightError:
        raise
    except Exception as error:
        raise BadInput(f"{field}: {doing} raised {type(error).__name__}: {error}") from error


def _check_outputs(what: StepSpec, outputs: Any) -> None:
    """Fake labels are never out of range, so the width of the output is compared with the number of classes."""
    classes = what.spec.classes if what.spec else None
    if what.definition.loss is None and classes is not None and isinstance(outputs, torch.Tensor):
        width = outputs.shape[1] if outputs.dim() > 1 else 1
        if width < classes:
            raise BadInput(f"model: gives {width} outputs, the data has {classes} classes")


def _batch(what: StepSpec, size: int, dtype: torch.dtype) -> tuple[Any, Any]:
    if what.spec is None:
        example = what.definition.example_batch
        if example is None:
            raise BadInput(
                "model.source: defines no example_batch(batch_size), and there is no data to take the shapes from"
            )
        with _user_code("model.source", f"example_batch({size})"):
            inputs, targets = example(size)
        return inputs, targets
    made = {
        name: torch.zeros((size, *shape), dtype=_input_dtype(what.spec.input_dtypes[name], dtype))
        for name, shape in what.spec.inputs.items()
    }
    inputs = next(iter(made.values())) if len(made) == 1 else made
    return inputs, torch.zeros(size, dtype=_input_dtype(what.spec.target_dtype, dtype))


def _input_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return dtype if name.startswith("float") else torch.int64


def _optimizer(parameters: list[torch.nn.Parameter], spec: dict[str, Any]) -> torch.optim.Optimizer:
    name, decay = spec.get("name", "adamw"), spec.get("weight_decay", 0.0)
    if name in ("sgd", "momentum"):
        momentum = spec.get("momentum", 0.9) if name == "momentum" else 0.0
        return torch.optim.SGD(parameters, lr=1e-3, momentum=momentum, weight_decay=decay)
    kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
    return kind(parameters, lr=1e-3, weight_decay=decay)


def _name_layers(model: torch.nn.Module, recorder: _Recorder) -> None:
    """Note shape and FLOPs of each module without children, as it runs."""
    for name, module in model.named_modules():
        if any(True for _ in module.children()):
            continue
        count = sum(one.numel() for one in module.parameters(recurse=False))
        layer = recorder.step.layers.setdefault(
            name or type(module).__name__, _Layer(type(module).__name__, parameters=count)
        )

        def enter(_: Any, __: Any, layer: _Layer = layer) -> None:
            if recorder.recording:
                recorder.layers.append(layer)

        def leave(_: Any, __: Any, out: Any, layer: _Layer = layer) -> None:
            if recorder.recording:
                recorder.layers.remove(layer)
                tensors = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
                layer.output_shape = tuple(tensors[0].shape) if tensors else ()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)


@contextlib.contextmanager
def _quiet_initialisers() -> Iterator[None]:
    """torch.nn.init without effect: values do not matter to fake tensors, and some initialisers look at them."""
    kept: dict[str, Callable[..., Any]] = {}
    for name in dir(torch.nn.init):
        function = getattr(torch.nn.init, name)
        if name.endswith("_") and not name.startswith("_") and callable(function):
            kept[name] = function
            setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(torch.nn.init, name, function)


def _line(low: float, high: float, size: int) -> Affine:
    """The line through the values at `size` and `2 · size`."""
    per_sample = max(0.0, (high - low) / size)
    return Affine(fixed=max(0.0, low - per_sample * size), per_sample=per_sample)


def _structure(what: StepSpec, batch_size: int, size: int, first: _Step, second: _Step, method: Any) -> Structure:
    kinds = [one.kind for one in first.operations]
    if kinds == [one.kind for one in second.operations]:
        pairs = zip(first.operations, second.operations, strict=True)
        lines = Counter(
            (one.kind, _line(one.flops, two.flops, size), _line(one.bytes, two.bytes, size)) for one, two in pairs
        )
    else:  # control flow by batch size: take the step as it was, in proportion
        lines = Counter(
            (one.kind, Affine(fixed=0, per_sample=one.flops / size), Affine(fixed=0, per_sample=one.bytes / size))
            for one in first.operations
        )
    layers = [
        Layer(
            name=name, kind=one.kind, output_shape=(batch_size, *one.output_shape[1:]), parameters=one.parameters,
            forward_flops=one.flops * batch_size / size,
        )
        for name, one in first.layers.items()
    ]  # fmt: skip
    return Structure(
        batch_size=batch_size,
        optimizer=str(what.optimizer.get("name", "adamw")),
        precision=what.precision,
        method=method,
        parameters=first.parameters,
        parameter_bytes=first.parameters * _DTYPES[what.precision].itemsize,
        forward_flops_per_sample=first.forward_flops / size,
        activation_bytes_per_sample=first.activation_bytes / size,
        peak_memory_bytes=_line(first.peak_bytes, second.peak_bytes, size),
        layers=layers,
        features={**first.features, "batch_size": float(batch_size)},
        operations=dict(Counter(kinds)),
        trace=[
            Operation(kind=kind, family=family_of(kind, flops, moved), count=count, flops=flops, bytes=moved)
            for (kind, flops, moved), count in lines.items()
        ],
    )


def _features(model: torch.nn.Module, shapes: list[tuple[int, ...]]) -> dict[str, float]:
    """The hand features of the benchmark family: layers, filters, widths, image size."""
    convolutions = [one for one in model.modules() if isinstance(one, torch.nn.modules.conv._ConvNd)]
    dense = [one for one in model.modules() if isinstance(one, torch.nn.Linear)]
    image = next((shape for shape in shapes if len(shape) == 4), None)
    return {
        "conv_layers": float(len(convolutions)),
        "filters": float(sum(one.out_channels for one in convolutions)),
        "dense_layers": float(len(dense)),
        "dense_widths": float(sum(one.out_features for one in dense)),
        "image_height": float(image[2]) if image else 0.0,
        "image_width": float(image[3]) if image else 0.0,
    }


def main() -> int:
    """Read the request, write the structure, or the error as a document."""
    request = json.loads(Path(sys.argv[1]).read_text())
    limit = request["memory_limit_bytes"]
    if limit:
        with contextlib.suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        definition = model_source.load(Path(request["folder"]), request["entry"])
        spec = BatchSpec.model_validate(request["spec"]) if request["spec"] else None
        what = StepSpec(definition, request["config"], spec, request["optimizer"], request["precision"])
        answer = trace(what, request["batch_size"]).model_dump_json()
    except TrainwrightError as error:
        answer = json.dumps({"error": error.document()})
    except MemoryError:
        answer = json.dumps(
            {"error": {"kind": "bad_input", "message": "model: tracing it takes more memory than allowed"}}
        )
    Path(sys.argv[2]).write_text(answer)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
