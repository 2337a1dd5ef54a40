"""What a rank and its launcher say to each other: JSON, one object a line, over a pair of sockets.

A rank says spare or free (it waits to be given a device, or a worker group), joined, alive,
progress, epoch, split, notice, saving, part, checkpoint, back, done, error. It asks before it
writes to the store (`write`) and what the others have written (`parts`, `stored`); the answer does
not come where the devices are no longer ours. A rank on another host also asks the launcher to read
and write for it (`launcher_store`); `session` and `node` carry the lines between the machines. The
launcher says device, join (a worker group), leave (at the end of the step), abort (now), answer,
exit. Several threads of a rank may speak and ask.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

VARIABLE = "TRAINWRIGHT_CHANNEL"
ALIVE_EVERY_S = 0.5
_LEAST_PAUSE_S = 0.25
Message = dict[str, Any]


class Channel(Protocol):
    """What a rank says and hears: `RankChannel`, or under torchrun `torchrun.AloneChannel`."""

    leave_asked: int
    """the generation of the worker group that the launcher asked this rank to leave after a step"""
    abort_asked: int
    """the generation of the worker group that the launcher aborted"""
    writing: bool
    """whether this rank keeps the others waiting because it writes a checkpoint"""

    @property
    def due(self) -> bool:
        """Whether `progress` would say something now."""
        ...

    def attend(self, peers: Waits, rank: Computes | None = None) -> None:
        """From now on, tell whether this rank waits for these, and how long it has been at its part of a step."""
        ...

    def send(self, kind: str, **fields: Any) -> None:
        """Say something."""
        ...

    def receive(self, *kinds: str) -> Message:
        """The next word of one of these kinds; others are passed over."""
        ...

    def ask(self, about: str, **fields: Any) -> Message:
        """Ask the launcher; its answer, which does not come where the devices are no longer ours."""
        ...

    def progress(self, kind: str, **fields: Any) -> None:
        """Say how far we are, a few times a second at most."""
        ...


@contextlib.contextmanager
def busy_with_store(channel: Channel) -> Iterator[None]:
    """Within the block this rank reads or writes the store while the others wait: it does not count as hung for that."""
    channel.writing = True
    try:
        yield
    finally:
        channel.writing = False


class Waits(Protocol):
    """What the channel's thread needs to know of the rank's peers."""

    waiting_since: float | None
    waited_until: float

    def break_off(self) -> None:
        """Make what waits for the others fail."""
        ...


class Computes(Protocol):
    """What it needs to know of the rank."""

    computing_since: float | None

    def used(self) -> dict[str, float]:
        """As `usage_of_this_process`, with the memory of its device."""
        ...


class RankChannel:
    """The rank's end. Its thread listens, and says twice a second that the rank lives, and whether it waits or computes."""

    def __init__(self, peers: Waits | None = None) -> None:
        self._socket = socket.socket(fileno=int(os.environ.pop(VARIABLE)))
        self._socket.set_inheritable(False)
        self._last = 0.0
        self._peers = peers
        self._rank: Computes | None = None
        self._sending = threading.Lock()
        self._questions = itertools.count()
        self._answers: dict[int, queue.SimpleQueue[Message]] = {}
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.leave_asked = self.abort_asked = -1
        self.writing = False
        threading.Thread(target=self._listen, name="channel", daemon=True).start()

    def attend(self, peers: Waits, rank: Computes | None = None) -> None:
        self._peers, self._rank = peers, rank

    def _listen(self) -> None:
        partial = b""
        while True:
            if not select.select([self._socket], [], [], ALIVE_EVERY_S)[0]:
                self._say_alive()
                continue
            try:
                chunk = self._socket.recv(1 << 16)
            except OSError:
                chunk = b""
            if not chunk:
                os._exit(1)  # no rank outlives its launcher
            *whole, partial = (partial + chunk).split(b"\n")
            for line in whole:
                message = json.loads(line)
                if message["kind"] == "leave":
                    self.leave_asked = message["generation"]
                elif message["kind"] == "answer":
                    self._answers.pop(message.pop("number")).put(message)
                elif message["kind"] == "abort":
                    self.abort_asked = message["generation"]
                    if self._peers is not None:
                        self._peers.break_off()
                else:
                    self._inbox.put(message)

    def _say_alive(self) -> None:
        try:
            used = usage_of_this_process() if self._rank is None else self._rank.used()
            self.send("alive", **self._occupation(), writing=self.writing, **used)
        except OSError:
            os._exit(1)

    def _occupation(self) -> dict[str, float | None]:
        """How long it has waited for others, or computed since it waited last."""
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
    """Its largest memory so far and the CPU time it took."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"peak_memory_bytes": usage.ru_maxrss * 1024.0, "cpu_s": usage.ru_utime + usage.ru_stime}


class LauncherChannel:
    """The launcher's end."""

    def __init__(self) -> None:
        self.socket, self.other_end = socket.socketpair()
        self.closed = False
        self._partial = b""

    def read(self) -> list[Message]:
        """The messages that have arrived; sets `closed` where the rank has gone."""
        try:
            chunk = self.socket.recv(1 << 16)
        except ConnectionResetError:
            chunk = b""
        self.closed = not chunk
        *whole, self._partial = (self._partial + chunk).split(b"\n")
        return [json.loads(line) for line in whole]

    def send(self, kind: str, **fields: Any) -> None:
        """Say something. A rank that has gone meanwhile is noticed when its end closes."""
        try:
            self.socket.sendall((json.dumps({"kind": kind, **fields}) + "\n").encode())
        except (BrokenPipeError, ConnectionResetError):
            return

    def close(self) -> None:
        """Close both ends."""
        self.socket.close()
        self.other_end.close()
