"""Sends and receives messages on the connections to all other ranks, in a thread of its own.

A message is a prefix with the size of its header, the header as JSON, and bytes as many as the
header says.
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_PREFIX = struct.Struct("!I")
_MOST_HEADER_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20
"""The most that one call sends or receives."""

MessageHeader = dict[str, Any]
"""What a message is; `bytes` is the size of its content."""


@dataclass
class _Incoming:
    """A message that is being received: first its prefix, then its header, then its content."""

    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(_PREFIX.size)))
    at: int = 0
    header: MessageHeader | None = None
    content: bytearray | None = None


@dataclass
class _Outgoing:
    """A message that is being sent, in pieces; `sent` is called when all of it has left."""

    pieces: deque[memoryview]
    sent: Callable[[], None]


class MessageThread:
    """`arrived` and `lost` are called in the thread, with the other rank."""

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        arrived: Callable[[int, MessageHeader, bytearray], None],
        lost: Callable[[int, str], None],
    ) -> None:
        self._connections, self._arrived, self._lost = dict(connections), arrived, lost
        self._to_send: dict[int, deque[_Outgoing]] = {one: deque() for one in connections}
        self._incoming = {one: _Incoming() for one in connections}
        self._gone: set[int] = set()
        self._closed = False
        self.out_of_memory = False
        """whether a message did not fit into memory; the connection that brought it is lost"""
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        for other, connection in self._connections.items():
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ, other)
        self._thread = threading.Thread(target=self._run, name="transfers", daemon=True)
        self._thread.start()

    def send(
        self, other: int, header: bytes, content: Sequence[memoryview], sent: Callable[[], None]
    ) -> int:
        """Send a message whose header is encoded; from any thread. Returns its size in bytes."""
        pieces = deque([memoryview(_PREFIX.pack(len(header)) + header), *content])
        size = sum(map(len, pieces))
        self._to_send[other].append(_Outgoing(pieces, sent))
        if threading.current_thread() is not self._thread:
            self._wake.send(b"\0")
        return size

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._woken.recv(4096)
                    continue
                try:
                    self._receive(key.data)
                except MemoryError:
                    self.out_of_memory = True
                    self._lose(key.data, "its message does not fit into memory")
                except (OSError, ValueError) as error:
                    self._lose(key.data, str(error) or type(error).__name__)
            for other in list(self._connections):
                if other not in self._gone:
                    try:
                        self._send(other)
                    except OSError as error:
                        self._lose(other, str(error))

    def _lose(self, other: int, why: str) -> None:
        self._selector.unregister(self._connections[other])
        self._gone.add(other)
        self._lost(other, why)

    def _send(self, other: int) -> None:
        """Send what the connection takes, and ask to be called when it takes more."""
        queue, connection = self._to_send[other], self._connections[other]
        while queue:
            pieces = queue[0].pieces
            try:
                count = connection.send(pieces[0][:_PIECE_BYTES])
            except BlockingIOError:
                break
            if count < len(pieces[0]):
                pieces[0] = pieces[0][count:]
                continue
            pieces.popleft()
            if not pieces:
                queue.popleft().sent()
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
        """A buffer is full: of the prefix, of the header, or of the content."""
        incoming.at = 0
        if incoming.content is None:
            (length,) = _PREFIX.unpack(incoming.buffer)
            if not 0 < length <= _MOST_HEADER_BYTES:
                raise ValueError(f"sent a header of {length} bytes")
            incoming.content = bytearray(0)
            incoming.buffer = memoryview(bytearray(length))
            return
        if incoming.header is None:
            incoming.header = json.loads(bytes(incoming.buffer))
            incoming.content = bytearray(incoming.header["bytes"])
            incoming.buffer = memoryview(incoming.content)
            if incoming.content:
                return
        self._incoming[other] = _Incoming()
        self._arrived(other, incoming.header, incoming.content)

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
