"""Hosts that wait for a login: the engine is ssh, which has no queue."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from trainwright.tasks.errors import ServiceUnreachable
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.host_spec import Ssh
from trainwright.tasks.ssh import ssh_command, unreachable, why_ended
from trainwright.tasks.train.hosts.host_engine import HostRequest, HostStanding


class SshEngine:
    """An `HostEngine` that logs in to the hosts."""

    silence_s = 60.0
    """ssh itself ends a connection over which nothing arrives after 15 s"""

    def __init__(self, login: Ssh, settings: Settings) -> None:
        self._login, self._settings = login, settings
        self.variables: dict[str, str] = {}

    def command(self, asked: HostRequest, words: Sequence[str]) -> list[str]:
        """As `HostEngine`: an ssh process."""
        return [*ssh_command(asked.host.address, self._settings, self._login), shlex.join(words)]

    def standing(self, asked: HostRequest) -> HostStanding:
        """As `HostEngine`: always granted."""
        return HostStanding("granted")

    def why_ended(self, stderr: str, code: int | None) -> str:
        """As `HostEngine`."""
        return why_ended(stderr, code)

    def takes_back(self, stderr: str) -> bool:
        """As `HostEngine`: never."""
        return False

    def out_of_memory(self, why: str) -> bool:
        """As `HostEngine`: never, because the kernel of a host ends single processes."""
        return False

    def error(self, asked: HostRequest, why: str) -> ServiceUnreachable:
        """As `HostEngine`, with the ssh command that must work."""
        host = asked.host
        return unreachable(host.address, why, self._settings, host.name, self._login, asked.python)

    def close(self) -> None:
        """As `HostEngine`: ssh leaves nothing behind."""
