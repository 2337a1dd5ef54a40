"""A forward pass as a list of calls of modules and functions, which can be done in parts.

Loads torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch  # noqa: TID253 - recording runs in a separate process, replay in a rank
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten  # noqa: TID253

CallKind = Literal["module", "functional", "function"]
INPUTS = -1
"""The number of the call that makes the model's inputs."""


@dataclass(frozen=True, order=True)
class TensorRef:
    """A tensor: the call that made it, and its place among the tensors of the call's result."""

    call: int
    place: int


@dataclass(frozen=True)
class AttributeRef:
    """A parameter, buffer or other tensor that a module holds, by its path in the model."""

    path: str


@dataclass(frozen=True)
class SampleCount:
    """A whole number that depends on the number of samples: fixed + per_sample · samples."""

    fixed: int
    per_sample: int

    def __call__(self, samples: int) -> int:
        return self.fixed + self.per_sample * samples


Size = int | SampleCount


class TensorFacts(NamedTuple):
    """A tensor of a forward pass.

    `shape`: None if it does not grow evenly with the samples. `order`: its dimensions, from the
    outermost in memory.
    """

    shape: tuple[Size, ...] | None
    order: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool
    storage: int
    """equal for tensors that share memory"""

    def shape_of(self, samples: int) -> tuple[int, ...]:
        """Its shape for a number of samples."""
        assert self.shape is not None
        return tuple(size if isinstance(size, int) else size(samples) for size in self.shape)

    def bytes_of(self, samples: int) -> int:
        """Its bytes for a number of samples."""
        return math.prod(self.shape_of(samples)) * self.dtype.itemsize


@dataclass(frozen=True)
class TreeTemplate:
    """A value with its containers taken apart, and something in place of its leaves.

    `spec`: torch's description of the containers; None: a slice of three leaves. A leaf that is a
    slice is a template itself.
    """

    spec: TreeSpec | None
    parts: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any, change: Callable[[Any], Any]) -> TreeTemplate:
        """The template of a value, with `change(leaf)` in place of each leaf."""
        parts, spec = tree_flatten(value)
        return cls(spec, tuple(_part(one, change) for one in parts))

    @property
    def is_leaf(self) -> bool:
        """Whether the value itself is a leaf."""
        return self.spec is not None and self.spec.is_leaf() and not self._is_slice

    @property
    def _is_slice(self) -> bool:
        return isinstance(self.parts[0], TreeTemplate)

    def changed(self, change: Callable[[Any], Any]) -> TreeTemplate:
        """The same containers with other leaves."""
        return TreeTemplate(
            self.spec,
            tuple(
                one.changed(change) if isinstance(one, TreeTemplate) else change(one)
                for one in self.parts
            ),
        )

    def filled(self, change: Callable[[Any], Any]) -> Any:
        """The value, with `change(leaf)` in place of each leaf."""
        parts = [
            one.filled(change) if isinstance(one, TreeTemplate) else change(one)
            for one in self.parts
        ]
        return slice(*parts) if self.spec is None else tree_unflatten(parts, self.spec)

    def leaves(self) -> list[Any]:
        """The leaves, in order."""
        found: list[Any] = []
        for one in self.parts:
            found += one.leaves() if isinstance(one, TreeTemplate) else [one]
        return found

    def refs(self) -> list[TensorRef]:
        """The references to tensors of the pass, in order."""
        return [one for one in self.leaves() if isinstance(one, TensorRef)]


def _part(leaf: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(leaf, slice):
        parts = (leaf.start, leaf.stop, leaf.step)
        return TreeTemplate(None, tuple(_part(one, change) for one in parts))
    return change(leaf)


@dataclass(frozen=True)
class ForwardCall:
    """A call of a module or function, with tensors, and counts of samples, as references.

    `target` is a module's path, the name of a function of `torch.nn.functional` that ranks
    replace, or a function.
    """

    kind: CallKind
    target: Any
    arguments: tuple[TreeTemplate, ...]
    named: dict[str, TreeTemplate]
    """the arguments by name"""
    result: TreeTemplate
    gradients: bool
    """whether autograd records it in a pass that records gradients"""
    path: tuple[str, ...]
    """the modules whose code makes the call, outermost first; the model itself is ''"""
    parameters: frozenset[str] = frozenset()
    reads: frozenset[str] = frozenset()
    """modules that it runs, or whose buffers it reads"""
    changes: frozenset[str] = frozenset()
    """modules whose buffers or attributes it changes"""
    mutates: frozenset[int] = frozenset()
    """storages of tensors of the pass that it changes in place"""
    needs: frozenset[int] = frozenset()
    """calls that left it something by another way than its arguments"""
    dropouts: int = 0
    batch_statistics: bool = False

    def used(self) -> Iterator[TensorRef]:
        """The tensors of the pass among its arguments."""
        for one in (*self.arguments, *self.named.values()):
            yield from one.refs()


@dataclass(frozen=True)
class ForwardGraph:
    """The calls of a forward pass, in order."""

    calls: list[ForwardCall]
    inputs: TreeTemplate
    """of the model's argument"""
    outputs: TreeTemplate
    facts: dict[TensorRef, TensorFacts]

    @cached_property
    def last_uses(self) -> dict[TensorRef, int]:
        """By tensor: the last call that uses it; the number of calls for the model's outputs."""
        found: dict[TensorRef, int] = {}
        for number, call in enumerate(self.calls):
            for one in call.used():
                found[one] = number
        for one in self.outputs.refs():
            found[one] = len(self.calls)
        return found

    def crossing(self, begin: int) -> list[TensorRef]:
        """The tensors made before a call and used by it or later, in the order of their making."""
        return sorted(one for one, used in self.last_uses.items() if one.call < begin <= used)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in containers, in order."""
    found = TreeTemplate.of(value, lambda leaf: leaf).leaves()
    return [one for one in found if isinstance(one, torch.Tensor)]
