"""Bounds of HTTP connections: how many, how long a request may arrive, how often a fault is logged.

uvicorn bounds none of these before a request has arrived: silent clients would use up the process's
open files. A connection counts as waiting while no request is being answered on it; if there are
too many, the one that waits longest makes room, so a client that speaks is always heard.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from trainwright.tasks.service.limits import BODY_TIMEOUT_S

_log = logging.getLogger(__name__)
_COMPARED = 40
"""characters of a message that are the same in all of an episode"""


@dataclass(frozen=True)
class ConnectionLimits:
    """What connections may take. Sizes of bodies: `limits`."""

    connections: int = 512
    of_client: int = 256
    """of one address; less than all, so that others are served too"""
    head_s: float = 10.0
    """from the opening, or the last answer, to the end of a request's headers"""
    body_s: float = BODY_TIMEOUT_S + 5.0
    """for a body that no route reads; routes end theirs earlier, with an answer"""
    write_s: float = 60.0
    """how long a client may take no byte of an answer"""
    head_bytes: int = 64 * 2**10
    keep_alive_s: int = 5


class Connections:
    """The open connections of a server."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._clients = Counter[str]()
        self._waiting: dict[BoundedProtocol, str] = {}
        """those on which no request is being answered, longest first, and their clients"""

    def admit(self, client: str) -> bool:
        """Whether a client may open a connection. May end one that waits."""
        if self._clients[client] >= self.limits.of_client:
            room = self._end_waiting(client)
            _log.warning("connections: %s has too many; those that wait longest are ended", client)
        elif self._clients.total() >= self.limits.connections:
            room = self._end_waiting(None)
            _log.warning("connections: there are too many; those that wait longest are ended")
        else:
            room = True
        if room:
            self._clients[client] += 1
        return room

    def _end_waiting(self, client: str | None) -> bool:
        for protocol, its in self._waiting.items():
            if client in (None, its):
                protocol.end()
                return True
        return False

    def waits(self, protocol: BoundedProtocol, client: str, waiting: bool) -> None:
        """Note whether a connection waits."""
        self._waiting.pop(protocol, None)
        if waiting:
            self._waiting[protocol] = client

    def closed(self, protocol: BoundedProtocol, client: str) -> None:
        """Forget a connection that was admitted."""
        self._waiting.pop(protocol, None)
        self._clients -= Counter([client])


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol, with a time limit for each part of a request and of its answer."""

    _open: Connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        peer = transport.get_extra_info("peername")
        self._client = str(peer[0]) if peer else ""
        self._timer: asyncio.TimerHandle | None = None
        self._state: Any = None
        self._admitted = self._open.admit(self._client)
        super().connection_made(transport)
        if not self._admitted:
            transport.abort()
            return
        self._look()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit("writing", self._open.limits.write_s, "an answer was not taken")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._state = None
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._admitted:
            self.end()
        super().connection_lost(exc)

    def end(self) -> None:
        """Close the connection at once, and do not count it any more."""
        if self._admitted:
            self._admitted = False
            self._open.closed(self, self._client)
        if self._timer is not None:
            self._timer.cancel()
        self.transport.abort()

    def _look(self) -> None:
        """Set the time limit of what the client does now; bytes do not restart it."""
        if not self._admitted or self._state == "writing":
            return
        limits, receives = self._open.limits, self.conn.their_state
        self._open.waits(self, self._client, receives is h11.IDLE)
        if receives is h11.IDLE:
            self._limit(receives, limits.head_s, "a request's headers did not arrive")
        elif receives is h11.SEND_BODY:
            self._limit(receives, limits.body_s, "a request's body did not arrive")
        else:
            self._limit(None, 0.0, "")

    def _limit(self, state: Any, seconds: float, what: str) -> None:
        if state is self._state and state is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._state, self._timer = state, None
        if state is not None:
            self._timer = self.loop.call_later(seconds, self._too_slow, what, seconds)

    def _too_slow(self, what: str, seconds: float) -> None:
        _log.warning(f"connections: {what} within %g s; ended", seconds)
        self.end()


def bounded_protocol(limits: ConnectionLimits) -> type[BoundedProtocol]:
    """The protocol of one server."""
    return type("Protocol", (BoundedProtocol,), {"_open": Connections(limits)})


class OncePerEpisode(logging.Filter):
    """Drops a message that was logged or dropped less than a minute ago."""

    QUIET_S = 60.0

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record begins an episode. Messages are compared before formatting."""
        if record.exc_info and record.name != "asyncio":
            return True  # a failure of ours
        key, now = (record.name, str(record.msg)[:_COMPARED]), time.monotonic()
        begins = now - self._last.get(key, -self.QUIET_S) >= self.QUIET_S
        self._last[key] = now
        return begins
