"""What a rank and its launcher say to each other: JSON, one object a line, over a pair of sockets.

A rank says ready, progress, epoch, split, checkpoint, done, error. Two of these are questions: after `ready` and before each
checkpoint it waits for a word, which does not come where the devices are no longer ours.
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

from trainwright.tasks.errors import TrainingFailed

VARIABLE = "TRAINWRIGHT_CHANNEL"
GO_ON = b"go on\n"
_LEAST_PAUSE_S = 0.25


class RankChannel:
    """The rank's end."""

    def __init__(self) -> None:
        self._socket = socket.socket(fileno=int(os.environ.pop(VARIABLE)))
        self._socket.set_inheritable(False)
        self._last = 0.0

    def send(self, kind: str, **fields: Any) -> None:
        """Say something."""
        self._socket.sendall((json.dumps({"kind": kind, **fields}) + "\n").encode())

    def ask(self, kind: str) -> None:
        """Ask whether to go on. Raises TrainingFailed where the launcher does not say so."""
        self.send("ask", about=kind)
        if self._socket.recv(len(GO_ON), socket.MSG_WAITALL) != GO_ON:
            raise TrainingFailed("the launcher is gone")

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

    def go_on(self) -> None:
        """Answer a question. A rank that has gone meanwhile is noticed when its end closes."""
        try:
            self.socket.sendall(GO_ON)
        except (BrokenPipeError, ConnectionResetError):
            return

    def close(self) -> None:
        """Close both ends."""
        self.socket.close()
        self.other_end.close()
