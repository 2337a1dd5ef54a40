"""Finds a rank's own address, and makes its host name resolve to that address for Horovod.

Horovod 0.28.1 uses the configured network interface for its first connections only. For the others
(`InitializeForProcessSet` in its gloo_context.cc), it looks up the host name, which on many
machines resolves to a loopback address.
"""

from __future__ import annotations

import ctypes
import os
import socket

from trainwright.tasks.errors import BadInput
from trainwright.tasks.train.exchange.rendezvous import INTERFACE

ADDRESS = "TRAINWRIGHT_ADDRESS"
"""The environment variable with the rank's address, set if there are several hosts."""
_CLONE_NEWUTS = 0x04000000


def own_address() -> str:
    """The address at which other ranks reach this one.

    From TRAINWRIGHT_ADDRESS, else from the interface named in GLOO_SOCKET_IFNAME, else from the
    host name.
    """
    if ADDRESS in os.environ:
        return os.environ[ADDRESS]
    if interface := os.environ.get(INTERFACE, "").partition(",")[0]:
        import psutil

        found = {one.family: one.address for one in psutil.net_if_addrs().get(interface, [])[::-1]}
        for family in (socket.AF_INET, socket.AF_INET6):
            if family in found:
                return found[family]
        raise OSError(f"{INTERFACE}: this host has no interface {interface!r} with an address")
    # torchrun sets both.
    single_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    return "127.0.0.1" if single_host else socket.gethostbyname(socket.gethostname())


def rename_host_to_address() -> None:
    """If the host name resolves to another address, rename the host to its address; needs root.

    Only this thread, and threads that it starts from now on, see the change (a new UTS namespace).
    Raises BadInput without the permission.
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
            f"train.backend: Horovod looks up the host name {name}, which resolves to {found} "
            f"on that host; it must resolve to {address} (set it in that host's /etc/hosts); or "
            "use train.backend: torch"
        )


def _addresses(name: str) -> set[str]:
    try:
        return {
            str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        }
    except OSError:
        return set()
