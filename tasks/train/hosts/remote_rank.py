"""A rank on a host, as the launcher holds it: its channel, its process and its share of the CPU stand in for local ones."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from pathlib import Path
from typing import Any

from trainwright.tasks.train.channel import LauncherChannel
from trainwright.tasks.train.checkpoint.staged import part_name
from trainwright.tasks.train.hosts.checkpoint_transfer import (
    GIVE,
    JOURNAL,
    TAKE,
    TransferServer,
)
from trainwright.tasks.train.hosts.session import Session

KILL_GRACE_S = 10.0
"""A host that has not ended a rank by then is no longer worked with."""


class RemoteShare:
    """A rank's share of the CPU of its host; as `cpu_share.CpuShare`."""

    def __init__(self, session: Session, name: str, cores: float | None) -> None:
        self._session, self._name = session, name
        reply = session.ask("share", name=name, cores=cores)
        self.how: str = reply["how"]
        self.group: str | None = reply["group"]

    def hold(self, pid: int) -> None:
        """Hold it from now on; its number on this machine does not matter."""
        self._session.tell("hold", name=self._name)

    def let_go(self) -> None:
        """The node does, when the process has ended."""

    def remove(self) -> None:
        """The node does, when it ends."""


class RemoteChannel(LauncherChannel):
    """The launcher's end of a channel whose other end is on a host."""

    def __init__(self, session: Session, name: str) -> None:
        super().__init__()
        self._session, self._name = session, name

    def send(self, kind: str, **fields: Any) -> None:
        self._session.tell("say", name=self._name, text=json.dumps({"kind": kind, **fields}) + "\n")


class RemoteRank:
    """A rank on a host; used as a Popen. What it logs goes to a file here."""

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
        """None on this machine."""
        self.lost: str | None = None
        """why nothing more is known of it, where its host is gone"""
        self.oom_kills = 0
        """how many processes the kernel there has killed for want of memory meanwhile"""

    def send_signal(self, number: int) -> None:
        """As Popen's."""
        self._session.tell("signal", name=self._name, number=int(number))

    def kill(self) -> None:
        """End it, with what it has started; the connection too, where the host does not."""

        def make_sure() -> None:
            if not self._ended.wait(KILL_GRACE_S):
                self._session.hang_up(f"it did not end a rank in {KILL_GRACE_S:g} s")

        threading.Thread(target=make_sure, name=f"kill-{self._name}", daemon=True).start()
        self._session.tell("kill", name=self._name)  # takes as long as the host lets it

    def wait(self, timeout: float | None = None) -> int:
        """As Popen's."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(self._name, timeout or 0.0)
        return self._code

    def said(self, line: str) -> None:
        """From the host: for the transfer of files and rows, or for the launcher."""
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
        with contextlib.suppress(OSError):  # the launch is over
            self._channel.other_end.sendall(line.encode() + b"\n")

    def logged(self, line: str) -> None:
        """From the host."""
        with self._log.open("a") as file:
            file.write(line + "\n")

    def ended(self, code: int, lost: str | None, oom_kills: int = 0) -> None:
        """From the host, or because it is lost."""
        self._code, self.lost, self.oom_kills = code, lost, oom_kills
        try:
            if lost is not None:
                self.logged(lost)
        finally:  # a full disk makes nobody wait
            self._ended.set()
            self._channel.other_end.close()
