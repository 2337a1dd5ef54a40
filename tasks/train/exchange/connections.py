"""Connects every rank with every other, by one TCP connection for each pair. Loads no torch."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import time
from typing import Any

_SECRET_BYTES = 16


def connect(
    rank: int, size: int, store: Any, address: str, meet_s: float
) -> dict[int, socket.socket]:
    """Connections to all other ranks, by rank; they reach this one at `address`.

    The ranks exchange their ports through `store` (a torch store). A rank connects to all lower
    ranks and accepts all higher ones, which must know its secret. Raises OSError if a rank does not
    connect within `meet_s`.
    """
    found: dict[int, socket.socket] = {}
    try:
        _meet(found, rank, size, store, address, meet_s)
    except BaseException:
        for one in found.values():
            one.close()
        raise
    for one in found.values():
        one.settimeout(None)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def _meet(
    found: dict[int, socket.socket],
    rank: int,
    size: int,
    store: Any,
    address: str,
    meet_s: float,
) -> None:
    secret, until = secrets.token_bytes(_SECRET_BYTES), time.monotonic() + meet_s
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family, backlog=size) as listening:
        store.set(str(rank), f"{secret.hex()} {listening.getsockname()[1]} {address}")
        for other in range(rank):
            theirs, port, there = store.get(str(other)).decode().split(" ")
            found[other] = socket.create_connection((there, int(port)), timeout=meet_s)
            found[other].sendall(bytes.fromhex(theirs) + struct.pack("!I", rank))
        while len(found) < size - 1:
            listening.settimeout(max(1e-3, until - time.monotonic()))
            caller, _ = listening.accept()
            caller.settimeout(meet_s / 4)  # an unrelated client may send nothing
            greeting = bytearray(_SECRET_BYTES + 4)
            with contextlib.suppress(OSError):
                receive(caller, memoryview(greeting))
            if hmac.compare_digest(greeting[:_SECRET_BYTES], secret):
                found[struct.unpack("!I", greeting[_SECRET_BYTES:])[0]] = caller
            else:
                caller.close()


def receive(connection: socket.socket, into: memoryview) -> None:
    """Fill a buffer from a connection. Raises OSError if the other end closes it."""
    at = 0
    while at < len(into):
        count = connection.recv_into(into[at:])
        if count == 0:
            raise ConnectionResetError("another rank closed its connection")
        at += count
