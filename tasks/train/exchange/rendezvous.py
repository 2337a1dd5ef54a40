"""The rendezvous of a worker group's members. Loads no torch.

With torch, ranks meet through a file if all are on this machine, else through a torch store in a
separate process. With Horovod, they meet through its HTTP server. That server has no
authentication, so unlike horovodrun's it listens on one address only.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any, Literal

from trainwright.infra.process import dying_with_parent
from trainwright.tasks.train.worker_group import WorkerGroup

LOOPBACK = "127.0.0.1"
INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable with the network interface by which a rank reaches the others."""


class Rendezvous:
    """Opens a rendezvous for each worker group, on the loopback or at this machine's address."""

    def __init__(
        self,
        backend: Literal["horovod", "torch"],
        folder: Path,
        address: str = LOOPBACK,
        peers: Set[str] = frozenset(),
    ) -> None:
        """`peers`: the addresses of other hosts that may connect."""
        self._backend, self._folder, self._address, self._peers = backend, folder, address, peers
        self._server: Any = None
        self._store: subprocess.Popen[bytes] | None = None
        self._store_port, self._secret = 0, secrets.token_hex(16)

    def open(self, generation: int, machines: list[str]) -> str:
        """Close the last rendezvous and return one that no earlier group has used."""
        self._close_last()
        if self._backend == "horovod":
            self._server = horovod_server(self._address, machines, self._peers)
            return f"{self._address}:{self._server.server_address[1]}"
        return self._torch_store(f"{generation}")

    def open_transfers(self, generation: int) -> str:
        """A rendezvous for the messages between pairs of ranks; call it after `open`."""
        return self._torch_store(f"{generation}-transfers")

    def _torch_store(self, name: str) -> str:
        if self._address != LOOPBACK:
            if self._store is None:
                self._serve()
            return f"tcp://{self._address}:{self._store_port}/{self._secret}-{name}"
        place = self._folder / f"rendezvous-{name}"
        place.unlink(missing_ok=True)
        return str(place)

    def _serve(self) -> None:
        """Start the process with torch's store, because the launcher loads no torch."""
        with socket.create_server((self._address, 0)) as listening:
            listening.set_inheritable(True)
            command = [
                sys.executable,
                "-m",
                "trainwright.tasks.train.exchange.torch_store",
                str(listening.fileno()),
            ]
            with (self._folder / "logs" / "rendezvous.log").open("wb") as log:
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
        for place in self._folder.glob("rendezvous-*"):
            place.unlink(missing_ok=True)
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def close(self) -> None:
        """Close the last rendezvous, and end the store's process."""
        self._close_last()
        if self._store is not None:
            self._store.kill()
            self._store.wait()


def place_among(machines: Sequence[str], rank: int) -> dict[str, int]:
    """Horovod's local and cross ranks of a rank; `machines` names each rank's machine.

    The local rank counts the ranks of the same machine. The cross rank counts the machines that
    have a rank with this local rank.
    """
    by_machine: dict[str, list[int]] = {}
    for number, name in enumerate(machines):
        by_machine.setdefault(name, []).append(number)
    own = by_machine[machines[rank]]
    local_rank = own.index(rank)
    across = [name for name, ranks in by_machine.items() if len(ranks) > local_rank]
    return {
        "local_rank": local_rank,
        "local_size": len(own),
        "cross_rank": across.index(machines[rank]),
        "cross_size": len(across),
    }


def horovod_server(address: str, machines: Sequence[str], peers: Set[str] = frozenset()) -> Any:
    """Start a server for ranks on these machines; it accepts only this machine and `peers`."""
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    answered = {address, LOOPBACK, *peers}

    class Server(RendezvousHTTPServer):  # type: ignore[misc]  # Horovod has no types
        def verify_request(self, request: Any, client_address: Any) -> bool:
            return client_address[0] in answered

    server = Server((address, 0), RendezvousHandler, 0)
    size = len(machines)
    server.init(
        [
            SlotInfo(hostname=name, rank=rank, size=size, **place_among(machines, rank))
            for rank, name in enumerate(machines)
        ]
    )
    threading.Thread(
        target=server.serve_forever, args=(0.05,), name="rendezvous", daemon=True
    ).start()
    return server


def horovod_environment(group: WorkerGroup, number: int) -> dict[str, str]:
    """The environment variables that Horovod reads when a rank joins a group."""
    place, count = group.members.index(number), len(group.members)
    machines = group.machines or ["localhost"] * count
    address, _, port = group.rendezvous.rpartition(":")
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
        # For the rendezvous and for sums; the launcher notices a lost rank sooner.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "120",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1800",
        # No tensor fusion: it depends on timing, and changes the last digit of a sum.
        "HOROVOD_FUSION_THRESHOLD": "0",
    }
