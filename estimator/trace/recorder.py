"""Records a training step as PyTorch's dispatcher sees it: operations and lifetimes of storages.

The operations are those below autograd. With fake tensors nothing is computed. Loads torch.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch  # noqa: TID253 - recording runs in a separate process
from torch._subclasses.fake_tensor import FakeTensor  # noqa: TID253
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: TID253
from torch.utils.flop_counter import flop_registry  # noqa: TID253

from trainwright.estimator.trace.layer_tracker import LayerTracker, Place
from trainwright.estimator.trace.operations import OperationCall, describe, hidden_bytes, tensors
from trainwright.estimator.trace.storage_uses import StorageUses

BOOKKEEPING = ("prim", "profiler")  # namespaces of calls that do no work


@dataclass
class LayerSeen:
    """A module that ran; parameters and FLOPs exclude its children's."""

    kind: str
    output_shape: tuple[int, ...] = ()
    parameters: int = 0
    forward_flops: float = 0.0
    leaf: bool = True
    output_bytes: float = 0.0
    kept_bytes: float = 0.0
    """what its operations made in a forward pass and the backward pass found, results included"""
    dense: tuple[Literal["linear", "pointwise", "embedding"], int, int, int] | None = None
    """if it is a plain dense product: kind, rows, inputs, outputs (`structure.DenseProduct`)"""
    calls: int = 0


@dataclass
class Recording:
    """The record of one step.

    Bytes are of tensors' storages; an operation's `live_bytes` include its results.
    """

    operations: list[OperationCall] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    """by operation: its layer and phase"""
    forward_flops: float = 0.0
    activation_bytes: float = 0.0
    layers: dict[str, LayerSeen] = field(default_factory=dict)
    used_by: dict[str, list[str]] = field(default_factory=dict)
    """by parameter: the layers that use it, in order"""
    passes: int = 0
    """forward passes"""


class StorageEvent(NamedTuple):
    """An event in the order of a step.

    A storage was made (its number, its bytes) or freed (its number, None), or an operation ran
    (-1 - its index).
    """

    number: int
    bytes: float | None


@dataclass
class Lives:
    """Storages, numbered in order of creation, and recorded operations, as events in order.

    `recorded` is the index where the recording began. `graphs` has, for each micro-batch, the
    indices where autograd's graph begins, where the backward pass begins, and where it has ended.
    """

    events: list[StorageEvent] = field(default_factory=list)
    recorded: int = 0
    graphs: list[list[int]] = field(default_factory=list)
    uses: StorageUses = field(default_factory=StorageUses)


class OperationRecorder(TorchDispatchMode):
    """Records operations inside `record()`, and storages all the time.

    `optimizing` is set while the optimizer steps: fake tensors do not depend on its step count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not say its types here
        self.recording: Recording | None = None
        self.forward = False
        self.optimizing = False
        self.live_bytes = 0.0
        self.lives = Lives()
        self.tracker = LayerTracker()
        self.layers: dict[str, LayerSeen] = {}
        """the model's modules by name"""
        self._made_by: dict[int, tuple[str, float]] = {}
        """by storage of a recorded forward pass that is alive: the layer that made it, its bytes"""
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._number_of: dict[int, int] = {}
        """by storage that is alive"""
        self._made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = len(self.lives.events)
        if self.optimizing and func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        if self.optimizing and args and isinstance(args[0], FakeTensor) and _in_place(func):
            out = args[0]  # most of an optimizer's operations, whose result is known
        else:
            out = func(*args, **kwargs)
        if func.namespace in BOOKKEEPING:
            return out
        # A copied module's fake parameters and views of them have separate storages.
        if not func.is_view:
            for one in tensors(out):
                self.watch(one, hidden_bytes(func, args, out) if one.numel() == 0 else 0.0)
        if self.recording is not None:
            self._record(self.recording, func, args, kwargs, out)
            if not self.optimizing:
                self._note_uses(func, args, kwargs, before)
        return out

    def _note_uses(self, func: Any, args: Any, kwargs: Any, before: int) -> None:
        """Note which storages an operation read and changed, that began at this place."""
        uses, after = self.lives.uses, len(self.lives.events)
        uses.read(self._numbers(tensors((args, kwargs))), before, after)
        if (changed := _changed(func)) and torch._C._current_autograd_node() is None:
            uses.written(self._numbers(tensors([args[one] for one in changed if one < len(args)])))

    def _record(self, recording: Recording, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        seen = describe(func, args, kwargs, out)
        seen.live_bytes = self.live_bytes
        self.lives.events.append(StorageEvent(-1 - len(recording.operations), None))
        recording.operations.append(seen)
        recording.places.append(
            Place("", "update") if self.optimizing else self.tracker.place(func, args, out)
        )
        packet = func._overloadpacket
        if self.forward and packet in flop_registry:
            # Like torch's counter, which has no formula for fused recurrent layers.
            flops = seen.flops if seen.family != "rnn" else 0.0
            recording.forward_flops += flops
            if (layer := self.layers.get(self.tracker.now())) is not None:
                layer.forward_flops += flops

    def watch(self, tensor: torch.Tensor, hidden_bytes: float = 0.0) -> None:
        """Count a tensor's storage as alive until it is freed.

        `hidden_bytes` are bytes that the fake tensor does not include.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages and self._storages[key]() is not None:
            return
        size, number, events = storage.nbytes() + hidden_bytes, self._made, self.lives.events
        self._made += 1
        events.append(StorageEvent(number, size))

        def ended(_: Any, key: int = key, size: float = size) -> None:
            self.live_bytes -= size
            self._storages.pop(key, None)
            self._number_of.pop(key, None)
            self._made_by.pop(number, None)
            events.append(StorageEvent(number, None))

        self._storages[key] = weakref.ref(storage, ended)
        self._number_of[key] = number
        if self.forward and self.recording is not None:
            self._made_by[number] = (self.tracker.now(), size)
        self.live_bytes += size

    def _numbers(self, found: list[torch.Tensor]) -> list[int]:
        """The numbers of the storages of some tensors."""
        keys = (one.untyped_storage()._cdata for one in found)
        return [self._number_of[key] for key in keys if key in self._number_of]

    def call_begins(self, name: str, given: list[torch.Tensor]) -> None:
        """A module begins a forward pass with these tensors among its arguments."""
        self.lives.uses.call_begins(name, self._numbers(given), len(self.lives.events))

    def call_ends(self) -> None:
        """The module that began last has ended."""
        self.lives.uses.call_ends(len(self.lives.events))

    def graph_begins(self) -> None:
        """Record that a micro-batch begins.

        `graph_goes_on` records the beginning and the end of its backward pass.
        """
        self.lives.graphs.append([len(self.lives.events)])
        if self.recording is not None:
            self.recording.passes += 1

    def graph_goes_on(self) -> None:
        """See `graph_begins`."""
        self.lives.graphs[-1].append(len(self.lives.events))
        if self.recording is not None and len(self.lives.graphs[-1]) == 2:
            self.lives.uses.backward_begins(self._made)
            for layer in self.layers.values():
                layer.kept_bytes = 0.0
            for name, size in self._made_by.values():
                if name in self.layers:
                    self.layers[name].kept_bytes += size

    @contextlib.contextmanager
    def record(self) -> Iterator[Recording]:
        """Record the operations that run inside."""
        self.recording = Recording(layers=self.layers, used_by=self.tracker.used_by)
        self.tracker.begin()
        self.lives.recorded = len(self.lives.events)
        self.lives.uses = StorageUses()
        try:
            yield self.recording
        finally:
            self.recording = None


@functools.cache
def _changed(func: Any) -> list[int]:
    """The places of the arguments that an operation changes."""
    return [
        place
        for place, one in enumerate(func._schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    ]


@functools.cache
def _in_place(func: Any) -> bool:
    """Whether an operation changes its first argument in place and returns it."""
    schema = func._schema  # `__lshift__` also ends with an underscore, but is not mutable
    named = schema.name.endswith("_") and schema.is_mutable
    return named and len(schema.returns) == 1 and torch.Tag.inplace_view not in func.tags
