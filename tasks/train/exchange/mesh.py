"""Small sums over all ranks without a library: one connection per pair of ranks, no extra threads.

Each rank sends its tensor to all others at once, and adds up the received ones in the order of
ranks, so that all get the same last digit. The data waits in the kernel's socket buffers until the
receiver reads it. So a sum can start early, and finishing it wakes a rank once. A library that
passes messages between threads wakes several threads per rank, which queue on shared cores.

Every message begins with a label, which says what is summed.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.train.exchange.connections import connect, receive
from trainwright.tasks.train.exchange.transfers import UnlikeActions

SMALL_BYTES = 1 << 18
"""The most unread bytes in flight to one rank, from all ranks together; fits the socket buffers.

Sums above it go through the library. At 1 Gbit/s and 50 us a message, four ranks need 1.6 ms for
sums of this size, a ring 1.1 ms. On a single machine, where the latency matters, steps of four
ranks were faster with this limit than with a quarter of it.
"""
LABEL = struct.Struct("16s48s")
"""A digest of what is summed, and the beginning of its text."""


@dataclass(eq=False)
class Sent:
    """A started sum; `own` is this rank's part, None once the sum is finished."""

    tensor: torch.Tensor
    own: torch.Tensor | None
    label: bytes


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
        self._others = connect(rank, size, store, address, meet_s)
        timeout = struct.pack("ll", int(sum_s), 0)
        for other in self._others.values():
            other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BYTES)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                other.setsockopt(socket.SOL_SOCKET, option, timeout)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a sum is small enough to start now.

        All ranks start the same sums in the same order, so all get the same answer.
        """
        waiting = sum(LABEL.size + sent.tensor.nbytes for sent in self._begun)
        return self._size * (waiting + LABEL.size + tensor.nbytes) <= SMALL_BYTES

    def begin(self, tensor: torch.Tensor, what: str) -> Sent:
        """Send a contiguous tensor to all; `finish` replaces it by the sum."""
        own = tensor.reshape(-1).clone()
        label = LABEL.pack(blake2b(what.encode(), digest_size=16).digest(), what.encode())
        content = label + own.view(torch.uint8).numpy().tobytes()
        for other in self._others.values():
            other.sendall(content)
        self._begun.append(sent := Sent(tensor, own, label))
        return sent

    def finish(self, sent: Sent) -> None:
        """Wait for the others' parts of a sum.

        Raises OSError if a rank is gone, and UnlikeActions if it sums something else.
        """
        while sent.own is not None:  # earlier sums arrive first on each connection
            first = self._begun.popleft()
            self._add_up(first)
            first.own = None

    def _add_up(self, sent: Sent) -> None:
        assert sent.own is not None
        total, received = sent.tensor.view(-1), torch.empty_like(sent.own)
        content, label = received.view(torch.uint8).numpy().data, bytearray(LABEL.size)
        for rank in range(self._size):
            if rank != self._rank:
                receive(self._others[rank], memoryview(label))
                if label != sent.label:
                    theirs, own = (_text(bytes(one)) for one in (label, sent.label))
                    raise UnlikeActions(
                        f"rank {self._rank} sums {own}, and rank {rank} sums {theirs}: the model's "
                        "code does not run alike on all ranks",
                        final=True,
                    )
                receive(self._others[rank], content)
            part = sent.own if rank == self._rank else received
            if rank == 0:
                total.copy_(part)
            else:
                total += part

    def close(self) -> None:
        """Close all connections."""
        for other in self._others.values():
            other.close()


def _text(label: bytes) -> str:
    text: bytes = LABEL.unpack(label)[1]
    return text.rstrip(b"\0").decode(errors="replace")
