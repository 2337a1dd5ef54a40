"""What runs processes on other hosts: the protocol of an engine, and what a launch asks of it.

An engine's command is a process of this machine whose standard input and output are those of a
process on the host; when the command ends, so does that process. `ssh_engine` implements it for
hosts that wait for a login, `slurm_engine` and `kubernetes_engine` for those that a queue gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from trainwright.tasks.errors import TrainwrightError
from trainwright.tasks.runs.artefacts.plan import PlannedDevice
from trainwright.tasks.spec.container_spec import Container
from trainwright.tasks.spec.host_spec import Host


@dataclass(frozen=True)
class HostRequest:
    """A host of the pool, and the devices there that a launch uses."""

    host: Host
    devices: tuple[PlannedDevice, ...]
    python: str
    """path of Python on the host, or in its container"""
    container: Container | None = None
    """in which its processes run"""

    def __str__(self) -> str:
        name, address = self.host.name, self.host.address
        return f"host {name}" if address == name else f"host {name} ({address})"


@dataclass(frozen=True)
class HostStanding:
    """Where a request stands; `why` says for people what it waits for, or why it is refused."""

    status: Literal["queued", "granted", "refused"]
    why: str = ""
    expected: str = ""
    """when the engine expects to grant it, as it says so"""


class HostEngine(Protocol):
    """Runs processes on a pool's hosts, for one launch."""

    @property
    def silence_s(self) -> float:
        """How long the agent may be silent before its host counts as lost."""
        ...

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of its commands, beside this process's own."""
        ...

    def command(self, asked: HostRequest, words: Sequence[str]) -> list[str]:
        """The process of this machine that runs `words` on the host. Raises BadInput."""
        ...

    def standing(self, asked: HostRequest) -> HostStanding:
        """Whether the host is granted to the command that has been started, or still queued."""
        ...

    def why_ended(self, stderr: str, code: int | None) -> str:
        """Why the command ended, in one line."""
        ...

    def takes_back(self, stderr: str) -> bool:
        """Whether the host is about to be taken back, by what the command has written so far."""
        ...

    def out_of_memory(self, why: str) -> bool:
        """Whether the command ended, as `why_ended` says, because the host's memory was full."""
        ...

    def error(self, asked: HostRequest, why: str) -> TrainwrightError:
        """The error for a host that can't be used, with what must be mended."""
        ...

    def close(self) -> None:
        """Give back what the engine has granted or queued; all commands have ended."""
        ...
