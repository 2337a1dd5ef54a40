"""Sums over all ranks, by Horovod or torch.distributed, behind one interface.

Broadcasts are built from sums too. All summed tensors are in host memory, whatever device a rank
computes on, so CPUs and GPUs can train together. `peers` follows the changes of the members.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.train.exchange.host_name import own_address, rename_host_to_address
from trainwright.tasks.train.exchange.mesh import Mesh
from trainwright.tasks.train.exchange.transfers import UnlikeActions

TORCHRUN = "env://"
"""The rendezvous of ranks that torchrun started."""
MEET_S, SUM_S = 10.0, 1800.0
"""torch's timeouts. The launcher usually notices a dead or hanging rank sooner."""
LATE, LEAST_PAUSE_S, MOST_PAUSE_S = 0.05, 50e-6, 1e-3
"""The polling interval of a Horovod sum: a share of the time waited so far, within bounds."""


class PeersLost(TrainingFailed):
    """A sum failed because another rank is gone. That rank is the cause, not this one."""

    kind = "peers_lost"


class SummingRanks(Protocol):
    """Some ranks that sum."""

    rank: int
    size: int

    def sum_(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Sum a contiguous tensor over all ranks, in place. Raises PeersLost."""
        ...


class Collective(SummingRanks, Protocol):
    """The ranks of one training. `wait_s` is the total time spent waiting in sums."""

    wait_s: float

    def start_sum(self, tensor: torch.Tensor, name: str) -> Any:
        """Begin a sum without waiting. All ranks must start these in the same order.

        Calls of `sum_` may come anywhere in between.
        """
        ...

    def finish(self, handle: Any) -> None:
        """Wait until a sum from `start_sum` is complete. Raises PeersLost."""
        ...

    def shutdown(self) -> None:
        """Disconnect from the others; no sums are possible afterwards."""
        ...


class HorovodCollective:
    """Horovod with Gloo. Reads its rank from the environment (see `horovod_environment`)."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        rename_host_to_address()
        try:
            hvd.init()
        except (ValueError, RuntimeError) as error:  # another rank was killed meanwhile
            hvd.shutdown()  # otherwise its thread stays and the next `init` crashes the process
            raise PeersLost(f"Horovod: {error}") from error
        self._hvd = hvd
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self.wait_s = 0.0

    def sum_(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        self.finish(self.start_sum(tensor, name))
        return tensor

    def start_sum(self, tensor: torch.Tensor, name: str) -> Any:
        try:
            return self._hvd.allreduce_async_(tensor, name=name, op=self._hvd.Sum)
        except (ValueError, RuntimeError) as error:  # Horovod has shut down or is doing so
            raise PeersLost(f"Horovod: {error}") from error

    def finish(self, handle: Any) -> None:
        started = time.perf_counter()
        try:
            # `synchronize` alone would busy-wait and take CPU time from Horovod's own threads.
            while not self._hvd.poll(handle):
                waited_s = time.perf_counter() - started
                time.sleep(min(max(waited_s * LATE, LEAST_PAUSE_S), MOST_PAUSE_S))
            self._hvd.synchronize(handle)
        except RuntimeError as error:  # HorovodInternalError
            if "Mismatched" in str(error):  # of two tensors with the same name
                raise UnlikeActions(
                    f"Horovod: {error} The model's code does not run alike on all ranks", final=True
                ) from error
            raise PeersLost(f"Horovod: {error}") from error
        self.wait_s += time.perf_counter() - started

    def shutdown(self) -> None:
        self._hvd.shutdown()


class TorchCollective:
    """torch.distributed with Gloo.

    The ranks meet through a file, a store at `tcp://address:port/prefix`, or torchrun's store.

    Sums are matched across ranks by order, not by name. Sums from `start_sum` use separate
    connections, so ranks may start them at different points between blocking sums. The process
    groups are created directly: `init_process_group` names groups by a counter in the process,
    and the members of one worker group may have been in different numbers of groups before.

    A large tensor takes Gloo's ring all-reduce: 2(n - 1) messages, one after another. A small one
    is sent directly to all others (`mesh`), and of a large one what it is, since Gloo does not know
    that; a blocking one begins when all ranks agree. `sum_s` is the timeout of a sum.
    """

    def __init__(self, rank: int, size: int, meeting: str, sum_s: float = SUM_S) -> None:
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore

        self._groups: dict[bool, Any] = {}
        self._meshes: dict[bool, Mesh] = {}
        try:
            store, address = store_at(meeting, size), own_address()
            for early, name in ((False, "sum"), (True, "early")):
                self._groups[early] = dist.ProcessGroupGloo(
                    PrefixStore(name, store), rank, size, timedelta(seconds=MEET_S)
                )
                self._meshes[early] = Mesh(
                    rank, size, PrefixStore(f"{name}-small", store), address, MEET_S, sum_s
                )
        except (RuntimeError, OSError) as error:
            self.shutdown()
            raise PeersLost(f"torch.distributed: {error}") from error
        self._options = dist.AllreduceOptions()  # sums by default
        self._options.timeout = timedelta(seconds=sum_s)
        self.rank, self.size, self.wait_s = rank, size, 0.0

    def sum_(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        self.finish(self._start(tensor, name, early=False))
        return tensor

    def start_sum(self, tensor: torch.Tensor, name: str) -> Any:
        return self._start(tensor, name, early=True)

    def _start(self, tensor: torch.Tensor, name: str, *, early: bool) -> Callable[[], None]:
        mesh = self._meshes[early]
        what = f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')} of {name}"
        try:
            if mesh.takes(tensor):
                return partial(mesh.finish, mesh.begin(tensor, what))
            announced = mesh.begin(torch.empty(0), what)
            ring = partial(self._groups[early].allreduce, [tensor], self._options)
            work = ring() if early else None
        except (RuntimeError, OSError) as error:
            raise PeersLost(f"torch.distributed: {error}") from error

        def end() -> None:
            mesh.finish(announced)
            (work or ring()).wait()

        return end

    def finish(self, handle: Callable[[], None]) -> None:
        started = time.perf_counter()
        try:
            handle()
        except (RuntimeError, OSError) as error:
            raise PeersLost(f"torch.distributed: {error}") from error
        self.wait_s += time.perf_counter() - started

    def shutdown(self) -> None:
        self._groups.clear()  # blocks until pending sums have ended
        for mesh in self._meshes.values():
            mesh.close()


def store_at(meeting: str, size: int) -> Any:
    """The torch store of a rendezvous."""
    from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

    timeout = timedelta(seconds=MEET_S)
    if meeting == TORCHRUN:
        return torchrun_store("sums")
    if not meeting.startswith("tcp://"):
        store = FileStore(meeting, size)
        store.set_timeout(timeout)
        return store
    place, _, prefix = meeting.removeprefix("tcp://").partition("/")
    address, _, port = place.rpartition(":")
    return PrefixStore(
        prefix,
        TCPStore(address, int(port), is_master=False, wait_for_workers=False, timeout=timeout),
    )


def torchrun_store(use: str) -> Any:
    """torchrun's store, with a key prefix for one use and one attempt.

    The attempt is part of the prefix because torchrun keeps the store when it restarts the ranks.
    """
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"{use}-{attempt}", next(iter(rendezvous(TORCHRUN)))[0])


PIECE_BYTES = 1 << 26
"""Sum a state in pieces of this size: a longer sum could exceed the job's stall timeout."""


def take_from_first(
    collective: SummingRanks, tensors: list[torch.Tensor], name: str, source: int = 0
) -> None:
    """Copy the tensors of rank `source` to every rank, in place and bit by bit.

    The bytes are summed as integers, with zeros from all other ranks. No tensor changes before the
    last sum is complete. Ranks on the same device type usually agree already: a checksum shows
    that and costs less than the sums.
    """
    if collective.size == 1 or not tensors:
        return
    parts = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    if _same_everywhere(collective, parts, name):
        return
    padding = torch.zeros(-sum(part.numel() for part in parts) % 4, dtype=torch.uint8)
    whole = torch.cat([*parts, padding]).view(torch.int32)  # Horovod does not sum bytes
    if collective.rank != source:
        whole.zero_()
    for place, piece in enumerate(whole.split(PIECE_BYTES // 4)):
        collective.sum_(piece, f"{name}-{place}")
    received = whole.view(torch.uint8).split([one.numel() for one in (*parts, padding)])
    for tensor, part in zip(tensors, received, strict=False):
        tensor.detach().copy_(part.clone().view(tensor.dtype).reshape(tensor.shape))


def _same_everywhere(collective: SummingRanks, parts: list[torch.Tensor], name: str) -> bool:
    """Whether all ranks hold the same bytes: each adds its CRC-32 at its own index of a sum."""
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part.numpy().data, checksum) if part.numel() else checksum
    found = torch.zeros(collective.size, dtype=torch.int64)
    found[collective.rank] = checksum
    return len(set(collective.sum_(found, f"{name}-checksum").tolist())) == 1


def take_document(collective: Collective, document: Any, name: str, source: int) -> Any:
    """Return rank `source`'s JSON value on every rank; the others' `document` is ignored."""
    mine = json.dumps(document).encode() if collective.rank == source else b""
    length = collective.sum_(torch.tensor([len(mine)], dtype=torch.int64), f"{name}.length")
    text = torch.zeros(int(length), dtype=torch.uint8)
    if mine:
        text.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    take_from_first(collective, [text], name, source)
    return json.loads(text.numpy().tobytes())
