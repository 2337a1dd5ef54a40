"""The connection to one host of a launch: what the launcher and the agent there (`agent`) say.

`host_stream` is the process that carries it. When the launcher's process ends, for whatever reason,
the connection ends, and with it everything on the host.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.train.awake import Awake
from trainwright.tasks.train.hosts.agent import BEAT_S
from trainwright.tasks.train.hosts.host_engine import HostEngine, HostRequest
from trainwright.tasks.train.hosts.host_stream import HostStream

ANSWER_TIMEOUT_S = 300.0
_PIECE_BYTES = 1 << 18
_LOOK_S = 0.5
Message = dict[str, Any]
_log = logging.getLogger(__name__)


class HostProcess(Protocol):
    """A process on the host, as the launcher sees it."""

    def said(self, line: str) -> None:
        """Handle a message from the process's channel."""
        ...

    def logged(self, line: str) -> None:
        """Handle a line from the process's standard output or error."""
        ...

    def ended(self, code: int, lost: str | None, oom_kills: int = 0) -> None:
        """Handle the end of the process. `lost`: if the host is gone, the reason.

        `oom_kills`: how many processes the host's kernel has killed for lack of memory since
        this one started.
        """
        ...


class Session:
    """A connection to a host.

    The kernel ends the engine's process together with the thread that made the session, so make it
    in a thread that lives as long as the launch.
    """

    def __init__(self, asked: HostRequest, engine: HostEngine, folder: Path) -> None:
        self.name, self.address, self.python = asked.host.name, asked.host.address, asked.python
        self.work = ""
        self._folder, self._engine = folder, engine
        self._stream = HostStream(asked, engine, folder / "logs" / f"host-{self.name}.log")
        self._children: dict[str, HostProcess] = {}
        self._replies: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._listening_since: float | None = None
        self.ending = False
        """whether the host is about to be taken back"""
        self._reader = threading.Thread(target=self._read, name=f"host-{self.name}", daemon=True)

    def __str__(self) -> str:
        return str(self._stream)

    def hello(self) -> Message:
        """The host's facts (`versions.facts`), once it is granted.

        Raises ServiceUnreachable, or BadInput if the engine refuses the request.
        """
        return self._stream.first_line()

    @property
    def queued(self) -> bool:
        """Whether the engine has not granted the host yet."""
        return self._stream.queued

    @property
    def waits(self) -> str:
        """For what it waits, as the engine has said last."""
        return self._stream.waits

    def begin(self) -> None:
        """Start the agent on the host."""
        self._stream.write(b"\n")
        self.work = self._stream.first_line()["work"]
        self._reader.start()
        # two threads, because writing to an agent that is stopped may block for ever
        for work in (self._beat, self._watch):
            threading.Thread(
                target=work, name=f"{work.__name__[1:]}-{self.name}", daemon=True
            ).start()

    def tell(self, do: str, **fields: Any) -> None:
        """Send a request to the agent. The reader thread notices if the host is gone."""
        self._stream.write((json.dumps({"do": do, **fields}) + "\n").encode())

    def ask(self, do: str, **fields: Any) -> Message:
        """Send a request and return the reply. Raises TrainingFailed if there is none."""
        self.tell(do, **fields)
        try:
            reply = self._replies.get(timeout=ANSWER_TIMEOUT_S)
        except queue.Empty:
            raise TrainingFailed(
                f"{self}: no answer in {ANSWER_TIMEOUT_S:g} s; its log is {self._stream.log}"
            ) from None
        if reply is None:
            self._replies.put(None)
            raise self._stream.error(self._lost())
        if reply["kind"] == "failed":
            raise TrainingFailed(f"{self}: {reply['what']}: {reply['why']}")
        return reply

    def put(
        self, path: str, source: Path | bytes, sent: Callable[[int], None] | None = None
    ) -> None:
        """Write a file in the agent's work folder; `sent` gets each number of bytes sent."""
        with open(source, "rb") if isinstance(source, Path) else contextlib.nullcontext() as file:
            rest = source if isinstance(source, bytes) else b""
            while not self._closed.is_set():
                data = file.read(_PIECE_BYTES) if file is not None else rest[:_PIECE_BYTES]
                rest = rest[_PIECE_BYTES:]
                self.tell("put", path=path, data=base64.b64encode(data).decode())
                if sent is not None:
                    sent(len(data))
                if len(data) < _PIECE_BYTES:
                    break

    def sync(self) -> None:
        """Wait until all requests are done. Raises TrainingFailed if one failed."""
        self.ask("sync")

    def start(
        self, name: str, command: list[str], environment: dict[str, str], child: HostProcess
    ) -> None:
        """Start a process; `child` receives its messages, its log and its end."""
        self._children[name] = child
        self.tell("start", name=name, command=command, environment=environment)
        if self._closed.is_set():
            child.ended(255, self._lost())

    def _read(self) -> None:
        while (message := self._next()) is not None:
            try:
                self._take(message)
            except Exception as error:  # noqa: BLE001 - a thread's boundary: logged and reported
                _log.exception("%s: a message could not be handled", self)
                self.hang_up(f"a message could not be handled: {type(error).__name__}: {error}")
                break
        self._closed.set()
        self._replies.put(None)
        lost = self._lost()
        # as if each had been killed for lack of memory: a host tells only that it was short of it
        short = self._engine.out_of_memory(lost)
        code = -signal.SIGKILL if short else 255
        for child in list(self._children.values()):
            try:
                child.ended(code, lost, int(short))
            except Exception:  # noqa: BLE001 - logged, and the other processes are still handled
                _log.exception("%s: the end of a process could not be handled", self)

    def _next(self) -> Message | None:
        """The agent's next message; None if the connection has ended."""
        self._listening_since = time.monotonic()
        line = b""
        # the pipe may be closed, or the line may not be a message
        with contextlib.suppress(OSError, ValueError):
            line = self._stream.readline()
            if isinstance(message := json.loads(line), dict):
                return message
        if line.endswith(b"\n"):  # an unfinished line was cut by the end of the connection
            self.hang_up(f"it sent {line[:80]!r}, which is not a message")
        return None

    def _take(self, message: Message) -> None:
        self._listening_since = None
        kind = message["kind"]
        if kind == "beat":
            return
        if kind == "ending":
            self.ending = True
            return
        if kind in ("reply", "failed"):
            self._replies.put(message)
        elif kind == "file":
            path = self._folder / "events" / Path(message["path"]).name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(base64.b64decode(message["data"]))
        elif (child := self._children.get(message["name"])) is None:
            return
        elif kind == "said":
            child.said(message["text"])
        elif kind == "log":
            child.logged(message["text"])
        elif kind == "ended":
            del self._children[message["name"]]
            child.ended(message["code"], None, message["oom_kills"])

    def _lost(self) -> str:
        return f"the connection to {self} ended: {self._stream.why_ended()}"

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            self.tell("beat")

    def _watch(self) -> None:
        """Hang up if the agent is silent: sshd keeps the connection of a stopped agent open.

        And see whether the engine takes the host back.
        """
        awake = Awake()
        while not self._closed.wait(_LOOK_S):
            awake_since = awake.since()
            if not self.ending and self._engine.takes_back(self._stream.written()):
                self.ending = True
            since = self._listening_since
            if since is None:
                continue
            if time.monotonic() - max(since, awake_since) > self._engine.silence_s:
                self.hang_up(f"no message for {self._engine.silence_s:g} s")
                return

    @property
    def gone(self) -> bool:
        """Whether the connection has ended."""
        return self._closed.is_set()

    def hang_up(self, why: str) -> None:
        """End the connection at once, from any thread; pending requests fail."""
        self._stream.hang_up(why)

    def close(self, grace_s: float) -> None:
        """End all processes on the host, and the connection."""
        self._stream.end(grace_s)
        if self._reader.is_alive():
            self._reader.join()
        self._stream.close()
