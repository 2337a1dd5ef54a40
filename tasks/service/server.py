"""`trainwright serve`: the service behind a listening socket, run by uvicorn."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping

import uvicorn

from trainwright.infra.process import allow_inspection
from trainwright.tasks.errors import BadInput
from trainwright.tasks.service.app import create_app
from trainwright.tasks.service.auth import BearerTokens, Role
from trainwright.tasks.service.client_connections import (
    ConnectionLimits,
    OncePerEpisode,
    bounded_protocol,
)
from trainwright.tasks.service.service import Service

_BACKLOG = 128
"""Connections that the kernel keeps for us. asyncio also accepts so many at once, and logs as many
errors if no more files can be opened."""
_REPEATING = ("uvicorn.error", "asyncio", "trainwright.tasks.service.client_connections")
"""loggers to which each client could write a line per request"""


def listening(host: str, port: int) -> socket.socket:
    """A listening socket. Raises BadInput if it can't be opened."""
    if not 0 <= port <= 65535:
        raise BadInput(f"--port: got {port}; allowed: 0 to 65535")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        # asyncio sets TCP_NODELAY only on sockets that name their protocol. Without it, every
        # answer waits 40 ms for an acknowledgement (Nagle's algorithm).
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, UnicodeError) as error:
        raise BadInput(
            f"--host, --port: can't listen on {host}:{port} ({getattr(error, 'strerror', error)})"
        ) from None


def address_of(host: str, listener: socket.socket) -> str:
    """The URL of a listening socket."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


async def serve(
    service: Service,
    tokens: Mapping[Role, str],
    listener: socket.socket,
    ready: Callable[[str], None],
) -> None:
    """Serve until a signal arrives. Calls `ready` with the kind of protection at the start."""
    allow_inspection(False)  # without namespaces, models' code could inspect this process
    app = create_app(service, BearerTokens(tokens), start=False)
    try:
        await service.start()
        ready(service.tracer.sandbox.protection)
        limits = ConnectionLimits()
        config = uvicorn.Config(
            app,
            http=bounded_protocol(limits),
            ws="none",
            h11_max_incomplete_event_size=limits.head_bytes,
            timeout_keep_alive=limits.keep_alive_s,
            backlog=_BACKLOG,
            access_log=False,
            log_level="warning",
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=5,
        )
        for name in _REPEATING:
            logging.getLogger(name).addFilter(OncePerEpisode())
        await uvicorn.Server(config).serve(sockets=[listener])
    finally:
        service.close()
