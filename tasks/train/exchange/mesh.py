"""Small sums over all ranks without a library: one connection per pair of ranks, no extra threads.

Each rank sends its tensor to all others at once, and adds up the received ones in the order of
ranks, so that all get the same last digit. The data waits in the kernel's socket buffers until the
receiver reads it. So a sum can start early, and finishing it wakes a rank once. A library that
passes messages between threads wakes several threads per rank, which queue on shared cores.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch  # noqa: TID253 - only ranks import this

SMALL_BYTES = 1 << 18
"""The most unread bytes in flight to one rank, from all ranks together; fits the socket buffers.

Sums above it go through the library. At 1 Gbit/s and 50 us a message, four ranks need 1.6 ms for
sums of this size, a ring 1.1 ms. On a single machine, where the latency matters, steps of four
ranks were faster with this limit than with a quarter of it.
"""
_SECRET_BYTES = 16


@dataclass(eq=False)
class Sent:
    """A started sum; `own` is this rank's part, None once the sum is finished."""

    tensor: torch.Tensor
    own: torch.Tensor | None


class Mesh:
    """One rank's connections to all others."""

    def __init__(
        self, rank: int, size: int, store: Any, address: str, meet_s: float, sum_s: float
    ) -> None:
        """Connect to all other ranks; they reach this one at `address`.

        The ranks exchange their ports through `store` (a torch store). Raises OSError if a rank
        does not connect within `meet_s`. `sum_s` is the timeout of a sum.
        """
        self._rank, self._size = rank, size
        self._begun: deque[Sent] = deque()
        self._others: dict[int, socket.socket] = {}
        try:
            self._meet(store, address, meet_s)
        except BaseException:
            self.close()
            raise
        timeout = struct.pack("ll", int(sum_s), 0)
        for other in self._others.values():
            other.settimeout(None)
            other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BYTES)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                other.setsockopt(socket.SOL_SOCKET, option, timeout)

    def _meet(self, store: Any, address: str, meet_s: float) -> None:
        """Connect to all lower ranks; accept all higher ones, which must know the secret."""
        secret, until = secrets.token_bytes(_SECRET_BYTES), time.monotonic() + meet_s
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family, backlog=self._size) as listening:
            store.set(str(self._rank), f"{secret.hex()} {listening.getsockname()[1]} {address}")
            for other in range(self._rank):
                theirs, port, there = store.get(str(other)).decode().split(" ")
                self._others[other] = socket.create_connection((there, int(port)), timeout=meet_s)
                self._others[other].sendall(bytes.fromhex(theirs) + struct.pack("!I", self._rank))
            while len(self._others) < self._size - 1:
                listening.settimeout(max(1e-3, until - time.monotonic()))
                caller, _ = listening.accept()
                caller.settimeout(meet_s / 4)  # an unrelated client may send nothing
                greeting = bytearray(_SECRET_BYTES + 4)
                with contextlib.suppress(OSError):
                    _receive(caller, memoryview(greeting))
                if hmac.compare_digest(greeting[:_SECRET_BYTES], secret):
                    self._others[struct.unpack("!I", greeting[_SECRET_BYTES:])[0]] = caller
                else:
                    caller.close()

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a sum is small enough to start now.

        All ranks start the same sums in the same order, so all get the same answer.
        """
        waiting = sum(sent.tensor.nbytes for sent in self._begun)
        return self._size * (waiting + tensor.nbytes) <= SMALL_BYTES

    def begin(self, tensor: torch.Tensor) -> Sent:
        """Send a contiguous tensor to all; `finish` replaces it by the sum."""
        own = tensor.reshape(-1).clone()
        content = own.view(torch.uint8).numpy().data
        for other in self._others.values():
            other.sendall(content)
        self._begun.append(sent := Sent(tensor, own))
        return sent

    def finish(self, sent: Sent) -> None:
        """Wait for the others' parts of a sum. Raises OSError if a rank is gone."""
        while sent.own is not None:  # earlier sums arrive first on each connection
            first = self._begun.popleft()
            self._add_up(first)
            first.own = None

    def _add_up(self, sent: Sent) -> None:
        assert sent.own is not None
        total, received = sent.tensor.view(-1), torch.empty_like(sent.own)
        content = received.view(torch.uint8).numpy().data
        for rank in range(self._size):
            if rank != self._rank:
                _receive(self._others[rank], content)
            part = sent.own if rank == self._rank else received
            if rank == 0:
                total.copy_(part)
            else:
                total += part

    def close(self) -> None:
        """Close all connections."""
        for other in self._others.values():
            other.close()


def _receive(connection: socket.socket, into: memoryview) -> None:
    at = 0
    while at < len(into):
        count = connection.recv_into(into[at:])
        if count == 0:
            raise ConnectionResetError("another rank closed its connection")
        at += count
