"""The network interfaces of this machine."""

from __future__ import annotations

import socket


def own_addresses() -> dict[str, str]:
    """Each IPv4 and IPv6 address of this machine, with the name of its interface."""
    import psutil

    return {
        entry.address.partition("%")[0]: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }


def interface_of(address: str) -> str:
    """The interface of this machine with this address, or with a host name's first address.

    Raises OSError if there is none.
    """
    found, here = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM), own_addresses()
    for wanted in sorted({str(one[4][0]) for one in found} & set(here)):
        return here[wanted]
    raise OSError(f"not an address of this machine, which has {', '.join(sorted(here))}")
