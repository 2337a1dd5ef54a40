"""The device that is measured: CPU threads, or a GPU that torch can address. Loads torch.

A GPU runs asynchronously. So the program waits for it before it reads the clock (`finish`), and the
GPU's own clock times single operations, by one event before and one after each.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch  # noqa: TID253 - measuring runs in a separate process
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: TID253

from trainwright.estimator.devices import recognise
from trainwright.estimator.errors import BadInput
from trainwright.estimator.machine import processor
from trainwright.estimator.trace.recorder import BOOKKEEPING

_MEMORY_SHARE = (
    0.25  # share of a GPU's memory for one network: the allocator also keeps freed blocks
)


@dataclass(frozen=True)
class TorchDevice:
    """A device: torch's name, its type, and its driver's name."""

    torch: torch.device
    device_type: str
    name: str

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.torch.type == "cuda"

    def finish(self) -> None:
        """Wait until the device has finished its work."""
        if self.is_gpu:
            torch.cuda.synchronize(self.torch)

    def finished(self, run: Callable[[], object]) -> Callable[[], None]:
        """The call, wrapped to return only when the device has finished it."""

        def call() -> None:
            run()
            self.finish()

        return call

    @property
    def stamp(self) -> Callable[[], Any]:
        """A function that returns the device's current time, for `seconds_between`."""
        return _event if self.is_gpu else time.perf_counter

    def seconds_between(self, before: Any, after: Any) -> float:
        """Seconds between two stamps; a GPU must have finished."""
        if not self.is_gpu:
            return float(after - before)
        return float(before.elapsed_time(after)) * 1e-3

    def largest_batch(self, batch_size: int) -> float:
        """A batch that certainly fits into its memory, by the memory use of the last step."""
        if not self.is_gpu:
            return float("inf")
        most_bytes = _MEMORY_SHARE * torch.cuda.get_device_properties(self.torch).total_memory
        return batch_size * most_bytes / max(1, torch.cuda.max_memory_allocated(self.torch))

    def begin(self) -> None:
        """Release the device memory of the previous network, before the next one."""
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.torch)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


CPU = TorchDevice(torch.device("cpu"), "cpu", processor())


def device_named(given: str) -> TorchDevice:
    """The device with this name in torch.

    Raises BadInput if there is none, or its type is unknown.
    """
    if given == "cpu":
        return CPU
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [f"cuda:{number}" for number in range(count)]
    if given not in gpus:
        raise BadInput(f"--device: got {given!r}; torch finds here: {', '.join(['cpu', *gpus])}")
    torch.cuda.set_device(given)
    facts = torch.cuda.get_device_properties(given)
    device_type = recognise(facts.name, facts.total_memory)
    if device_type is None:
        raise BadInput(f"--device: {given} is a {facts.name!r}, which is not a known device type")
    return TorchDevice(torch.device(given), device_type, facts.name)


class OperationClock(TorchDispatchMode):
    """Times each operation that runs inside, in order: those that an `OperationRecorder` records.

    It does nothing else, because other work would displace the operations' data from the caches.
    """

    def __init__(self, device: TorchDevice = CPU) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self._device, self._stamp = device, device.stamp
        self._seen: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, stamp = kwargs or {}, self._stamp
        before = stamp()
        out = func(*args, **kwargs)
        self._seen.append((func, before, stamp()))
        return out

    def seconds(self) -> list[float]:
        """The seconds of each operation since the last call of this method."""
        self._device.finish()
        found = [
            self._device.seconds_between(before, after)
            for func, before, after in self._seen
            if func.namespace not in BOOKKEEPING
        ]
        self._seen.clear()
        return found
