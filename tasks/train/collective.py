"""Sums over all ranks, by Horovod or by torch.distributed, behind one interface. Everything else is made of sums."""

from __future__ import annotations

import os
import time
from typing import Any, Protocol

import torch  # noqa: TID253 - only ranks import this


class Collective(Protocol):
    """The ranks of one training. `wait_s` adds up the time spent waiting for the others."""

    name: str
    rank: int
    size: int
    wait_s: float

    def start_sum(self, tensor: torch.Tensor, name: str) -> Any:
        """Begin to sum a tensor over all ranks, in place; every rank uses the same names in the same order."""
        ...

    def finish(self, handle: Any) -> None:
        """Wait until the sum is there."""
        ...

    def shutdown(self) -> None: ...


def sum_(collective: Collective, tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Sum a tensor over all ranks, in place."""
    collective.finish(collective.start_sum(tensor, name))
    return tensor


def take_from_first(collective: Collective, tensors: list[torch.Tensor], name: str) -> None:
    """Give every rank the tensors of rank 0, in place (a sum in which the others add zero)."""
    for number, tensor in enumerate(tensors):
        if collective.rank != 0:
            tensor.zero_()
        if tensor.dtype == torch.bool:
            whole = tensor.to(torch.uint8)
            tensor.copy_(sum_(collective, whole, f"{name}.{number}").bool())
        else:
            sum_(collective, tensor, f"{name}.{number}")


class HorovodCollective:
    """Horovod: Gloo on CPUs, NCCL on GPUs."""

    name = "horovod"

    def __init__(self) -> None:
        import horovod.torch as hvd

        hvd.init()
        self._hvd = hvd
        self.rank, self.size, self.wait_s = hvd.rank(), hvd.size(), 0.0

    def start_sum(self, tensor: torch.Tensor, name: str) -> Any:
        return self._hvd.allreduce_async_(tensor, name=name, op=self._hvd.Sum)

    def finish(self, handle: Any) -> None:
        started = time.perf_counter()
        self._hvd.synchronize(handle)
        self.wait_s += time.perf_counter() - started

    def shutdown(self) -> None:
        self._hvd.shutdown()


class TorchCollective:
    """torch.distributed: Gloo on CPUs, NCCL on GPUs. Rank, size and address come from the environment, as torchrun sets them."""

    name = "torch.distributed"

    def __init__(self, backend: str) -> None:
        import torch.distributed

        torch.distributed.init_process_group(backend)
        self._distributed = torch.distributed
        self.rank, self.size, self.wait_s = torch.distributed.get_rank(), torch.distributed.get_world_size(), 0.0

    def start_sum(self, tensor: torch.Tensor, name: str) -> Any:
        return self._distributed.all_reduce(tensor, async_op=True)

    def finish(self, handle: Any) -> None:
        started = time.perf_counter()
        handle.wait()
        self.wait_s += time.perf_counter() - started

    def shutdown(self) -> None:
        self._distributed.destroy_process_group()


def connect(backend: str, device: torch.device) -> Collective:
    """Join the other ranks."""
    if backend == "horovod":
        return HorovodCollective()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return TorchCollective("nccl" if device.type == "cuda" else "gloo")
