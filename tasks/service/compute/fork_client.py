"""The service's side of a fork server: starts it, passes requests on, ends their processes when nobody waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from typing import Any, Literal

from trainwright.infra.process import dying_with_parent
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.extract import of_memory
from trainwright.tasks.settings import SERVICE_SECRETS, Settings

_PASSED_TO_MODELS = (
    "PATH",
    "LANG",
    "LC_ALL",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "TMPDIR",
    "VIRTUAL_ENV",
)
_THREADS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
_START_S = 120.0


class ForkClient:
    """A fork server, started at its first use and again when it died."""

    def __init__(
        self,
        kind: Literal["trace", "compute"],
        settings: Settings,
        *,
        timeout_s: float,
        memory_limit_bytes: int,
    ) -> None:
        self.network = "not started"
        self._settings = settings
        self._kind, self._timeout_s, self._memory = kind, timeout_s, memory_limit_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start it, unless it runs, and wait until it has imported what it needs."""
        async with self._starting:
            if self._process is not None and self._process.poll() is None:
                return
            self.close()
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    dying_with_parent(
                        [
                            sys.executable,
                            "-m",
                            "trainwright.tasks.service.compute.fork_server",
                            self._kind,
                        ]
                    ),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=self._environment(),
                    cwd="/",
                )
            ours.setblocking(False)
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(_START_S):
                    said = await loop.sock_recv(ours, 4096)
                self.network = str(json.loads(said)["network"])
            except (TimeoutError, ValueError, OSError) as error:
                ours.close()
                self.close()
                raise TrainwrightError(
                    f"service: its {self._kind} process did not start ({type(error).__name__})"
                ) from None
            except BaseException:
                ours.close()
                self.close()
                raise
            self._control = ours

    async def ask(self, request: dict[str, Any]) -> bytes:
        """The answer to a request. Cancelled, it ends the process that works on it. Raises what the answer's error says."""
        await self.start()
        control = self._control
        assert control is not None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(control, [b"."], [theirs.fileno()])
            except OSError:
                ours.close()
                self.close()
                raise TrainwrightError(
                    f"service: its {self._kind} process ended; try again"
                ) from None
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            request = {"timeout_s": self._timeout_s, "memory_limit_bytes": self._memory, **request}
            with contextlib.suppress(OSError):
                writer.write(json.dumps(request).encode())
                writer.write_eof()
                await writer.drain()
            async with asyncio.timeout(self._timeout_s + 20.0):
                answer = await reader.read()
        except TimeoutError:
            answer = b""
        finally:
            writer.close()
        return self._checked(answer)

    def _checked(self, answer: bytes) -> bytes:
        what = "model: tracing it" if self._kind == "trace" else "request: the work"
        if not answer:
            raise TrainwrightError(f"service: its {self._kind} process ended without an answer")
        if answer.startswith(b"+"):
            return answer[1:]
        how = json.loads(answer[1:])
        last = how["last"]
        late = how["ended"] == "late" or how["code"] == -24  # SIGXCPU
        and_late = f" and did not end within {how['limit_s']:g} s" if late else ""
        if of_memory(last):
            raise BadInput(
                f"{what} took more than the {self._memory / 2**30:g} GiB allowed{and_late}: {last}"
            )
        if "Resource temporarily unavailable" in last:  # of fork, where RLIMIT_NPROC is reached
            raise BadInput(f"{what} started more processes than are allowed{and_late}: {last}")
        if late:
            raise BadInput(f"{what} did not end within {how['limit_s']:g} s")
        raise BadInput(
            f"{what} ended its process ({how['code']}) without an answer {last}".rstrip()
        )

    def _environment(self) -> dict[str, str]:
        if self._kind == "compute":
            return {
                name: value
                for name, value in self._settings.environment().items()
                if name not in SERVICE_SECRETS.values()
            } | _THREADS
        passed = {name: os.environ[name] for name in _PASSED_TO_MODELS if name in os.environ}
        return passed | _THREADS | {"HOME": "/nonexistent", "CUDA_VISIBLE_DEVICES": ""}

    def close(self) -> None:
        """End it; what it works on ends with it."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
