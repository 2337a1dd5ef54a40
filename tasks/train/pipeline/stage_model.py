"""A stage of a pipeline: consecutive units of a model, run by its own modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID253 - only ranks import this
from torch.utils._pytree import TreeSpec  # noqa: TID253

from trainwright.estimator.structure import Unit
from trainwright.estimator.trace.cuts.forward_graph import (
    ForwardCall,
    ForwardGraph,
    TensorFacts,
    TensorRef,
    tensors_in,
)
from trainwright.tasks.errors import BadInput
from trainwright.tasks.train.pipeline.prepared_call import PreparedCall, getter
from trainwright.tasks.train.pipeline.recomputed_calls import MadeCall, with_recomputed

if TYPE_CHECKING:
    from trainwright.estimator.trace.cuts.model_cuts import CutModel


class StageModel:
    """The units [first, end) of a cut model.

    It makes the calls of the units with the model's own modules, parameters and buffers, so that
    training or evaluation mode, hooks of modules and what else was changed in them count. Whether
    it trains is the model's mode.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cut: CutModel,
        first: int,
        end: int,
        recomputed: Sequence[str] = (),
    ) -> None:
        """`cut` is of a model built from the same source and configuration.

        `recomputed`: what is done again in backward passes, by `memory.recompute_names`.
        """
        if not 0 <= first < end <= len(cut.units):
            raise ValueError(f"units [{first}, {end}) of {len(cut.units)}")
        self.model, self._cut = model, cut
        self.units: tuple[Unit, ...] = cut.units[first:end]
        self.is_first, self.is_last = first == 0, end == len(cut.units)
        self.first_dropout = sum(one.dropouts for one in cut.units[:first])
        """the number of the stage's first dropout in a pass of the whole model"""
        self._calls = {
            training: range(one[first], one[end]) for training, one in cut.begins.items()
        }
        self._modules = dict(model.named_modules())
        self._prepared: dict[bool, list[MadeCall]] = {}
        self._given: dict[bool, list[TensorRef]] = {}
        self._sent: dict[bool, list[TensorRef]] = {}
        for training, graph in cut.graphs.items():
            own = self._calls[training]
            done = _last_uses(graph, own)
            calls = [
                PreparedCall(
                    graph.calls[one],
                    self._modules,
                    graph.last_uses.keys(),
                    done.get(one, []),
                    frozen=training and not graph.calls[one].gradients,
                )
                for one in own
            ]
            names = recomputed if training else ()
            self._prepared[training] = with_recomputed(graph, own, calls, self._modules, names)
            entering = graph.inputs.refs() if self.is_first else graph.crossing(own.start)
            self._given[training], self._sent[training] = entering, graph.crossing(own.stop)

    @property
    def _graph(self) -> ForwardGraph:
        return self._cut.graphs[self.model.training]

    @property
    def receives(self) -> list[TensorFacts]:
        """The tensors that the stage before sends, in order; of the first stage, the inputs."""
        return [self._graph.facts[one] for one in self._given[self.model.training]]

    @property
    def sends(self) -> list[TensorFacts]:
        """The tensors that the next stage receives, in order; none of the last stage."""
        if self.is_last:
            return []
        return [self._graph.facts[one] for one in self._sent[self.model.training]]

    @cached_property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that it uses, by name; of the first stage also those that none uses.

        Several stages may hold one: its gradient is the sum of theirs. A layer whose code is in
        several units is in one of them (`Unit.layers`), which may not use all its parameters.
        """
        own, others = self._split(lambda call: call.parameters)
        return {
            name: one
            for name, one in self.model.named_parameters()
            if name in own or (self.is_first and name not in others)
        }

    @cached_property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers of its modules, by name; of the first stage also those of no stage's."""
        own, others = self._split(lambda call: call.reads)
        return {
            name: one
            for name, one in self.model.named_buffers()
            if (owner := name.rpartition(".")[0]) in own or (self.is_first and owner not in others)
        }

    def _split(self, of: Callable[[ForwardCall], frozenset[str]]) -> tuple[set[str], set[str]]:
        """The names that a property of calls has in this stage, and in others."""
        own, others = set[str](), set[str]()
        for training, graph in self._cut.graphs.items():
            for number, call in enumerate(graph.calls):
                (own if number in self._calls[training] else others).update(of(call))
        return own, others

    def __call__(self, given: Any, samples: int) -> Any:
        """What the next stage receives, in the order of `sends`; of the last stage, the outputs.

        `given`: the model's argument in the first stage, in others the tensors of `receives`;
        `samples`: how many it is of. Raises BadInput for inputs of another form than those that
        the model was cut with.
        """
        graph, training = self._graph, self.model.training
        if self.is_first and graph.inputs.spec is not None:
            given = _in_order(given, graph.inputs.spec)
        tensors = tensors_in(given)
        if self.is_first:
            _require_inputs(graph, tensors, samples)
        values = dict(zip(self._given[training], tensors, strict=True))
        for call in self._prepared[training]:
            call.make(values, samples)
        if self.is_last:
            return getter(graph.outputs, self._modules)(values, samples)
        return tuple(values[one] for one in self._sent[training])


class MicroBatchPass:
    """The forward pass of a micro-batch through a stage, and its backward pass.

    `received` are the tensors of `StageModel.receives`, or the model's argument in the first stage.
    """

    def __init__(self, stage: StageModel, received: Any, samples: int) -> None:
        self._gradients: dict[int, torch.Tensor] = {}
        self._received = [] if stage.is_first else list(received)
        for place, facts in enumerate([] if stage.is_first else stage.receives):
            wanted = facts.gradient or self._received[place].requires_grad
            tensor = self._received[place].detach()
            if wanted and torch.is_grad_enabled():
                # A hook gets the gradient as autograd made it; `grad` would be a copy with the
                # strides of the tensor, for which a convolution may choose another kernel.
                tensor.requires_grad_().register_hook(
                    functools.partial(self._gradients.__setitem__, place)
                )
            self._received[place] = tensor
        # Autocast converts a leaf once for all that use it, and others for each of them.
        given = [torch.ops.aten.alias(one) for one in self._received]
        self.outputs: Any = stage(received if stage.is_first else given, samples)
        """as `StageModel` returns them"""

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of what it received; those of parameters are added to theirs.

        `gradients` are of the tensors that the stage sends; of the last stage, of the loss that
        `outputs` was replaced by, or of the tensors in it. None: it has none.
        """
        pairs = [
            (one, gradient)
            for one, gradient in zip(tensors_in(self.outputs), gradients, strict=True)
            if gradient is not None and one.requires_grad
        ]
        if pairs:
            torch.autograd.backward([one for one, _ in pairs], [two for _, two in pairs])
        for one in self._received:
            one.grad = None
        return [self._gradients.pop(place, None) for place in range(len(self._received))]


def _last_uses(graph: ForwardGraph, calls: range) -> dict[int, list[TensorRef]]:
    """By call: the tensors that are used no more after it."""
    found: dict[int, list[TensorRef]] = {}
    for ref, last in graph.last_uses.items():
        if last in calls:
            found.setdefault(last, []).append(ref)
    return found


def _in_order(given: Any, spec: TreeSpec) -> Any:
    """A value whose dicts have their keys in the order of `spec`, as far as they are the same."""
    parts = spec.children()
    if isinstance(given, dict) and spec.type is dict and {*given} == {*spec.context}:
        pairs = zip(spec.context, parts, strict=True)
        return {key: _in_order(given[key], part) for key, part in pairs}
    if type(given) in (list, tuple) and spec.type is type(given) and len(given) == len(parts):
        return type(given)(map(_in_order, given, parts))
    return given


def _require_inputs(graph: ForwardGraph, tensors: Sequence[torch.Tensor], samples: int) -> None:
    planned = [graph.facts[one].shape_of(samples) for one in graph.inputs.refs()]
    shapes = [tuple(one.shape) for one in tensors]
    if shapes != planned:
        raise BadInput(
            f"train.layout: a pipeline got inputs of shape {', '.join(map(str, shapes))} for "
            f"{samples} samples; allowed: {', '.join(map(str, planned))}, as the model was cut with"
        )


def packed(tensor: torch.Tensor, facts: TensorFacts) -> torch.Tensor:
    """A tensor as it is sent: contiguous, in the order of its dimensions in memory."""
    return tensor.detach().permute(facts.order).contiguous()


def unpacked(sent: torch.Tensor, facts: TensorFacts, samples: int) -> torch.Tensor:
    """The tensor of a message: `sent`, of any shape, holds its values in the order of `packed`."""
    shape = facts.shape_of(samples)
    inverse = sorted(range(len(shape)), key=lambda one: facts.order[one])
    return sent.view([shape[one] for one in facts.order]).permute(inverse)
