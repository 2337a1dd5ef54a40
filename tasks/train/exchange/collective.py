"""Sums over all ranks, by Horovod or by torch.distributed, behind one interface. Everything else is made of sums.

Tensors that are summed lie in the host's memory, whatever device a rank computes on: so CPUs and GPUs can train together.
A rank's place among the others while they change is `peers`.
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
from trainwright.tasks.train.exchange.host_name import own_address, stand_for_address
from trainwright.tasks.train.exchange.mesh import Mesh

TORCHRUN = "env://"
"""where the ranks meet that torchrun has started"""
MEET_S, SUM_S = 10.0, 1800.0
"""torch's time-outs, where a launcher notices sooner who dies or hangs."""
LATE, LEAST_PAUSE_S, MOST_PAUSE_S = 0.05, 50e-6, 1e-3
"""How late the end of a Horovod sum may be noticed, as a part of what it took, and within which bounds."""


class PeersLost(TrainingFailed):
    """A sum failed because another rank is gone: the cause is there, not here."""

    kind = "peers_lost"


class Collective(Protocol):
    """The ranks of one training. `wait_s` adds up the time spent waiting for the others."""

    rank: int
    size: int
    wait_s: float

    def sum_(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Sum a contiguous tensor over all ranks, in place. Raises PeersLost."""
        ...

    def start_sum(self, tensor: torch.Tensor, name: str) -> Any:
        """Begin such a sum. All ranks start theirs in the same order (calls of `sum_` may lie anywhere in between)."""
        ...

    def finish(self, handle: Any) -> None:
        """Wait until a sum that was begun is there. Raises PeersLost."""
        ...

    def shutdown(self) -> None:
        """Leave the others; nothing can be summed after it."""
        ...


class HorovodCollective:
    """Horovod with Gloo. Its place among the ranks comes from the environment."""

    def __init__(self) -> None:
        import horovod.torch as hvd

        stand_for_address()
        try:
            hvd.init()
        except (ValueError, RuntimeError) as error:  # a rank that is to come is killed meanwhile
            hvd.shutdown()  # else its thread is left, and the process dies of the next `init`
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
        except (ValueError, RuntimeError) as error:  # Horovod has shut down, or is about to
            raise PeersLost(f"Horovod: {error}") from error

    def finish(self, handle: Any) -> None:
        started = time.perf_counter()
        try:
            # `synchronize` spins until it is done: on a share of a core, in the time that Horovod's own threads need.
            while not self._hvd.poll(handle):
                waited_s = time.perf_counter() - started
                time.sleep(min(max(waited_s * LATE, LEAST_PAUSE_S), MOST_PAUSE_S))
            self._hvd.synchronize(handle)
        except RuntimeError as error:  # HorovodInternalError
            raise PeersLost(f"Horovod: {error}") from error
        self.wait_s += time.perf_counter() - started

    def shutdown(self) -> None:
        self._hvd.shutdown()


class TorchCollective:
    """torch.distributed with Gloo. The ranks meet through a file, a store at `tcp://address:port/prefix`, or
    torchrun's.

    Sums are matched by their order, not by name. Those begun early have connections of their own, so that a rank may begin
    them at another moment between the blocking ones. The groups are made directly: `init_process_group` counts them in
    the process, and the processes of one worker group may have lived through other numbers of groups.

    A large tensor goes round the ring of ranks, in 2(n - 1) messages that wait for each other; a small one, to all at once.
    A sum may take `sum_s`.
    """

    def __init__(self, rank: int, size: int, meeting: str, sum_s: float = SUM_S) -> None:
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore

        self._groups: dict[bool, Any] = {}
        self._meshes: dict[bool, Mesh] = {}
        try:
            store, address = _store_at(meeting, size), own_address()
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
        self._options = dist.AllreduceOptions()  # whose default is to sum
        self._options.timeout = timedelta(seconds=sum_s)
        self.rank, self.size, self.wait_s = rank, size, 0.0

    def sum_(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        self.finish(self._start(tensor, early=False))
        return tensor

    def start_sum(self, tensor: torch.Tensor, name: str) -> Any:
        return self._start(tensor, early=True)

    def _start(self, tensor: torch.Tensor, *, early: bool) -> Callable[[], object]:
        mesh = self._meshes[early]
        try:
            if mesh.takes(tensor):
                return partial(mesh.finish, mesh.begin(tensor))
            wait: Callable[[], object] = self._groups[early].allreduce([tensor], self._options).wait
            return wait
        except (RuntimeError, OSError) as error:
            raise PeersLost(f"torch.distributed: {error}") from error

    def finish(self, handle: Callable[[], object]) -> None:
        started = time.perf_counter()
        try:
            handle()
        except (RuntimeError, OSError) as error:
            raise PeersLost(f"torch.distributed: {error}") from error
        self.wait_s += time.perf_counter() - started

    def shutdown(self) -> None:
        self._groups.clear()  # waits until nothing is summed any more
        for mesh in self._meshes.values():
            mesh.close()


def _store_at(meeting: str, size: int) -> Any:
    from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

    patience = timedelta(seconds=MEET_S)
    if meeting == TORCHRUN:
        return torchrun_store("sums")
    if not meeting.startswith("tcp://"):
        store = FileStore(meeting, size)
        store.set_timeout(patience)
        return store
    place, _, prefix = meeting.removeprefix("tcp://").partition("/")
    address, _, port = place.rpartition(":")
    return PrefixStore(
        prefix,
        TCPStore(address, int(port), is_master=False, wait_for_workers=False, timeout=patience),
    )


def torchrun_store(use: str) -> Any:
    """What the ranks that torchrun has started share, of a use of its own. torchrun keeps it when it starts them again."""
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"{use}-{attempt}", next(iter(rendezvous(TORCHRUN)))[0])


PIECE_BYTES = 1 << 26
"""of a state, in one sum: who waits for longer than the job's stall timeout counts as hung"""


def take_from_first(
    collective: Collective, tensors: list[torch.Tensor], name: str, source: int = 0
) -> None:
    """Give every rank the tensors of the first (or of `source`), in place and to the last bit.

    Sums of integers in which the others add zero, so much at a time that none takes long; nothing is changed before the last.
    Ranks on like devices have the same already; a checksum of each rank's shows that, and costs less than the sums.
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


def _same_everywhere(collective: Collective, parts: list[torch.Tensor], name: str) -> bool:
    """Whether all ranks hold the same bytes, by CRC-32: each puts its own into its place of a sum."""
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part.numpy().data, checksum) if part.numel() else checksum
    found = torch.zeros(collective.size, dtype=torch.int64)
    found[collective.rank] = checksum
    return len(set(collective.sum_(found, f"{name}-checksum").tolist())) == 1


def take_document(collective: Collective, document: Any, name: str, source: int) -> Any:
    """The JSON value that `source` holds, on every rank; what the others pass does not matter."""
    mine = json.dumps(document).encode() if collective.rank == source else b""
    length = collective.sum_(torch.tensor([len(mine)], dtype=torch.int64), f"{name}.length")
    text = torch.zeros(int(length), dtype=torch.uint8)
    if mine:
        text.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    take_from_first(collective, [text], name, source)
    return json.loads(text.numpy().tobytes())
