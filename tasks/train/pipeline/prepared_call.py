"""A recorded call, prepared so that making it again costs little beside what it computes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch  # noqa: TID253 - only ranks import this
from torch.nn import functional  # noqa: TID253

from trainwright.estimator.trace.cuts.forward_graph import (
    AttributeRef,
    ForwardCall,
    SampleCount,
    TensorRef,
    TreeTemplate,
    tensors_in,
)

TensorValues = dict[TensorRef, torch.Tensor]
"""The tensors of a pass that calls still use."""
ValueGetter = Callable[[TensorValues, int], Any]


class PreparedCall:
    """A call of a module of a model, or of a function."""

    def __init__(
        self,
        call: ForwardCall,
        modules: Mapping[str, torch.nn.Module],
        used: Collection[TensorRef],
        done: Sequence[TensorRef],
        *,
        frozen: bool,
    ) -> None:
        """`used`: tensors that calls use later. `done`: those that none uses after this one.

        `frozen`: it is made without gradients.
        """
        self._arguments = [getter(one, modules) for one in call.arguments]
        self._named = [(name, getter(one, modules)) for name, one in call.named.items()]
        self._function: Callable[..., Any] = (
            modules[call.target] if call.kind == "module" else call.target
        )
        self._replaced: str | None = call.target if call.kind == "functional" else None
        self._frozen, self._done = frozen, done
        refs = call.result.refs()
        self._single = refs[0] if refs and call.result.is_leaf else None
        self._results = [(place, one) for place, one in enumerate(refs) if one in used]

    def make(self, values: TensorValues, samples: int) -> None:
        """Make the call with these tensors, add those of its result and remove those not used."""
        if self._frozen:
            with torch.no_grad():
                self._make(values, samples)
        else:
            self._make(values, samples)
        for one in self._done:
            del values[one]

    def _make(self, values: TensorValues, samples: int) -> None:
        function = self._function
        if self._replaced is not None:
            function = getattr(functional, self._replaced)
        made = function(
            *[one(values, samples) for one in self._arguments],
            **{name: one(values, samples) for name, one in self._named},
        )
        if self._single is not None:
            if self._results:
                values[self._single] = made
        elif self._results:
            tensors = tensors_in(made)
            for place, one in self._results:
                values[one] = tensors[place]


def getter(template: TreeTemplate, modules: Mapping[str, torch.nn.Module]) -> ValueGetter:
    """The value of a template, from the tensors of a pass and its number of samples."""
    if not template.is_leaf:
        return lambda values, samples: template.filled(
            lambda leaf: _of_leaf(leaf, modules)(values, samples)
        )
    return _of_leaf(template.parts[0], modules)


def _of_leaf(leaf: Any, modules: Mapping[str, torch.nn.Module]) -> ValueGetter:
    if isinstance(leaf, TensorRef):
        return lambda values, _: values[leaf]
    if isinstance(leaf, SampleCount):
        return lambda _, samples: leaf(samples)
    if isinstance(leaf, AttributeRef):
        owner, _, name = leaf.path.rpartition(".")
        return lambda _, __: getattr(modules[owner], name)
    return lambda _, __: leaf
