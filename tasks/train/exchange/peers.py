"""A rank's place in its worker group: one `Collective` that stays while the groups behind it change."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.train.exchange.collective import (
    SUM_S,
    Collective,
    HorovodCollective,
    TorchCollective,
)
from trainwright.tasks.train.exchange.rendezvous import horovod_environment
from trainwright.tasks.train.worker_group import WorkerGroup

SUMMED = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)
"""What both back ends sum. Where one refuses a type, it says so as it says that another rank is gone."""


class Peers:
    """The members of the current worker group; without other members nothing waits."""

    def __init__(self, backend: Literal["horovod", "torch"], sum_s: float = SUM_S) -> None:
        """A sum by torch.distributed may take `sum_s`; Horovod's has a timeout of its own (`rendezvous`)."""
        if backend == "horovod":
            import horovod.torch  # noqa: F401 - before it is needed: that takes a while
        self._backend, self._sum_s = backend, sum_s
        self._group: Collective | None = None
        self._lock = threading.Lock()
        self._before: set[int] | None = None
        self._opened: set[int] | None = None
        # The libraries' threads are started from this one, which stays outside of the rank's share of the CPU.
        self._starter = ThreadPoolExecutor(1)
        self._starter.submit(int).result()
        self.rank, self.size, self.wait_s = 0, 1, 0.0
        self.waiting_since: float | None = None
        """since when this rank waits for others (time.monotonic)"""
        self.waited_until = 0.0
        """when it did last"""

    def join(self, workers: WorkerGroup, number: int) -> None:
        """Meet the other members. Raises PeersLost where one of them does not come."""
        place, count = workers.members.index(number), len(workers.members)
        if count > 1:
            with self._lock:
                self._before, self._opened = _sockets(), None
            self._group = self._wait(
                lambda: self._starter.submit(self._meet, workers, number).result()
            )
            with self._lock:
                self._opened = _sockets() - self._before
        self.rank, self.size = place, count

    def _meet(self, workers: WorkerGroup, number: int) -> Collective:
        if self._backend == "horovod":
            os.environ.update(horovod_environment(workers, number))
            return HorovodCollective()
        return TorchCollective(
            workers.members.index(number), len(workers.members), workers.rendezvous, self._sum_s
        )

    def leave(self) -> None:
        """Leave the worker group: when it returns, none of its sums touches a tensor."""
        group, self._group = self._group, None
        self.rank, self.size = 0, 1
        if group is not None:
            self._wait(lambda: self._starter.submit(group.shutdown).result())
        with self._lock:
            self._before = self._opened = None

    def break_off(self) -> None:
        """From another thread: close the connections to the others, so that whatever waits for them fails now.

        Gloo tells only those that wait for a lost rank itself. Who waits for one that has left because of it would wait
        until the time-out (Horovod's coordinator does).
        """
        with self._lock:
            if self._before is None:
                return
            for (
                descriptor,
                inode,
            ) in _connections():  # only the group's own: a store has connections too
                if inode in self._opened if self._opened is not None else inode not in self._before:
                    try:
                        with socket.socket(fileno=os.dup(descriptor)) as one:
                            if one.family in (socket.AF_INET, socket.AF_INET6):
                                one.getpeername()  # not of those that listen: Gloo would end the process
                                one.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        continue

    def sum_(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Sum a contiguous tensor over all members, in place. Raises PeersLost; TrainingFailed for a type that none can sum."""
        _require_summed(tensor, name)
        group = self._group
        return tensor if group is None else self._wait(lambda: group.sum_(tensor, name))

    def start_sum(self, tensor: torch.Tensor, name: str) -> Any:
        """Begin such a sum."""
        _require_summed(tensor, name)
        return None if self._group is None else self._group.start_sum(tensor, name)

    def finish(self, handle: Any) -> None:
        """Wait until a sum that was begun is there. Raises PeersLost."""
        group = self._group
        if group is not None:
            self._wait(lambda: group.finish(handle))

    def _wait(self, act: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        self.waiting_since = time.monotonic()
        try:
            return act()
        finally:
            self.waited_until, self.waiting_since = time.monotonic(), None
            self.wait_s += time.perf_counter() - started

    def shutdown(self) -> None:
        """Leave for good."""
        self.leave()


def _require_summed(tensor: torch.Tensor, name: str) -> None:
    if tensor.dtype not in SUMMED:
        known = ", ".join(str(one).removeprefix("torch.") for one in SUMMED)
        raise TrainingFailed(
            f"{name}: ranks can't sum {str(tensor.dtype).removeprefix('torch.')}, only {known}",
            final=True,
        )


def _connections() -> list[tuple[int, int]]:
    """Descriptor and inode of each open socket."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.append((int(name), int(target[8:-1])))
    return found


def _sockets() -> set[int]:
    return {inode for _, inode in _connections()}
