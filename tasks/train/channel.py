"""Messages between a rank and its launcher: JSON, one object a line, over a socket pair.

    rank      loaded (a spare process waits for a device), ready (waits for a worker group), joined,
              heartbeat, progress, epoch, split, notice, saving, part, back, done, error, ask
    launcher  device, join (a worker group), leave (it after this step), abort (it now), release (a
              checkpoint is complete or abandoned), answer, exit

A rank asks about checkpoints (`checkpoint.coordinator`); it gets no answer if another run leases
the devices. A rank on another host also transfers files and rows
(`checkpoint.checkpoint_transfer`); `hosts.session` and `hosts.agent` carry the lines between the
machines. Several threads of a rank may send and ask.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import re
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

VARIABLE = "TRAINWRIGHT_CHANNEL"
HEARTBEAT_S = 0.5
STOP_SIGNAL = signal.SIGUSR1
"""Asks a rank to save a checkpoint after the current step, and to end."""
_LEAST_PAUSE_S = 0.25
Message = dict[str, Any]


def under_torchrun() -> bool:
    """Whether torchrun has started this process: then there is no launcher."""
    return "TORCHELASTIC_RUN_ID" in os.environ


class Channel(Protocol):
    """The rank's end: `RankChannel`, or `torchrun.TorchrunChannel`."""

    leave_asked: int
    """the generation of the worker group that this rank must leave after the current step"""
    abort_asked: int
    """the generation of the worker group that the launcher aborted"""
    writing: bool
    """whether the other ranks wait for this one because it waits for the store"""
    released: Callable[[int, int], None]
    """called when a checkpoint is complete or abandoned: its step, and the newest stored step"""

    @property
    def due(self) -> bool:
        """Whether `progress` would send a message now."""
        ...

    def attend(self, peers: PeerStatus, rank: RankStatus | None = None) -> None:
        """Let heartbeats report whether this rank waits for its peers, and how long it computes."""
        ...

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message."""
        ...

    def receive(self, *kinds: str) -> Message:
        """Wait for the next message of one of these kinds, and drop others."""
        ...

    def ask(self, about: str, **fields: Any) -> Message:
        """Send a question to the launcher, and wait for the answer."""
        ...

    def progress(self, kind: str, **fields: Any) -> None:
        """Send a message unless the last one is too recent."""
        ...


@contextlib.contextmanager
def busy_with_store(channel: Channel) -> Iterator[None]:
    """Inside the block this rank reads or writes the store, so the others may wait longer."""
    channel.writing = True
    try:
        yield
    finally:
        channel.writing = False


class PeerStatus(Protocol):
    """The peers, as a heartbeat needs them."""

    waiting_since: float | None
    waited_until: float

    def break_off(self) -> None:
        """Make the sums that wait for others fail."""
        ...


class RankStatus(Protocol):
    """The rank, as a heartbeat needs it."""

    computing_since: float | None

    def used(self) -> dict[str, float]:
        """Like `usage_of_this_process`, with the memory of its device."""
        ...


class RankChannel:
    """The rank's end. A thread receives messages, and sends a heartbeat twice a second."""

    def __init__(self, peers: PeerStatus | None = None) -> None:
        # Removed from the environment, so that processes that the rank starts don't use it.
        self._socket = socket.socket(fileno=int(os.environ.pop(VARIABLE)))
        self._socket.set_inheritable(False)
        self._last = 0.0
        self._peers = peers
        self._rank: RankStatus | None = None
        self._sending = threading.Lock()
        self._questions = itertools.count()
        self._answers: dict[int, queue.SimpleQueue[Message]] = {}
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.leave_asked = self.abort_asked = -1
        self.writing = False
        self.released: Callable[[int, int], None] = lambda step, stored: None
        threading.Thread(target=self._listen, name="channel", daemon=True).start()

    def attend(self, peers: PeerStatus, rank: RankStatus | None = None) -> None:
        self._peers, self._rank = peers, rank

    def _listen(self) -> None:
        partial, heartbeat_at = b"", time.monotonic()
        while True:
            now = time.monotonic()
            if now >= heartbeat_at:
                self._send_heartbeat()
                heartbeat_at = now + HEARTBEAT_S
            if not select.select([self._socket], [], [], max(0.0, heartbeat_at - now))[0]:
                continue
            try:
                chunk = self._socket.recv(1 << 16)
            except OSError:
                chunk = b""
            if not chunk:
                os._exit(1)  # no rank outlives its launcher
            *whole, partial = (partial + chunk).split(b"\n")
            for line in whole:
                self._take(json.loads(line))

    def _take(self, message: Message) -> None:
        if message["kind"] == "leave":
            self.leave_asked = message["generation"]
        elif message["kind"] == "release":
            self.released(message["step"], message["stored"])
        elif message["kind"] == "answer":
            self._answers.pop(message.pop("number")).put(message)
        elif message["kind"] == "abort":
            self.abort_asked = message["generation"]
            if self._peers is not None:
                self._peers.break_off()
        else:
            self._inbox.put(message)

    def _send_heartbeat(self) -> None:
        try:
            used = usage_of_this_process() if self._rank is None else self._rank.used()
            self.send("heartbeat", **self._occupation(), writing=self.writing, **used)
        except OSError:
            os._exit(1)

    def _occupation(self) -> dict[str, float | None]:
        """How long it has waited for other ranks, or computed since it last waited."""
        now = time.monotonic()
        waits = self._peers.waiting_since if self._peers is not None else None
        begun = self._rank.computing_since if self._rank is not None else None
        if waits is not None or begun is None or self._peers is None:
            return {"waits_s": waits and now - waits, "computes_s": None}
        return {"waits_s": None, "computes_s": now - max(begun, self._peers.waited_until)}

    def send(self, kind: str, **fields: Any) -> None:
        line = (json.dumps({"kind": kind, **fields}) + "\n").encode()
        with self._sending:
            self._socket.sendall(line)

    def receive(self, *kinds: str) -> Message:
        while True:
            message = self._inbox.get()
            if message["kind"] in kinds:
                return message

    def ask(self, about: str, **fields: Any) -> Message:
        number, answer = next(self._questions), queue.SimpleQueue[Message]()
        self._answers[number] = answer
        self.send("ask", about=about, number=number, **fields)
        return answer.get()

    @property
    def due(self) -> bool:
        return time.monotonic() - self._last > _LEAST_PAUSE_S

    def progress(self, kind: str, **fields: Any) -> None:
        if self.due:
            self._last = time.monotonic()
            self.send(kind, **fields)


def usage_of_this_process() -> dict[str, float]:
    """The process's peak memory, and its CPU time.

    The peak is not `ru_maxrss`, which starts at the memory of the process that started this one.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"peak_memory_bytes": _peak_bytes(), "cpu_s": usage.ru_utime + usage.ru_stime}


def _peak_bytes() -> float:
    status = Path("/proc/self/status").read_text()
    kib = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    assert kib is not None, "the kernel does not state VmHWM"
    return int(kib[1]) * 1024.0


class LauncherChannel:
    """The launcher's end."""

    def __init__(self) -> None:
        self.socket, self.other_end = socket.socketpair()
        self.closed = False
        self._partial = b""
        self._sending = threading.Lock()

    def read(self) -> list[Message]:
        """The messages that have arrived; sets `closed` if the rank has closed its end."""
        try:
            chunk = self.socket.recv(1 << 16)
        except ConnectionResetError:
            chunk = b""
        self.closed = not chunk
        *whole, self._partial = (self._partial + chunk).split(b"\n")
        return [json.loads(line) for line in whole]

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message, from any thread. `read` notices if the rank is gone."""
        line = (json.dumps({"kind": kind, **fields}) + "\n").encode()
        with self._sending, contextlib.suppress(OSError):
            self.socket.sendall(line)

    def close(self) -> None:
        """Close both ends."""
        self.socket.close()
        self.other_end.close()
