"""Where Horovod's ranks find each other: its own server, on one address, for the machines of the launch. Loads no torch.

The server knows no secret; horovodrun's own listens on every address and answers everybody.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence, Set
from typing import Any


def place_among(machines: Sequence[str], rank: int) -> dict[str, int]:
    """Where a rank is, by each rank's machine.

    Its number and their count on its machine; the machine's number, and the count of those, among the machines with such a rank.
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


def rendezvous(address: str, machines: Sequence[str], peers: Set[str] = frozenset()) -> Any:
    """A server on this address for ranks on these machines; it answers this machine, and the addresses in `peers`."""
    from horovod.runner.common.util.hosts import SlotInfo
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    answered = {address, "127.0.0.1", *peers}

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
