"""Sandbox servers that the tests of a process share.

A server imports torch, which takes longer than most requests. Each request still has a sandbox of
its own. A process of the command line starts its own server, as outside tests.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainwright.infra.sandbox import Outcome, SandboxLimits
from trainwright.infra.sandbox.client import SandboxServer, call, scrubbed_environment

_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)


def _inherited() -> Any:
    """What a server inherits from this process."""
    return scrubbed_environment(), [resource.getrlimit(one) for one in _LIMITS]


class SharedServers:
    """A server for each function, from its first request on."""

    def __init__(self) -> None:
        self._inherited = _inherited()
        self._servers: dict[str, SandboxServer] = {}
        self._lock = threading.Lock()

    def call(
        self,
        function: str,
        request: dict[str, Any],
        limits: SandboxLimits,
        readable: Iterable[Path] = (),
    ) -> Outcome:
        """As `client.call`, with the shared server unless the test changed what it inherits."""
        if _inherited() != self._inherited:
            return call(function, request, limits, readable)
        with self._lock:
            server = self._servers.get(function)
            if server is None or not server.alive:
                server = SandboxServer(function, environment=scrubbed_environment())
                self._servers[function] = server
                server.wait_ready()
        return server.ask(request, limits, readable)

    def close(self) -> None:
        """End the servers."""
        with self._lock:
            for server in self._servers.values():
                server.close()
            self._servers.clear()
