"""Where a rank is reached; and sees to it that its host name stands for the address that the other hosts reach.

Horovod 0.28.1 takes the interface that it is told for its first connections only; for the others (`InitializeForProcessSet` in
its gloo_context.cc) it looks up the name of the host, which on many machines stands for a loopback address.
"""

from __future__ import annotations

import ctypes
import os
import socket

from trainwright.tasks.errors import BadInput
from trainwright.tasks.train.exchange.rendezvous import INTERFACE

ADDRESS = "TRAINWRIGHT_ADDRESS"
"""The variable that holds the rank's address, where there are several hosts."""
_CLONE_NEWUTS = 0x04000000


def own_address() -> str:
    """Where the other ranks reach this one: as it was told; under torchrun, by the interface that is named or its own name."""
    if ADDRESS in os.environ:
        return os.environ[ADDRESS]
    if interface := os.environ.get(INTERFACE, "").partition(",")[0]:
        import psutil

        found = {one.family: one.address for one in psutil.net_if_addrs().get(interface, [])[::-1]}
        for family in (socket.AF_INET, socket.AF_INET6):
            if family in found:
                return found[family]
        raise OSError(f"{INTERFACE}: no interface {interface!r} with an address here")
    alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get(
        "WORLD_SIZE"
    )  # both are torchrun's
    return "127.0.0.1" if alone else socket.gethostbyname(socket.gethostname())


def stand_for_address() -> None:
    """Where the name stands for another address, call this thread's machine by its address; only root may.

    Only this thread, and those it starts from now on, see that name. Raises BadInput where it is not allowed.
    """
    address = os.environ.get(ADDRESS)
    if address is None or _addresses(socket.gethostname()) == {address}:
        return
    name, found = (
        socket.gethostname(),
        ", ".join(sorted(_addresses(socket.gethostname()))) or "nothing",
    )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUTS) != 0 or libc.sethostname(address.encode(), len(address)) != 0:
        raise BadInput(
            f"train.backend: Horovod looks up the name of host {name}, which stands there for {found}; allowed: {address} (in "
            "its /etc/hosts), or train.backend: torch"
        )


def _addresses(name: str) -> set[str]:
    try:
        return {
            str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        }
    except OSError:
        return set()
