"""A rank's connection to its worker group: one `Exchange` that persists while groups change."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.train.exchange.collective import (
    MEET_S,
    SUM_S,
    TORCHRUN,
    Collective,
    HorovodCollective,
    PeersLost,
    TorchCollective,
    store_at,
    torchrun_store,
)
from trainwright.tasks.train.exchange.device_sums import DeviceSums, has_nccl
from trainwright.tasks.train.exchange.group_exchange import Exchange, Members, Started
from trainwright.tasks.train.exchange.host_name import own_address
from trainwright.tasks.train.exchange.meeting_threads import MeetingThreads
from trainwright.tasks.train.exchange.rendezvous import horovod_environment
from trainwright.tasks.train.exchange.transfers import MessageOrder, Transfers
from trainwright.tasks.train.worker_group import WorkerGroup

T = TypeVar("T")
SUMMED = (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)
"""The types that both back ends can sum.

Checked before a sum: a back end would report another type by the same error as a lost rank.
"""


class Peers(Exchange):
    """The members of the current worker group. In a group of one, operations return at once."""

    def __init__(self, backend: Literal["horovod", "torch"], sum_s: float = SUM_S) -> None:
        """`sum_s`: timeout of sums by torch.distributed; Horovod's is set in `rendezvous`."""
        if backend == "horovod":
            import horovod.torch  # noqa: F401 - early, because the import is slow
        self._backend, self._sum_s = backend, sum_s
        self._group: Collective | None = None
        self._transfers: Transfers | None = None
        self._device_sums: DeviceSums | None = None
        self._lock = threading.Lock()
        self._before: set[int] | None = None
        """the process's sockets before it joined the group; None outside a group"""
        self._opened: set[int] | None = None
        """the group's sockets; None while it is joining"""
        # The libraries start their threads from these, so they inherit their CPU limits: they are
        # outside the rank's CPU share.
        self._starters = MeetingThreads(4)
        self.rank, self.size, self.wait_s = 0, 1, 0.0
        self.ring_bytes = 0.0
        """what this rank has sent in sums, if they are rings: 2 (n − 1) / n of the summed bytes"""
        self.step = 0
        self.waiting_since: float | None = None
        """when the current wait for other ranks began (time.monotonic), or None"""
        self.waited_until = 0.0
        """when the last wait ended (time.monotonic)"""

    def join(
        self,
        workers: WorkerGroup,
        number: int,
        is_aborted: Callable[[], bool] = lambda: False,
    ) -> None:
        """Connect to the other members.

        Raises PeersLost if one of them does not connect, or the launcher aborts the group.
        """
        place, count = workers.members.index(number), len(workers.members)
        if count > 1:
            with self._lock:
                self._before, self._opened = _sockets(), None
            self._group = self._wait(
                lambda: self._starters.run(
                    lambda: self._meet(workers, number),
                    is_aborted if self._backend == "torch" else _never,  # Horovod has one state
                    lambda group: group.shutdown(),
                )
            )
            if workers.transfers:
                self._transfers, self._device_sums = self._wait(
                    lambda: self._starters.run(
                        lambda: self._connect(workers, place, count),
                        is_aborted,
                        lambda found: found[0].close(),
                    )
                )
            with self._lock:
                self._opened = _sockets() - self._before
        self.rank, self.size = place, count
        self.step = 0  # members have done unlike numbers of steps

    def _meet(self, workers: WorkerGroup, number: int) -> Collective:
        if self._backend == "horovod":
            # Horovod reads its configuration only from the environment.
            os.environ.update(horovod_environment(workers, number))
            return HorovodCollective()
        return TorchCollective(
            workers.members.index(number), len(workers.members), workers.rendezvous, self._sum_s
        )

    def _connect(
        self, workers: WorkerGroup, place: int, count: int
    ) -> tuple[Transfers, DeviceSums | None]:
        try:
            store = (
                torchrun_store("transfers")
                if workers.transfers == TORCHRUN
                else store_at(workers.transfers, count)
            )
            transfers = Transfers(place, count, store, own_address(), MEET_S, self._sum_s)
            if not workers.on_devices:
                return transfers, None
            store.set(f"nccl-{place}", str(int(has_nccl())))
            all_have = all(store.get(f"nccl-{one}") == b"1" for one in range(count))
            return transfers, DeviceSums(place, count, store, self._sum_s) if all_have else None
        except (RuntimeError, OSError) as error:
            raise PeersLost(f"transfers: {error}") from error

    def leave(self) -> None:
        """Leave the worker group. Afterwards, none of its sums writes to a tensor."""
        if self._transfers is not None:
            self._transfers.close()
            self._transfers = None
        if self._device_sums is not None:
            self._device_sums.abort()
            self._device_sums = None
        group, self._group = self._group, None
        self.rank, self.size = 0, 1
        if group is not None:
            self._wait(lambda: self._starters.run(group.shutdown))
        with self._lock:
            self._before = self._opened = None

    def break_off(self) -> None:
        """From another thread: shut down the group's connections, so pending sums fail at once.

        With Gloo, a lost rank fails only the sums that wait for that rank itself. A rank that
        waits for another one, which has already left the group, would wait until the timeout
        (Horovod's coordinator does).
        """
        sums = self._device_sums
        if sums is not None:
            sums.abort()
        with self._lock:
            if self._before is None:
                return
            # Only the group's own connections: the process has others.
            for descriptor, inode in _connections():
                if inode in self._opened if self._opened is not None else inode not in self._before:
                    try:
                        with socket.socket(fileno=os.dup(descriptor)) as one:
                            if one.family in (socket.AF_INET, socket.AF_INET6):
                                # Fails for a listening socket, which must stay open: without it,
                                # Gloo ends the process.
                                one.getpeername()
                                one.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        continue

    def start_sum(
        self,
        tensor: torch.Tensor,
        name: str,
        group: Members = None,
        *,
        order: MessageOrder = "started",
    ) -> Started[None]:
        """Begin a sum. Raises TrainingFailed for a type that the back ends can't sum."""
        _require_summed(tensor, name)
        ranks = self.size if group is None else len(group)
        self.ring_bytes += 2 * (ranks - 1) / max(1, ranks) * tensor.nbytes
        return super().start_sum(tensor, name, group, order=order)

    def _sum_of_all(
        self, tensor: torch.Tensor, name: str, order: MessageOrder
    ) -> Callable[[], object]:
        if tensor.device.type != "cpu":
            return self._sum_on_device(tensor, name, order)
        group = self._group
        assert group is not None
        if self._backend == "torch":  # Horovod knows a tensor again by its name
            name = f"{name} of step {self.step}"
        if order == "started":
            return partial(group.finish, group.start_sum(tensor, name))
        return partial(group.sum_, tensor, name)

    def _sum_on_device(
        self, tensor: torch.Tensor, name: str, order: MessageOrder
    ) -> Callable[[], object]:
        """A sum of a tensor on a GPU: there, if all ranks can, else in host memory."""
        if self._device_sums is not None:
            return self._device_sums.begin(tensor, order)
        host = tensor.cpu()
        end = self._sum_of_all(host, name, order)

        def copied() -> None:
            end()
            tensor.copy_(host)

        return copied

    @property
    def transfers(self) -> Transfers | None:
        """The messages to all others, if the worker group was opened for them."""
        return self._transfers

    @property
    def sums_on_devices(self) -> bool:
        """Whether all ranks are on like GPUs and have NCCL."""
        return self._device_sums is not None

    @property
    def sent_bytes(self) -> int:
        """What this rank has sent in messages of its group, without parts of sums."""
        return self._transfers.sent_bytes if self._transfers is not None else 0

    def _wait(self, act: Callable[[], T]) -> T:
        started = time.perf_counter()
        self.waiting_since = time.monotonic()
        try:
            return act()
        finally:
            self.waited_until, self.waiting_since = time.monotonic(), None
            self.wait_s += time.perf_counter() - started

    def shutdown(self) -> None:
        """Leave the worker group."""
        self.leave()


def _never() -> bool:
    return False


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
