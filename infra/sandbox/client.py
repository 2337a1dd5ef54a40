"""Starts sandbox servers, and sends them requests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from trainwright.infra.sandbox import Outcome, Protection, SandboxLimits

_PASSED_ON = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR", "VIRTUAL_ENV")
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
_START_S, _END_S = 120.0, 10.0


class SandboxServer:
    """Runs `function` ("package.module:name", dict -> str or bytes) in a sandbox per request.

    `confined=False` keeps the limits without the protection, for functions that run no user code.
    `warm_up` is a request: the server imports the modules needed to answer it.
    """

    def __init__(
        self,
        function: str,
        *,
        confined: bool = True,
        warm_up: dict[str, Any] | None = None,
        environment: Mapping[str, str],
    ) -> None:
        config = {"function": function, "confined": confined, "warm_up": warm_up}
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "trainwright.infra.sandbox.fork_server",
                    json.dumps(config),
                ],
                env={**environment, **_ONE_THREAD},
                cwd="/",
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def wait_ready(self) -> Protection:
        """Wait until it can serve. Returns its kind of protection. Raises OSError, TimeoutError."""
        self._control.settimeout(_START_S)
        said = json.loads(self._control.recv(2**16) or b"{}")
        self._control.settimeout(None)
        if "protection" not in said:
            error = said.get("error", f"exit code {self._process.wait()}")
            raise OSError(f"sandbox: its server did not start: {error}")
        protection: Protection = said["protection"]
        return protection

    @property
    def alive(self) -> bool:
        """Whether it can take requests."""
        return self._process.poll() is None

    def connect(self) -> socket.socket:
        """A socket for one request: write `message(…)`, shut down writing, read the outcome.

        Closing it ends the work on the request. Raises OSError if the server has ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [b"."], [theirs.fileno()])
        return ours

    def ask(
        self, request: dict[str, Any], limits: SandboxLimits, readable: Iterable[Path] = ()
    ) -> Outcome:
        """The outcome of a request, which may also read these paths. Raises OSError."""
        with self.connect() as connection:
            connection.sendall(message(request, limits, readable))
            connection.shutdown(socket.SHUT_WR)
            return Outcome.from_bytes(b"".join(iter(lambda: connection.recv(2**20), b"")))

    def close(self, grace_s: float = _END_S) -> None:
        """End the server when all requests have ended, or after a grace period."""
        self._control.close()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> SandboxServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def message(request: dict[str, Any], limits: SandboxLimits, readable: Iterable[Path] = ()) -> bytes:
    """The bytes to send for a request."""
    paths = [str(path.absolute()) for path in readable]
    return json.dumps({"request": request, "limits": asdict(limits), "readable": paths}).encode()


def call(
    function: str, request: dict[str, Any], limits: SandboxLimits, readable: Iterable[Path] = ()
) -> Outcome:
    """Run a function once, in its own server's sandbox. Raises OSError, TimeoutError."""
    with SandboxServer(function, environment=scrubbed_environment()) as server:
        server.wait_ready()
        return server.ask(request, limits, readable)


def scrubbed_environment() -> dict[str, str]:
    """Only the variables that locate programs, libraries and modules."""
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    return passed | {"HOME": "/nonexistent", "USER": "sandbox", "CUDA_VISIBLE_DEVICES": ""}
