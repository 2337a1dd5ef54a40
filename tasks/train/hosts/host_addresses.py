"""The addresses and interfaces by which hosts and this machine reach each other."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

from trainwright.estimator.interfaces import interface_of
from trainwright.tasks.errors import BadInput, ServiceUnreachable
from trainwright.tasks.train.exchange.host_name import ADDRESS
from trainwright.tasks.train.exchange.rendezvous import INTERFACE
from trainwright.tasks.train.hosts.session import Session

LOOPBACK_VARIABLES = {INTERFACE: "lo"}
"""The interface variables of the ranks if all of them run on this machine."""


def interface_variables(interface: str, address: str) -> dict[str, str]:
    """The environment variables that name a machine's interface to the others, and its address."""
    return {INTERFACE: interface, ADDRESS: address}


def own_address(came_by: Sequence[str], addresses: Sequence[str]) -> str:
    """This machine's address, as the hosts see it. Raises BadInput if they see several.

    `came_by`: for each host, the connection by which it was started, in the form of SSH_CONNECTION.
    """
    seen = sorted({one.split()[0] for one in came_by if one})
    with contextlib.suppress(OSError):
        if len(seen) == 1:
            interface_of(seen[0])
            return str(seen[0])
    routes = {_route_to(one) for one in addresses}
    if len(routes) != 1:
        raise BadInput(
            f"pool: its hosts reach this machine at {', '.join(sorted(routes))}; "
            "allowed: one address for all hosts"
        )
    return routes.pop()


def reached_from(session: Session, address: str) -> tuple[dict[str, str], str]:
    """Check that a host can connect to this machine at an address.

    Returns the host's interface variables, and the address from which it connects. Raises
    ServiceUnreachable.
    """
    with socket.create_server((address, 0)) as listening:
        port = listening.getsockname()[1]
        reply = session.ask("reach", address=address, port=port)
    if "error" in reply:
        raise ServiceUnreachable(
            f"{session}: can't connect to this machine at {address}, port {port}: "
            f"{reply['error']}; a firewall must let it through",
            service="rendezvous",
            address=address,
        )
    return interface_variables(reply["interface"], reply["address"]), str(reply["address"])


def _route_to(address: str) -> str:
    """The local address from which this machine reaches another."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # UDP: chooses a route, sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise BadInput(
            f"pool: {address}: can't find the address at which it would reach this machine: {error}"
        ) from None
