"""A rank on another host: the launcher's stand-ins for its channel, process and CPU share."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from pathlib import Path
from typing import Any

from trainwright.tasks.train.channel import LauncherChannel
from trainwright.tasks.train.checkpoint.checkpoint_transfer import (
    GIVE,
    JOURNAL,
    TAKE,
    TransferServer,
)
from trainwright.tasks.train.checkpoint.staged import part_name
from trainwright.tasks.train.hosts.session import Session

KILL_GRACE_S = 10.0
"""If a host needs longer than this to end a rank, its connection is closed."""


class RemoteShare:
    """A rank's CPU share on its host. Same interface as `cpu_share.CpuShare`."""

    def __init__(self, session: Session, name: str, cores: float | None) -> None:
        self._session, self._name = session, name
        reply = session.ask("share", name=name, cores=cores)
        self.how: str = reply["how"]
        self.group: str | None = reply["group"]

    def hold(self, pid: int) -> None:
        """Limit the rank to the share. Ignores the pid, which is not one of this machine."""
        self._session.tell("hold", name=self._name)

    def let_go(self) -> None:
        """Does nothing: the agent releases the share when the process has ended."""

    def remove(self) -> None:
        """Does nothing: the agent removes the share when it ends."""


class LaterShare:
    """The share of a rank whose host is still queued: none, until the host joins."""

    how, group = "set when its host joins", None

    def hold(self, pid: int) -> None:
        """Does nothing: no process is there."""

    def let_go(self) -> None:
        """Does nothing."""

    def remove(self) -> None:
        """Does nothing."""


class RemoteChannel(LauncherChannel):
    """The launcher's end of the channel to a rank on another host."""

    def __init__(self, session: Session, name: str) -> None:
        super().__init__()
        self._session, self._name = session, name

    def send(self, kind: str, **fields: Any) -> None:
        self._session.tell("say", name=self._name, text=json.dumps({"kind": kind, **fields}) + "\n")


class RemoteRank:
    """A rank on another host, used like a Popen. Its log goes to a file on this machine."""

    def __init__(
        self,
        session: Session,
        name: str,
        channel: RemoteChannel,
        server: TransferServer,
        log: Path,
    ) -> None:
        self._session, self._name, self._channel, self._server = session, name, channel, server
        self._log, self._code, self._ended = log, 255, threading.Event()
        log.touch()
        self.pid = 0
        """Not a process of this machine."""
        self.lost: str | None = None
        """if the host is gone, the reason"""
        self.oom_kills = 0
        """how many processes the host's kernel has killed for lack of memory since it started"""

    def send_signal(self, number: int) -> None:
        """Like Popen's."""
        self._session.tell("signal", name=self._name, number=int(number))

    def kill(self) -> None:
        """End the rank and its children; close the connection if the host does not end them."""

        def make_sure() -> None:
            if not self._ended.wait(KILL_GRACE_S):
                self._session.hang_up(f"it did not end a rank within {KILL_GRACE_S:g} s")

        threading.Thread(target=make_sure, name=f"kill-{self._name}", daemon=True).start()
        self._session.tell("kill", name=self._name)  # may block if the host is stopped

    def wait(self, timeout: float | None = None) -> int:
        """Like Popen's."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(self._name, timeout or 0.0)
        return self._code

    def said(self, line: str) -> None:
        """Handle a message: file transfers and journal rows here, all else in the launcher."""
        message = json.loads(line)
        kind = message.pop("kind")
        if kind == JOURNAL:
            self._server.note(**message)
        elif kind == "ask" and message["about"] in (GIVE, TAKE):
            number = message.pop("number")
            self._channel.send("answer", number=number, **self._server.answer(message))
        elif kind == "part":
            part = part_name(message["generation"], message["step"])
            message["paths"] = self._server.paths(part)
            self._pass_on(json.dumps({"kind": kind, **message}))
        else:
            self._pass_on(line)

    def _pass_on(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the launch has ended
            self._channel.other_end.sendall(line.encode() + b"\n")

    def logged(self, line: str) -> None:
        """Append a line to the log file."""
        with self._log.open("a") as file:
            file.write(line + "\n")

    def ended(self, code: int, lost: str | None, oom_kills: int = 0) -> None:
        """Record that the rank ended, or that its host was lost."""
        self._code, self.lost, self.oom_kills = code, lost, oom_kills
        try:
            if lost is not None:
                self.logged(lost)
        finally:  # also if the disk is full, or `wait` would block for ever
            self._ended.set()
            self._channel.other_end.close()
