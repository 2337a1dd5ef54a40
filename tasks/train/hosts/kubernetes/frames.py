"""Carries standard input and output through one TLS connection, in frames.

A frame is its length (four bytes, big endian) and as many bytes. A frame of length zero is the end
of that direction; the other one stays open, which TLS by itself does not offer.
"""

from __future__ import annotations

import os
import selectors
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Literal

_LENGTH = struct.Struct(">I")
_PIECE_BYTES = 1 << 16
_MOST_WAITING_BYTES = 1 << 20
"""A side that takes nothing must not fill our memory."""
_SILENCE_S = 15
"""After so long without a sign of life from the other machine's kernel, the connection ends."""


class Broken(OSError):
    """The connection ended, or the peer sent what is no frame."""


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel end the connection if the other machine is silent, as ssh does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 5),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000),
        (socket.TCP_NODELAY, 1),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Carrier:
    """Carries what comes from `source` to the peer, and what comes from the peer to `sink`.

    One thread does both, because an SSL object must not be used by two at once.
    """

    def __init__(
        self, peer: ssl.SSLSocket, source: int, sink: int, until: Literal["source", "sink"]
    ) -> None:
        """It ends with the process's output: the pod's end with `source`, the other with `sink`."""
        self._peer, self._source, self._sink, self._until = peer, source, sink, until
        self._to_peer, self._received, self._to_sink = bytearray(), bytearray(), bytearray()
        self._source_open, self._sink_open, self._peer_open = True, True, True

    def run(self, close_sink: Callable[[], None]) -> None:
        """Carry until the process's output has ended; `close_sink` ends the sink. Raises Broken."""
        for descriptor in (self._source, self._sink):
            os.set_blocking(descriptor, False)
        self._peer.setblocking(False)
        while not self._done():
            self._send()
            self._receive()
            self._pour()
            if self._sink_open and not self._peer_open and not self._to_sink:
                self._sink_open = False
                close_sink()
            self._wait()

    def _done(self) -> bool:
        if self._until == "sink":
            return not self._sink_open
        return not self._source_open and not self._to_peer

    def _wait(self) -> None:
        """Wait for what can be read or written; SSL may hold bytes that no selector sees."""
        with selectors.DefaultSelector() as selector:
            events = selectors.EVENT_READ if len(self._to_sink) < _MOST_WAITING_BYTES else 0
            events |= selectors.EVENT_WRITE if self._to_peer else 0
            if events:
                selector.register(self._peer, events)
            if self._source_open and len(self._to_peer) < _MOST_WAITING_BYTES:
                selector.register(self._source, selectors.EVENT_READ)
            if self._to_sink:
                selector.register(self._sink, selectors.EVENT_WRITE)
            pending = self._peer.pending() > 0 and len(self._to_sink) < _MOST_WAITING_BYTES
            ready = selector.select(0 if pending else 1.0)
        if any(key.fd == self._source for key, _ in ready):
            self._read_source()

    def _read_source(self) -> None:
        try:
            data = os.read(self._source, _PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._source_open = bool(data)
        self._to_peer += _LENGTH.pack(len(data)) + data

    def _send(self) -> None:
        while self._to_peer:
            try:
                sent = self._peer.send(memoryview(self._to_peer)[:_PIECE_BYTES].tobytes())
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError as error:
                raise Broken(f"the connection ended: {error.strerror or error}") from None
            del self._to_peer[:sent]

    def _receive(self) -> None:
        while len(self._to_sink) < _MOST_WAITING_BYTES:
            try:
                data = self._peer.recv(_PIECE_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError as error:
                raise Broken(f"the connection ended: {error.strerror or error}") from None
            if not data:
                if self._peer_open or self._until == "source":
                    raise Broken("the connection ended")
                return
            self._received += data
            self._unpack()

    def _unpack(self) -> None:
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > _PIECE_BYTES:
                raise Broken(f"the peer sent a frame of {length} bytes")
            if len(self._received) < _LENGTH.size + length:
                return
            if self._peer_open:
                self._to_sink += self._received[_LENGTH.size : _LENGTH.size + length]
            del self._received[: _LENGTH.size + length]
            self._peer_open = self._peer_open and length > 0

    def _pour(self) -> None:
        while self._to_sink:
            try:
                written = os.write(self._sink, self._to_sink[:_PIECE_BYTES])
            except BlockingIOError:
                return
            except OSError:  # whoever reads has ended; its end is what counts
                self._to_sink.clear()
                self._peer_open = False
                return
            del self._to_sink[:written]
