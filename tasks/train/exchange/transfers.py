"""Messages between pairs of ranks: tensors of any shape, with a header that says what they are.

Sums go through `collective`. A layout that divides the model also gathers rows of different
lengths and exchanges parts of tensors. torch.distributed does not fit: Gloo delivers a short
message silently, and a receiver must know the size before (a batch of sequences has any length).

One thread per rank sends and receives on all connections, so a transfer goes on while the rank
computes. Every message carries its step, its name, and the type and shape of its tensors; a rank
that expects another one raises an error at once.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.train.exchange.connections import connect

_PREFIX = struct.Struct("!II")
"""The bytes of the header, and whether the message belongs to started transfers."""
_MOST_HEADER_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20
"""The most that one call sends or receives."""


class UnlikeActions(TrainingFailed):
    """Two ranks do different things at once: the model's code does not run alike on all ranks."""

    kind = "unlike_actions"


@dataclass
class _Incoming:
    """A message that is being received: first its prefix, then its header, then its tensors."""

    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(_PREFIX.size)))
    at: int = 0
    started: bool = False
    header: dict[str, Any] | None = None
    payload: bytearray | None = None


@dataclass
class Handle:
    """A transfer under way: from which ranks a message of this name is to come."""

    name: str
    step: int
    sources: Sequence[int]
    started: bool


class Transfers:
    """One rank's messages to and from all others."""

    def __init__(
        self, rank: int, size: int, store: Any, address: str, meet_s: float, most_wait_s: float
    ) -> None:
        """Connect to all others (`connections.connect`); `most_wait_s` is the timeout of a wait."""
        self.rank, self.size, self._most_wait_s = rank, size, most_wait_s
        self._connections = connect(rank, size, store, address, meet_s)
        self._to_send: dict[int, deque[memoryview]] = {one: deque() for one in self._connections}
        self._incoming = {one: _Incoming() for one in self._connections}
        self._arrived: dict[tuple[int, bool], deque[tuple[dict[str, Any], bytearray]]] = (
            defaultdict(deque)
        )
        self._lost: dict[int, str] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        for other, connection in self._connections.items():
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, other)
        self.sent_bytes = 0
        self._thread = threading.Thread(target=self._run, name="transfers", daemon=True)
        self._thread.start()

    def begin(
        self,
        name: str,
        step: int,
        sends: Mapping[int, Sequence[torch.Tensor]],
        sources: Sequence[int],
        *,
        started: bool = False,
    ) -> Handle:
        """Send tensors to some ranks; `finish` returns what comes from `sources`.

        All ranks begin the same transfers in the same order, separately for `started` ones, which
        are finished later.
        """
        encoded: dict[int, list[memoryview]] = {}
        with self._changed:
            for other, tensors in sends.items():
                if id(tensors) not in encoded:
                    encoded[id(tensors)] = _encoded(name, step, tensors, started=started)
                pieces = encoded[id(tensors)]
                self._to_send[other].extend(pieces)
                self.sent_bytes += sum(map(len, pieces))
        self._wake.send(b"\0")
        return Handle(name, step, sources, started)

    def finish(self, handle: Handle) -> dict[int, list[torch.Tensor]]:
        """The tensors from each source, in host memory.

        Raises OSError if a rank is lost or silent, and UnlikeActions if another message comes.
        """
        return {source: self._take(handle, source) for source in handle.sources}

    def _take(self, handle: Handle, source: int) -> list[torch.Tensor]:
        until = time.monotonic() + self._most_wait_s
        waiting = self._arrived[source, handle.started]
        with self._changed:
            while not waiting:
                if source in self._lost:
                    raise OSError(f"rank {source}: {self._lost[source]}")
                if not self._changed.wait(until - time.monotonic()):
                    raise TimeoutError(f"{handle.name}: nothing came from rank {source}")
            header, payload = waiting.popleft()
        if (header["name"], header["step"]) != (handle.name, handle.step):
            raise UnlikeActions(
                f"rank {self.rank} expects {handle.name} of step {handle.step} from rank {source}, "
                f"which sent {header['name']} of step {header['step']}: the model's code does not "
                "run alike on all ranks",
                final=True,
            )
        return _decoded(header, payload)

    # -- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._woken.recv(4096)
                    continue
                try:
                    self._receive(key.data)
                except (OSError, ValueError) as error:
                    self._lose(key.data, str(error) or type(error).__name__)
            for other in list(self._connections):
                if other not in self._lost:
                    try:
                        self._send(other)
                    except OSError as error:
                        self._lose(other, str(error))

    def _lose(self, other: int, why: str) -> None:
        self._selector.unregister(self._connections[other])
        with self._changed:
            self._lost[other] = why
            self._changed.notify_all()

    def _send(self, other: int) -> None:
        """Send what the connection takes, and ask to be called when it takes more."""
        queue, connection = self._to_send[other], self._connections[other]
        while queue:
            try:
                count = connection.send(queue[0][:_PIECE_BYTES])
            except BlockingIOError:
                break
            if count == len(queue[0]):
                queue.popleft()
            else:
                queue[0] = queue[0][count:]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if queue else 0)
        if self._selector.get_key(connection).events != wanted:
            self._selector.modify(connection, wanted, other)

    def _receive(self, other: int) -> None:
        """Receive what has come. Raises OSError if the connection is closed."""
        connection = self._connections[other]
        while True:
            incoming = self._incoming[other]
            room = incoming.buffer[incoming.at : incoming.at + _PIECE_BYTES]
            try:
                count = connection.recv_into(room)
            except BlockingIOError:
                return
            if count == 0:
                raise ConnectionResetError("closed its connection")
            incoming.at += count
            while self._incoming[other].at == len(self._incoming[other].buffer):
                self._go_on(other, self._incoming[other])

    def _go_on(self, other: int, incoming: _Incoming) -> None:
        """A buffer is full: of the prefix, of the header, or of the tensors."""
        incoming.at = 0
        if incoming.header is None and incoming.payload is None:
            length, started = _PREFIX.unpack(incoming.buffer)
            if not 0 < length <= _MOST_HEADER_BYTES:
                raise ValueError(f"sent a header of {length} bytes")
            incoming.started, incoming.payload = bool(started), bytearray(0)
            incoming.buffer = memoryview(bytearray(length))
            return
        if incoming.header is None:
            incoming.header = json.loads(bytes(incoming.buffer))
            incoming.payload = bytearray(incoming.header["bytes"])
            incoming.buffer = memoryview(incoming.payload)
            if incoming.payload:
                return
        assert incoming.payload is not None
        with self._changed:
            self._arrived[other, incoming.started].append((incoming.header, incoming.payload))
            self._changed.notify_all()
        self._incoming[other] = _Incoming()

    def close(self) -> None:
        """End the thread and close all connections."""
        if self._closed:
            return
        self._closed = True
        self._wake.send(b"\0")
        self._thread.join()
        for one in (*self._connections.values(), self._wake, self._woken):
            one.close()
        self._selector.close()


def _encoded(
    name: str, step: int, tensors: Sequence[torch.Tensor], *, started: bool
) -> list[memoryview]:
    """A message in pieces: prefix and header, then each tensor's memory."""
    hosted = [one.detach().cpu().contiguous() for one in tensors]
    header = json.dumps(
        {
            "name": name,
            "step": step,
            "tensors": [[str(one.dtype).removeprefix("torch."), list(one.shape)] for one in hosted],
            "bytes": sum(_padded(one.nbytes) for one in hosted),
        }
    ).encode()
    pieces = [memoryview(_PREFIX.pack(len(header), started) + header)]
    for one in hosted:
        if one.numel():
            # A single element is contiguous with any stride, but torch views only a stride of 1.
            flat = one.reshape(-1).as_strided((one.numel(),), (1,))
            pieces.append(flat.view(torch.uint8).numpy().data)
        if padding := _padded(one.nbytes) - one.nbytes:
            pieces.append(memoryview(bytes(padding)))
    return pieces


def _padded(size: int) -> int:
    """Every tensor begins at a multiple of eight bytes."""
    return -(-size // 8) * 8


def _decoded(header: Mapping[str, Any], payload: bytearray) -> list[torch.Tensor]:
    """A message's tensors, which share the memory of the payload."""
    found, at = [], 0
    for dtype_name, shape in header["tensors"]:
        dtype = getattr(torch, dtype_name)
        count = torch.Size(shape).numel()
        if count:
            found.append(torch.frombuffer(payload, dtype=dtype, count=count, offset=at).view(shape))
        else:
            found.append(torch.empty(shape, dtype=dtype))
        at += _padded(count * dtype.itemsize)
    return found
