"""Where torch's ranks on several hosts find each other: `python -m trainwright.tasks.train.exchange.torch_store DESCRIPTOR`.

Serves torch's store on a socket that `hosts` has opened, on the one address that the hosts reach. A process of its own, because
the launcher loads no torch; it ends with the launcher.
"""

from __future__ import annotations

import signal
import socket
import sys

from torch._C._distributed_c10d import TCPStore  # noqa: TID253 - this is a process of its own


def main(descriptor: int) -> None:
    """Serve until killed."""
    listening = socket.socket(fileno=descriptor)
    address, port = listening.getsockname()[:2]
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    signal.pause()
    del store


if __name__ == "__main__":
    main(int(sys.argv[1]))
