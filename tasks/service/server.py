"""The service alone: a listening socket and uvicorn."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping

import uvicorn

from trainwright.infra.process import hide
from trainwright.tasks.errors import BadInput
from trainwright.tasks.service.app import create_app
from trainwright.tasks.service.auth import BearerTokens, Role
from trainwright.tasks.service.service import Service


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises BadInput where it can't."""
    if not 0 <= port <= 65535:
        raise BadInput(f"--port: got {port}; allowed: 0 to 65535")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
        # asyncio sees to this on sockets that name their protocol only; without, every answer waits 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, UnicodeError) as error:
        raise BadInput(
            f"--host, --port: can't listen on {host}:{port} ({getattr(error, 'strerror', error)})"
        ) from None


def address_of(host: str, listener: socket.socket) -> str:
    """Its URL."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


async def serve(
    service: Service,
    tokens: Mapping[Role, str],
    listener: socket.socket,
    ready: Callable[[str], None],
) -> None:
    """Serve until a signal comes; `ready` is told how models' code is kept off the network once requests are answered."""
    hide()  # a model's code runs as the same user
    app = create_app(service, BearerTokens(tokens), start=False)
    try:
        await service.start()
        ready(service.trace.network)
        config = uvicorn.Config(
            app,
            access_log=False,
            log_level="warning",
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=5,
        )
        await uvicorn.Server(config).serve(sockets=[listener])
    finally:
        service.close()
