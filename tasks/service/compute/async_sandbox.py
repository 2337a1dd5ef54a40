"""A sandbox server for an event loop. Starts at its first use, and again if it died."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainwright.infra.sandbox import Outcome, SandboxLimits
from trainwright.infra.sandbox.client import SandboxServer, message
from trainwright.tasks.errors import TrainwrightError

_ENDING_S = 20.0
"""a supervisor that exceeds its time limit by more than this has failed"""


class AsyncSandbox:
    """Runs `function` on requests, each in a process within `limits`; see `SandboxServer`."""

    def __init__(
        self,
        function: str,
        limits: SandboxLimits,
        *,
        confined: bool,
        warm_up: dict[str, Any],
        environment: Mapping[str, str],
    ) -> None:
        self.protection = "not started"
        self.limits = limits
        self._function, self._confined, self._warm_up = function, confined, warm_up
        self._environment = environment
        self._server: SandboxServer | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> SandboxServer:
        """Start the server, unless it runs, and wait until it is ready. Raises TrainwrightError."""
        async with self._starting:
            if self._server is None or not self._server.alive:
                self.close()
                self._server = SandboxServer(
                    self._function,
                    confined=self._confined,
                    warm_up=self._warm_up,
                    environment=self._environment,
                )
                try:
                    self.protection = await asyncio.to_thread(self._server.wait_ready)
                except BaseException as error:
                    self.close(0)
                    if isinstance(error, OSError):
                        raise TrainwrightError(f"service: {error}") from error
                    raise
            return self._server

    async def ask(
        self,
        request: dict[str, Any],
        readable: Iterable[Path] = (),
        limits: SandboxLimits | None = None,
    ) -> Outcome:
        """The outcome of a request. Cancelling this ends the work on the request.

        `limits`: of this request (default: those of the sandbox).
        """
        limits = limits or self.limits
        server = await self.start()
        try:
            reader, writer = await asyncio.open_unix_connection(sock=server.connect())
            try:
                with contextlib.suppress(ConnectionError):  # then the answer is missing too
                    writer.write(message(request, limits, readable))
                    writer.write_eof()
                    await writer.drain()
                async with asyncio.timeout(limits.timeout_s + _ENDING_S):
                    return Outcome.from_bytes(await reader.read())
            finally:
                writer.close()
        except OSError as error:  # TimeoutError too
            raise TrainwrightError(f"service: {error or 'no answer'}; try again") from error

    def close(self, grace_s: float = 10.0) -> None:
        """End the server and its work."""
        if self._server is not None:
            self._server.close(grace_s)
            self._server = None
