"""The tensors that a recorder has seen in a forward pass, and where they come from. Loads torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch  # noqa: TID253 - recording runs in a separate process

from trainwright.estimator.trace.cuts import known_calls
from trainwright.estimator.trace.cuts.call_notes import storage
from trainwright.estimator.trace.cuts.forward_graph import TensorFacts, TensorRef


class SeenTensors:
    """Tensors by identity. It keeps them alive, so that their ids stay theirs."""

    def __init__(self) -> None:
        self.facts: dict[TensorRef, TensorFacts] = {}
        self.refs: dict[int, TensorRef] = {}
        self.inside: dict[int, int] = {}
        """the calls inside which tensors were made that are none of their results"""
        self._nodes: dict[int, Any] = {}
        """by tensor: its node in autograd's graph when a call made it"""
        self._constant: set[int] = set()
        self._varying: set[int] = set()
        self._mutated: set[int] = set()
        self._kept: list[torch.Tensor] = []

    def made(self, tensor: torch.Tensor, ref: TensorRef) -> TensorRef:
        """A call made a tensor, or returned one that was there."""
        key = id(tensor)
        self._kept.append(tensor)
        self.refs[key], self._nodes[key] = ref, tensor.grad_fn
        self.inside.pop(key, None)
        order = sorted(range(tensor.dim()), key=lambda one: -int(tensor.stride()[one]))
        self.facts[ref] = TensorFacts(
            None if key in self._varying else tuple(tensor.shape),
            tuple(order),
            tensor.dtype,
            tensor.requires_grad,
            storage(tensor),
        )
        return ref

    def made_inside(self, tensor: torch.Tensor, call: int) -> None:
        """A tensor was made inside a call."""
        self._kept.append(tensor)
        self.inside[id(tensor)] = call

    def mutated(self, storages: set[int]) -> None:
        """A call changed tensors in these storages in place."""
        self._mutated |= storages

    def has_unseen_node(self, tensor: torch.Tensor) -> bool:
        """Whether autograd's node of a tensor is not that of the call that made it."""
        changed = tensor.grad_fn is not self._nodes[id(tensor)]
        return changed and storage(tensor) not in self._mutated

    def are_constant(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether the values of tensors depend on nothing but numbers in the code."""
        return all(id(one) in self._constant for one in tensors)

    def any_varies(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether the shape of a tensor depends on values."""
        return any(id(one) in self._varying for one in tensors)

    def derive(
        self,
        name: str,
        args: Any,
        kwargs: Any,
        given: list[torch.Tensor],
        made: list[torch.Tensor],
    ) -> None:
        """A function made tensors of others: they may be constant, or vary, as those do."""
        if name in known_calls.CONSTANT and self.are_constant(given):
            self._constant |= {id(one) for one in made}
        if known_calls.varies(name, args, kwargs) or self.any_varies(given):
            self._varying |= {id(one) for one in made}
