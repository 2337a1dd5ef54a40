"""Finds to which layer and which phase of the step each operation belongs. Loads torch.

A forward operation belongs to the innermost module that is running. Autograd numbers its nodes in
the order of the forward pass, so a backward operation belongs to the module that was running when
its node got its number.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch  # noqa: TID253 - recording runs in a separate process

from trainwright.estimator.trace.operations import tensors

LOSS = "loss"
"""The name under which operations outside the model's modules stand."""
Phase = Literal["forward", "backward", "update"]
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.linear")


class Place(NamedTuple):
    """Where an operation belongs. `weight_share`: the share of it that makes weight gradients."""

    layer: str
    phase: Phase
    weight_share: float = 0.0


@dataclass
class LayerTracker:
    """Follows a step's modules, parameters and autograd nodes."""

    running: list[str] = field(default_factory=list)
    """the modules that are running, outermost first"""
    _begins: list[int] = field(default_factory=list)
    """autograd's next number at each change of the running module, and the module then"""
    _layers: list[str] = field(default_factory=list)
    used_by: dict[str, list[str]] = field(default_factory=dict)
    """by parameter: the layers whose forward passes use it, in order"""
    _parameters: dict[int, tuple[weakref.ref[Any], str]] = field(default_factory=dict)
    """storages of parameters, and of views and converted copies of them: the parameter's name"""
    _shapes: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)
    """by layer: the shapes of the parameters that its operations used"""

    def watch_parameters(self, model: torch.nn.Module) -> None:
        """Remember the model's parameters."""
        for name, parameter in model.named_parameters():
            self._remember(parameter, name)

    def begin(self) -> None:
        """Begin a step."""
        self.running.clear()
        self._begins.clear()
        self._layers.clear()
        self._changed()

    def enter(self, name: str) -> None:
        """A module begins to run."""
        self.running.append(name)
        self._changed()

    def leave(self) -> None:
        """The module that began last has ended."""
        self.running.pop()
        self._changed()

    def _changed(self) -> None:
        self._begins.append(_next_number())
        self._layers.append(self.now())

    def now(self) -> str:
        """The innermost running module."""
        return self.running[-1] if self.running else LOSS

    def place(self, func: Any, args: Any, out: Any) -> Place:
        """Where an operation of the forward or backward pass belongs."""
        node: Any = torch._C._current_autograd_node()
        used = {name: one for one in tensors(args) if (name := self._parameter_of(one)) is not None}
        if node is None:
            layer = self.now()
            self._shapes.setdefault(layer, set()).update(map(_shape, used.values()))
            for name in used:
                users = self.used_by.setdefault(name, [])
                if layer not in users:
                    users.append(layer)
            if used and (func.is_view or "copy" in str(func._overloadpacket)):
                for one in tensors(out):
                    self._remember(one, next(iter(used)))
            return Place(layer, "forward")
        if self.running:  # a forward pass that is done again for the backward pass
            return Place(self.now(), "backward")
        if node.name().endswith("AccumulateGrad"):
            return Place(self._of_gradient(tensors(args)), "backward", 1.0)
        number = node._sequence_nr()
        layer = self._layers[max(0, bisect_right(self._begins, number) - 1)]
        return Place(layer, "backward", self._weight_share(layer, func, args, out, uses=bool(used)))

    def _of_gradient(self, gradients: list[torch.Tensor]) -> str:
        """The layer that used a parameter of this gradient's shape."""
        shapes = {_shape(one) for one in gradients}
        return next((name for name, known in self._shapes.items() if known & shapes), LOSS)

    def _weight_share(self, layer: str, func: Any, args: Any, out: Any, *, uses: bool) -> float:
        """What share of a backward operation makes weight gradients.

        An operation that makes a tensor of a parameter's shape without using a parameter makes a
        weight gradient. One that does both (a convolution) is divided in halves.
        """
        kind = str(func._overloadpacket)
        if kind == "aten.convolution_backward" and len(args) > 10:
            wanted = list(args[10])
            return 0.0 if not any(wanted[1:]) else 0.5 if wanted[0] else 1.0
        shapes, results = self._shapes.get(layer, set()), tensors(out)
        makes = any(_shape(one) in shapes for one in results)
        if not makes:
            return 0.0
        if not uses:
            return 1.0
        return 0.0 if kind in _PRODUCTS or len(results) == 1 else 0.5

    def _remember(self, tensor: torch.Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        self._parameters[storage._cdata] = (weakref.ref(storage), name)

    def _parameter_of(self, tensor: torch.Tensor) -> str | None:
        """The name of the parameter that a tensor is, or is a view or a copy of."""
        known = self._parameters.get(tensor.untyped_storage()._cdata)
        return known[1] if known is not None and known[0]() is not None else None


def _next_number() -> int:
    """The number that autograd gives to the next node."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The sizes above 1, sorted: equal for a parameter and its transpose."""
    return tuple(sorted(size for size in tensor.shape if size > 1))
