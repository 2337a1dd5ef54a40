"""Traces one training step of a model with fake tensors, which allocate no memory.

Two whole steps run at each of two batch sizes. The second step is recorded, because only then does
the optimizer's state exist. From the two sizes, every operation's FLOPs, bytes and sizes become
lines over the batch size. A model that reads values while it is built or run can't be traced this
way; then real steps of tiny batches are recorded, and the structure says so. If these fail too, the
model itself is broken. This runs the user's code, so `answer` is called in the sandbox only
(`infra.sandbox`).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch  # noqa: TID253 - this is a separate process
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: TID253
from torch.utils._pytree import tree_leaves  # noqa: TID253

from trainwright.estimator.errors import BadInput, TrainwrightError
from trainwright.estimator.memory.step_memory import most_held_bytes
from trainwright.estimator.precision import PARAMETER_DTYPES
from trainwright.estimator.structure import Layer, Module, Structure
from trainwright.estimator.trace import source as model_source
from trainwright.estimator.trace.cuts.model_cuts import cut_step
from trainwright.estimator.trace.cuts.unit_layers import units_with_layers
from trainwright.estimator.trace.dense import dense_product
from trainwright.estimator.trace.fake_models import RealConstants, quiet_initialisers
from trainwright.estimator.trace.layer_work import layer_work
from trainwright.estimator.trace.loss_check import loss_notice
from trainwright.estimator.trace.operations import tensors
from trainwright.estimator.trace.real_rows import real_rows
from trainwright.estimator.trace.recorder import LayerSeen, Lives, OperationRecorder, Recording
from trainwright.estimator.trace.source import BatchSpec
from trainwright.estimator.trace.training_step import (
    TrainingStep,
    TrainingStepSpec,
    default_dtype,
    prepare,
)
from trainwright.estimator.trace.two_sizes import at_any_size, lifetimes, line

# Torch's compiler, which FakeTensorMode imports: here the sandbox's traces share it. It makes its
# cache's folder when it is imported; nothing is compiled.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
importlib.import_module("torch._dynamo").config.disable = True  # functions that a model compiles


_MOST_RUN = 1 << 26
"""The most parameters of a model that runs for the check of its loss"""


@dataclass
class _Traced:
    """One recorded step at one batch size."""

    recording: Recording
    step: TrainingStep
    idle_bytes: float
    lives: Lives


def trace(what: TrainingStepSpec, batch_size: int) -> Structure:
    """The structure of a model's training step. Raises BadInput if the model can't do a step."""
    traced = _with_fake_tensors(what, batch_size)
    if traced is None:
        small = what.accumulation * min(batch_size, 2)
        first, second = _traced(what, small, fake=False), _traced(what, 2 * small, fake=False)
        traced = _structure(what, batch_size, small, first, second, "real step")
    found = cut_step(what)
    units = units_with_layers(found, traced.layer_work, traced.modules[0].name)
    fake = traced.method == "fake tensors" and found.is_fake
    parts = {"builds_parts": fake and what.definition.adapt is None}
    return traced.model_copy(update={"units": units, "not_cut": found.not_cut, **parts})


def _with_fake_tensors(what: TrainingStepSpec, batch_size: int) -> Structure | None:
    """None if the model raises an exception, as one that reads values of tensors does."""
    try:
        with quiet_initialisers():
            first = _traced(what, batch_size, fake=True)
            second = _traced(what, 2 * batch_size, fake=True)
    except BadInput as error:
        if error.__cause__ is None:
            raise  # our own error; an exception in the model may come from the fake tensors
        return None
    return _structure(what, batch_size, batch_size, first, second, "fake tensors")


def _traced(what: TrainingStepSpec, batch_size: int, *, fake: bool) -> _Traced:
    """Run two steps of this batch size, and record the second."""
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
    constants: Any = RealConstants() if fake else contextlib.nullcontext()
    recorder = OperationRecorder()
    with default_dtype(what.precision):
        with mode, constants:
            model = model_source.build(what.definition, what.config)
        with mode, recorder:
            step = prepare(what, model, batch_size)
            for one in (*model.parameters(), *model.buffers(), *tree_leaves(step.micro_batches)):
                if isinstance(one, torch.Tensor):
                    recorder.watch(one)
            _follow_layers(model, recorder)
            step(recorder)
            idle = recorder.live_bytes
            with recorder.record() as recording:
                step(recorder)
    return _Traced(recording, step, idle, recorder.lives)


def _follow_layers(model: torch.nn.Module, recorder: OperationRecorder) -> None:
    """Record the shape and FLOPs of each module as it runs.

    A shared parameter counts for the first module that has it.
    """
    counted: set[int] = set()
    recorder.tracker.watch_parameters(model)
    for name, module in model.named_modules():
        own = {
            id(one): one.numel()
            for one in module.parameters(recurse=False)
            if id(one) not in counted
        }
        counted |= own.keys()
        leaf = not any(True for _ in module.children())
        layer = LayerSeen(type(module).__name__, parameters=sum(own.values()), leaf=leaf)
        name = name or type(module).__name__
        recorder.layers[name] = layer

        def enter(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
            if recorder.recording is not None:
                recorder.tracker.enter(name)
                recorder.layers[name].calls += recorder.forward
                if recorder.forward:
                    recorder.call_begins(name, tensors((args, kwargs)))

        def leave(module: Any, _: Any, out: Any, layer: LayerSeen = layer) -> None:
            if recorder.recording is None:
                return
            recorder.tracker.leave()
            if recorder.forward:
                recorder.call_ends()
            results = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
            if recorder.forward and results:
                layer.output_shape = tuple(results[0].shape)
                layer.output_bytes = float(sum(one.nbytes for one in results))
                layer.dense = dense_product(module, results[0])

        module.register_forward_pre_hook(enter, with_kwargs=True)
        # always_call: the model may catch an exception of the module and continue.
        module.register_forward_hook(leave, always_call=True)


def _structure(
    what: TrainingStepSpec, batch_size: int, size: int, first: _Traced, second: _Traced, method: Any
) -> Structure:
    model, scale = first.step.model, batch_size / size
    parameters = sum(one.numel() for one in model.parameters())
    layers = [
        Layer(
            name=name,
            kind=one.kind,
            output_shape=_of_batch(one.output_shape, size, batch_size),
            parameters=one.parameters,
            forward_flops=one.forward_flops * scale,
        )
        for name, one in first.recording.layers.items()
        if one.leaf or one.parameters or one.forward_flops
    ]
    peaks = [
        max((one.live_bytes for one in each.recording.operations), default=0.0)
        for each in (first, second)
    ]
    idle = line(first.idle_bytes, second.idle_bytes, size)
    operations, ran = at_any_size(
        first.recording.operations, second.recording.operations, size, idle
    )
    notice = ""
    if what.rows is not None:
        few, many = (size // what.accumulation, 2 * size // what.accumulation)
        outputs = (few, first.step.outputs), (many, second.step.outputs)
        small = parameters <= _MOST_RUN
        notice = loss_notice(what.loss, *outputs, what.rows, what.build if small else None)
    made = Structure(
        loss_notice=notice,
        torch=importlib.metadata.version("torch"),
        batch_size=batch_size,
        optimizer=str(what.optimizer.get("name", "adamw")),
        precision=what.precision,
        accumulation=what.accumulation,
        method=method,
        parameters=parameters,
        parameter_tensors=sum(one.requires_grad for one in model.parameters()),
        parameter_bytes=parameters * PARAMETER_DTYPES[what.precision].itemsize,
        forward_flops_per_sample=first.recording.forward_flops / size,
        activation_bytes_per_sample=first.step.activation_bytes / size * what.accumulation,
        idle_bytes=idle,
        peak_memory_bytes=line(peaks[0], peaks[1], size),
        layers=layers,
        modules=[
            Module(
                name=name, kind=one.kind, output_shape=_of_batch(one.output_shape, size, batch_size)
            )
            for name, one in first.recording.layers.items()
        ],
        features={**_features(model, first.step.input_shapes), "batch_size": float(batch_size)},
        operations=dict(Counter(one.kind for one in first.recording.operations)),
        trace=operations,
        layer_work=layer_work(
            model, first.recording, second.recording, size // what.accumulation, ran
        ),
        lifetimes=lifetimes(first.lives, second.lives, size, operations, ran),
    )
    return made.model_copy(update={"most_held_bytes": most_held_bytes(made)})


def _of_batch(shape: tuple[int, ...], size: int, batch_size: int) -> tuple[int, ...]:
    """A shape at batch size `size`, converted to `batch_size`; an empty shape stays empty."""
    return (shape[0] * batch_size // size, *shape[1:]) if shape else ()


def _features(model: torch.nn.Module, shapes: list[tuple[int, ...]]) -> dict[str, float]:
    """The features of the benchmark family: layers, filters, widths, image size."""
    convolutions = [
        one for one in model.modules() if isinstance(one, torch.nn.modules.conv._ConvNd)
    ]
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


def answer(request: dict[str, Any]) -> str:
    """The requested structure as JSON, or `{"error": …}`. Runs the model's code."""
    try:
        definition = model_source.load(Path(request["folder"]), request["entry"])
        spec = BatchSpec.model_validate(request["spec"]) if request["spec"] else None
        what = TrainingStepSpec(
            definition,
            request["config"],
            spec,
            request["optimizer"],
            request["precision"],
            request["accumulation"],
            request["label_smoothing"],
        )
        what = replace(what, rows=real_rows(what, request["targets"]))
        return trace(what, request["batch_size"]).model_dump_json()
    except TrainwrightError as error:
        return json.dumps({"error": error.document()})
    except MemoryError:
        return json.dumps(
            {"error": BadInput("model: tracing it ended in a MemoryError").document()}
        )
