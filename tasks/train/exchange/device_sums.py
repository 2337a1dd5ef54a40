"""Sums of tensors that are on GPUs, by NCCL, without a copy to host memory.

`worker_group.sums_on_devices` says whether a training has them. A group that has lost a member
leaves kernels on the GPUs of the others, which only `abort` ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.train.exchange.collective import PeersLost
from trainwright.tasks.train.exchange.rendezvous import INTERFACE
from trainwright.tasks.train.exchange.transfers import MessageOrder

LEAST_PAUSE_S, MOST_PAUSE_S = 20e-6, 1e-3
"""How often the host asks whether a sum has ended."""


def has_nccl() -> bool:
    """Whether torch sums by NCCL here."""
    import torch.distributed as dist

    return dist.is_nccl_available() and torch.cuda.is_available()


class DeviceSums:
    """The GPUs of a worker group, each with one rank."""

    def __init__(self, rank: int, size: int, store: Any, sum_s: float) -> None:
        """The ranks meet through a torch store at their first sum; `sum_s` is a sum's timeout."""
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore

        if interface := os.environ.get(INTERFACE):
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        self._aborted = False
        self._groups: dict[MessageOrder, Any] = {}
        # As with Gloo: ranks may begin started sums at different points between blocking ones.
        orders: tuple[MessageOrder, ...] = ("blocking", "started")
        for order in orders:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=sum_s)
            place = PrefixStore(f"device-{order}", store)
            self._groups[order] = dist.ProcessGroupNCCL(place, rank, size, options)

    def begin(self, tensor: torch.Tensor, order: MessageOrder) -> Callable[[], None]:
        """Begin a sum of a contiguous tensor, in place; a function that waits for it.

        Both raise PeersLost.
        """
        try:
            work = self._groups[order].allreduce([tensor])
        except RuntimeError as error:
            raise PeersLost(f"NCCL: {error}") from error

        def end() -> None:
            started = time.perf_counter()
            try:
                # Not `wait` alone, which returns at once: the time until the sum has ended counts
                # as waiting, and another thread may abort it.
                while not work.is_completed() and not self._aborted:
                    waited_s = time.perf_counter() - started
                    time.sleep(min(max(0.05 * waited_s, LEAST_PAUSE_S), MOST_PAUSE_S))
                if not self._aborted:
                    work.wait()
            except RuntimeError as error:
                raise PeersLost(f"NCCL: {error}") from error
            if self._aborted:
                raise PeersLost("NCCL: the sum was broken off")

        return end

    def abort(self) -> None:
        """End all sums at once, from any thread; later ones raise PeersLost."""
        self._aborted = True
        for group in self._groups.values():
            group.abort()
