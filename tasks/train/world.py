"""A world: the ranks that sum together for a while, and where they meet. Loads no torch.

Neither library mends a group that has lost a member, and Horovod's own elastic mode has one time-out for noticing a loss and for
meeting anew: short enough for the one, it kills the job in the other. So a world is short-lived. It ends when a member dies or a
device comes back, and its processes, which outlive it, meet in the next one.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

LOOPBACK = "127.0.0.1"


class World(BaseModel):
    """What the launcher tells each member of a world."""

    model_config = ConfigDict(frozen=True)
    generation: int
    members: list[int] = Field(
        description="numbers of the plan's devices; their order is that of the collectives' ranks"
    )
    meeting: str = Field(description="torch: a file; Horovod: the port of its rendezvous server")
    committed: int = Field(default=0, description="steps that the newest checkpoint holds")
    checkpoint: str | None = Field(default=None, description="local folder to go on from where no member has a state")
    limits: dict[int, int] = Field(default_factory=dict, description="largest batch of a device that ran out of memory")
    broken: bool = Field(default=False, description="whether the world before ended by a loss")
    reason: str = Field(default="", description="why the members are these")
    end: bool = Field(default=False, description="write a checkpoint and end")


class Meeting:
    """Where the members of one world after another find each other."""

    def __init__(self, backend: Literal["horovod", "torch"], folder: Path) -> None:
        self._backend, self._folder = backend, folder
        self._server: Any = None

    def open(self, generation: int, count: int) -> str:
        """A place that no earlier world has used. The one before closes."""
        self.close()
        if self._backend == "torch":
            place = self._folder / f"meeting-{generation}"
            place.unlink(missing_ok=True)
            return str(place)
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        # horovodrun's own server listens on every address; this one on loopback only.
        self._server = RendezvousHTTPServer((LOOPBACK, 0), RendezvousHandler, 0)
        self._server.init(get_host_assignments(parse_hosts(f"localhost:{count}"), count))
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="rendezvous", daemon=True).start()
        return str(self._server.server_address[1])

    def close(self) -> None:
        """Nobody meets here any more."""
        for place in self._folder.glob("meeting-*"):
            place.unlink(missing_ok=True)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def horovod_environment(place: int, count: int, port: str) -> dict[str, str]:
    """What Horovod reads when a rank joins a world."""
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": LOOPBACK, "HOROVOD_GLOO_RENDEZVOUS_PORT": port, "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo", "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_RANK": str(place), "HOROVOD_SIZE": str(count), "HOROVOD_LOCAL_RANK": str(place),
        "HOROVOD_LOCAL_SIZE": str(count), "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1",
        # The launcher notices who dies or hangs; this one time-out is for meeting and for summing.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "120", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1800",
        # What is fused depends on timing, and with it the order, and so the last digit, of a sum.
        "HOROVOD_FUSION_THRESHOLD": "0",
    }  # fmt: skip
