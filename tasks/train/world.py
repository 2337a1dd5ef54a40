"""A world: the ranks that sum together for a while, and where they meet. Loads no torch.

Neither library mends a group that has lost a member, and Horovod's own elastic mode has one time-out for noticing a loss and for
meeting anew: short enough for the one, it kills the job in the other. So a world is short-lived. It ends when a member dies or a
device comes back, and its processes, which outlive it, meet in the next one.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainwright.infra.process import dying_with_parent
from trainwright.tasks.train.exchange.rendezvous import place_among, rendezvous

LOOPBACK = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable that names the network interface by which a rank reaches the others."""


class World(BaseModel):
    """What the launcher tells each member of a world."""

    model_config = ConfigDict(frozen=True)
    generation: int
    members: list[int] = Field(
        description="numbers of the plan's devices; their order is that of the collectives' ranks"
    )
    machines: list[str] = Field(
        default_factory=list, description="of the members, by any name; empty: all on one"
    )
    meeting: str = Field(
        description="torch: a file, a store's tcp://address:port/prefix, or env://; Horovod: its server's address:port"
    )
    committed: int = Field(default=0, description="steps that the newest checkpoint holds")
    checkpoint: str | None = Field(
        default=None, description="local folder to go on from where no member has a state"
    )
    limits: dict[int, int] = Field(
        default_factory=dict, description="largest batch of a device that ran out of memory"
    )
    broken: bool = Field(default=False, description="whether the world before ended by a loss")
    reason: str = Field(default="", description="why the members are these")
    end: bool = Field(default=False, description="write a checkpoint and end")


class Meeting:
    """Where the members of one world after another find each other: on this machine, or at its address that hosts reach."""

    def __init__(
        self,
        backend: Literal["horovod", "torch"],
        folder: Path,
        address: str = LOOPBACK,
        peers: Set[str] = frozenset(),
    ) -> None:
        """`peers`: the addresses of other hosts that may ask."""
        self._backend, self._folder, self._address, self._peers = backend, folder, address, peers
        self._server: Any = None
        self._store: subprocess.Popen[bytes] | None = None
        self._store_port, self._secret = 0, secrets.token_hex(16)

    def open(self, generation: int, machines: list[str]) -> str:
        """A place that no earlier world has used, for members on these machines. The one before closes."""
        self._close_last()
        if self._backend == "horovod":
            self._server = rendezvous(self._address, machines, self._peers)
            return f"{self._address}:{self._server.server_address[1]}"
        if self._address != LOOPBACK:
            if self._store is None:
                self._serve()
            return f"tcp://{self._address}:{self._store_port}/{self._secret}-{generation}"
        place = self._folder / f"meeting-{generation}"
        place.unlink(missing_ok=True)
        return str(place)

    def _serve(self) -> None:
        """Start the process that holds torch's store: the launcher loads no torch."""
        with socket.create_server((self._address, 0)) as listening:
            listening.set_inheritable(True)
            command = [
                sys.executable,
                "-m",
                "trainwright.tasks.train.exchange.torch_store",
                str(listening.fileno()),
            ]
            with (self._folder / "logs" / "meeting.log").open("wb") as log:
                self._store = subprocess.Popen(
                    dying_with_parent(command),
                    pass_fds=[listening.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            self._store_port = listening.getsockname()[1]

    def _close_last(self) -> None:
        for place in self._folder.glob("meeting-*"):
            place.unlink(missing_ok=True)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def close(self) -> None:
        """Nobody meets here any more."""
        self._close_last()
        if self._store is not None:
            self._store.kill()
            self._store.wait()


def horovod_environment(world: World, number: int) -> dict[str, str]:
    """What Horovod reads when a rank joins a world."""
    place, count = world.members.index(number), len(world.members)
    machines = world.machines or ["localhost"] * count
    address, _, port = world.meeting.rpartition(":")
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": os.environ[INTERFACE],
        "HOROVOD_HOSTNAME": machines[place],
        "HOROVOD_RANK": str(place),
        "HOROVOD_SIZE": str(count),
        **{
            f"HOROVOD_{name.upper()}": str(value)
            for name, value in place_among(machines, place).items()
        },
        # The launcher notices who dies or hangs; this one time-out is for meeting and for summing.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "120",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1800",
        # What is fused depends on timing, and with it the order, and so the last digit, of a sum.
        "HOROVOD_FUSION_THRESHOLD": "0",
    }
