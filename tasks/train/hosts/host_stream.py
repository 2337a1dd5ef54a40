"""The stream to and from one host: the engine's process on this machine.

It waits until the engine grants the host, and says what it waits for. `session` is what the
launcher and the agent say to each other over it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import math
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from trainwright.infra.process import dying_with_parent
from trainwright.tasks import progress
from trainwright.tasks.errors import ServiceUnreachable, TrainwrightError
from trainwright.tasks.train.hosts import versions
from trainwright.tasks.train.hosts.container import contained, why_not_started
from trainwright.tasks.train.hosts.host_engine import HostEngine, HostRequest, HostStanding

HELLO_TIMEOUT_S = 60.0
_LOOK_S, _END_LOOK_S = 0.5, 0.02
# Runs on the host: prints the host's facts, then becomes the agent when the launcher agrees. Reads
# byte by byte, because everything after the first line is for the agent.
_BOOT = """
import json, os, sys
exec({facts!r})
os.write(1, (json.dumps(facts()) + "\\n").encode())
while (byte := os.read(0, 1)) != b"\\n":
    byte or sys.exit()
from trainwright.tasks.train.hosts.agent import main
main()
"""
Message = dict[str, Any]
_log = logging.getLogger(__name__)


class HostStream:
    """The engine's process for a host. The kernel ends it with the thread that made it."""

    def __init__(self, asked: HostRequest, engine: HostEngine, log: Path) -> None:
        """`log` gets what the process writes to its standard error."""
        self.log, self._asked, self._engine = log, asked, engine
        self._writing, self._reaping = threading.Lock(), threading.Lock()
        self._hung_up: str | None = None
        self._reported = ("", False)
        self.queued = False
        """whether the engine has not granted the host yet"""
        self.waits = ""
        """for what, as the engine has said last"""
        boot = _BOOT.format(facts=Path(versions.__file__).read_text())
        one_line = (
            f"import base64; exec(base64.b64decode('{base64.b64encode(boot.encode()).decode()}'))"
        )
        words = [asked.python, "-P", "-c", one_line]
        words = contained(asked.container, words, asked.host.memory)
        command = engine.command(asked, words)
        with log.open("ab") as errors:
            self._log_begins = errors.tell()  # an earlier connection may have written before this
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                dying_with_parent(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **engine.variables},
                start_new_session=True,
            )

    def __str__(self) -> str:
        return str(self._asked)

    def first_line(self) -> Message:
        """The next line, a message, once the host is granted.

        Raises ServiceUnreachable, or BadInput if the engine refuses the request.
        """
        heard = threading.Event()
        threading.Thread(
            target=self._limit_wait,
            args=(heard,),
            name=f"hello-{self._asked.host.name}",
            daemon=True,
        ).start()
        try:
            line = self.readline()
        finally:
            heard.set()
        if not line:
            raise self._ended_early()
        try:
            found = json.loads(line)
        except ValueError:
            raise self.error(
                f"answered {line[:80]!r}; the login shell on that host prints text; remove it from "
                "its start-up files"
            ) from None
        return dict(found)

    def _limit_wait(self, heard: threading.Event) -> None:
        """End the engine's process if the host, once granted, does not answer in time."""
        granted_at: float | None = None
        while not heard.wait(_LOOK_S):
            try:
                standing = self._engine.standing(self._asked)
            except Exception as error:  # noqa: BLE001 - a thread's boundary: logged and reported
                _log.exception("%s: its place in the queue is unknown", self)
                self.hang_up(f"its place in the queue is unknown: {type(error).__name__}: {error}")
                return
            self.queued = standing.status == "queued"
            if standing.status == "refused":
                self.hang_up(standing.why)
                return
            if self.queued:
                granted_at = None
                self._report(standing)
            elif granted_at is None:
                granted_at = time.monotonic()
            elif time.monotonic() - granted_at > HELLO_TIMEOUT_S:
                self.hang_up(f"no answer in {HELLO_TIMEOUT_S:g} s")
                return

    def _report(self, standing: HostStanding) -> None:
        """Report what the host waits for, and when it is expected, once each is known."""
        if (standing.why, standing.expected != "") == self._reported:
            return
        self._reported, self.waits = (standing.why, standing.expected != ""), standing.why
        then = f", expected at {standing.expected}" if standing.expected else ""
        message = f"{self} waits {standing.why}{then}"
        progress.emit("notice", message=message, host=self._asked.host.name, waits=True)

    def error(self, why: str) -> TrainwrightError:
        """The engine's error for this host."""
        return self._engine.error(self._asked, why)

    def _ended_early(self) -> TrainwrightError:
        code = self._exit_code()
        not_started = why_not_started(self._asked.container, self.written(), code)
        if not_started is None:
            return self.error(self.why_ended())
        return ServiceUnreachable(
            f"{self}: {not_started}", service="container", host=self._asked.host.name
        )

    def written(self) -> str:
        """What this connection has written to its log."""
        return self.log.read_bytes()[self._log_begins :].decode(errors="replace")

    def why_ended(self) -> str:
        """Why the process has ended; waits until it has."""
        code = self._exit_code()
        if self._hung_up is not None:
            return self._hung_up
        text = self.written()
        why = self._engine.why_ended(text, code)
        if code in (126, 127):
            return (
                f"{self._asked.python} can't be run there ({why}); "
                "set the host's `python` in the pool file to its path there"
            )
        if "Unknown option: -P" in text:
            return f"{self._asked.python} there is older than Python 3.11"
        return why

    def readline(self) -> bytes:
        """The next line; empty if the process has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def write(self, line: bytes) -> None:
        """Send a line. Nothing happens if the process has ended: its output then ends too."""
        assert self._process.stdin is not None
        with self._writing, contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def hang_up(self, why: str) -> None:
        """End the connection at once, from any thread; pending requests fail."""
        self._hung_up = self._hung_up or why
        self._kill()

    def _kill(self) -> None:
        """Kill the process and its children, unless it has been reaped: its id may be another's."""
        with self._reaping:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _exit_code(self, timeout_s: float = math.inf) -> int | None:
        """The process's exit code, when it has ended; None if it has not in this time."""
        until = time.monotonic() + timeout_s
        while True:
            with self._reaping:
                code = self._process.poll()
            if code is not None or time.monotonic() > until:
                return code
            time.sleep(_END_LOOK_S)

    def end(self, grace_s: float) -> None:
        """End the agent by the end of its input, and the process after this time.

        At once if the host is queued.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if self.queued:
            self.hang_up("the launch has ended")
        if self._exit_code(grace_s) is None:  # the agent removes its files meanwhile
            self._kill()
            self._exit_code()

    def close(self) -> None:
        """Close its output, when nobody reads it any more."""
        assert self._process.stdout is not None
        self._process.stdout.close()
