"""What a rank and its launcher say to each other: JSON, one object a line, over a pair of sockets.

A rank says progress, epoch, split, notice, part, checkpoint, done, error. It asks before it begins (`ready`), before it writes
to the store (`write`) and what the others have written (`parts`, `stored`); the answer is a line too, and does not come where
the devices are no longer ours. Several threads of a rank may speak.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from typing import Any

from trainwright.tasks.errors import TrainingFailed

VARIABLE = "TRAINWRIGHT_CHANNEL"
_LEAST_PAUSE_S = 0.25


class RankChannel:
    """The rank's end."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=int(os.environ.pop(VARIABLE)))
        self._socket.set_inheritable(False)
        self._answers = self._socket.makefile("rb")
        self._speaking, self._asking = threading.Lock(), threading.Lock()
        self._last = 0.0

    def send(self, kind: str, **fields: Any) -> None:
        """Say something."""
        line = (json.dumps({"kind": kind, **fields}) + "\n").encode()
        with self._speaking:
            self._socket.sendall(line)

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Ask whether to go on; the answer. Raises TrainingFailed where the launcher does not say so."""
        with self._asking:
            self.send("ask", about=kind, **fields)
            line = self._answers.readline()
        if not line:
            raise TrainingFailed("the launcher is gone")
        return dict(json.loads(line))

    def progress(self, kind: str, **fields: Any) -> None:
        """Say how far we are, a few times a second at most."""
        if time.monotonic() - self._last > _LEAST_PAUSE_S:
            self._last = time.monotonic()
            self.send(kind, **fields)


class LauncherChannel:
    """The launcher's end."""

    def __init__(self) -> None:
        self.socket, self.other_end = socket.socketpair()
        self.closed = False
        self._partial = b""

    def read(self) -> list[dict[str, Any]]:
        """The messages that have arrived; sets `closed` where the rank has gone."""
        try:
            chunk = self.socket.recv(1 << 16)
        except ConnectionResetError:
            chunk = b""
        self.closed = not chunk
        *whole, self._partial = (self._partial + chunk).split(b"\n")
        return [json.loads(line) for line in whole]

    def go_on(self, **answer: Any) -> None:
        """Answer a question. A rank that has gone meanwhile is noticed when its end closes."""
        try:
            self.socket.sendall((json.dumps(answer) + "\n").encode())
        except (BrokenPipeError, ConnectionResetError):
            return

    def close(self) -> None:
        """Close both ends."""
        self.socket.close()
        self.other_end.close()
