"""Serves the torch store through which ranks on several hosts find each other.

Run as `python -m trainwright.tasks.train.exchange.torch_store DESCRIPTOR`, with the descriptor of a
listening socket that `rendezvous` opened. A separate process, because the launcher loads no torch.
It ends with the launcher.
"""

from __future__ import annotations

import signal
import socket
import sys

from torch._C._distributed_c10d import TCPStore  # noqa: TID253 - a separate process


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
