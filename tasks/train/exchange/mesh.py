"""Small sums over all ranks without a library: a connection between every two of them, and no thread but the caller's.

Each rank sends what it has to all others at once, and adds up what it gets in the order of ranks, so that all find the same last
digit. Until the others ask for it, it lies in the kernel's buffers. So a sum may be begun early, and to end it costs one
wake-up; a library that hands messages from thread to thread takes several, of every rank, and on shared cores they queue.
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
"""So much all ranks together may have sent to each of them that it has not taken; the kernel has room for it.

At 1 Gbit/s and 50 us a message, four ranks that each send to all take 1.6 ms for that, a ring 1.1 ms; on one machine, where it
matters, steps of four ranks were shorter with it than with a quarter of it.
"""
_SECRET_BYTES = 16


@dataclass(eq=False)
class Sent:
    """A sum that was begun; `own` is this rank's part of it, until it is finished."""

    tensor: torch.Tensor
    own: torch.Tensor | None


class Mesh:
    """One rank's connections to all others."""

    def __init__(
        self, rank: int, size: int, store: Any, address: str, meet_s: float, sum_s: float
    ) -> None:
        """Meet the others, who reach this rank at its `address`; where exactly, the store (torch's) tells them.

        Raises OSError where one does not come within `meet_s`. A sum may take `sum_s`.
        """
        self._rank, self._size = rank, size
        self._begun: deque[Sent] = deque()
        self._others: dict[int, socket.socket] = {}
        try:
            self._meet(store, address, meet_s)
        except BaseException:
            self.close()
            raise
        patience = struct.pack("ll", int(sum_s), 0)
        for other in self._others.values():
            other.settimeout(None)
            other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BYTES)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                other.setsockopt(socket.SOL_SOCKET, option, patience)

    def _meet(self, store: Any, address: str, meet_s: float) -> None:
        """Call those before this rank, and be called by those after it. Who does not know the secret is none of them."""
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
                caller.settimeout(meet_s / 4)  # a stranger may say nothing
                said = bytearray(_SECRET_BYTES + 4)
                with contextlib.suppress(OSError):
                    _receive(caller, memoryview(said))
                if hmac.compare_digest(said[:_SECRET_BYTES], secret):
                    self._others[struct.unpack("!I", said[_SECRET_BYTES:])[0]] = caller
                else:
                    caller.close()

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a sum is small enough to be begun now; the same on every rank, for all begin the same in the same order."""
        waiting = sum(sent.tensor.nbytes for sent in self._begun)
        return self._size * (waiting + tensor.nbytes) <= SMALL_BYTES

    def begin(self, tensor: torch.Tensor) -> Sent:
        """Send a contiguous tensor, which `finish` makes the sum."""
        own = tensor.reshape(-1).clone()
        content = own.view(torch.uint8).numpy().data
        for other in self._others.values():
            other.sendall(content)
        self._begun.append(sent := Sent(tensor, own))
        return sent

    def finish(self, sent: Sent) -> None:
        """Wait for what the others have sent. Raises OSError where one has gone."""
        while sent.own is not None:  # those that were begun before it come before it
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
        """Leave the others."""
        for other in self._others.values():
            other.close()


def _receive(connection: socket.socket, into: memoryview) -> None:
    at = 0
    while at < len(into):
        count = connection.recv_into(into[at:])
        if count == 0:
            raise ConnectionResetError("another rank has gone")
        at += count
