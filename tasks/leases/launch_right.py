"""The right to train a run: a lease of one process at a time, whose holder's name identifies it."""

from __future__ import annotations

import os
import socket

from trainwright.tasks.leases.tables import process_started


def resource(run_uri: str) -> str:
    """The ledger's name of the right to train this run."""
    return f"launcher {run_uri}"


def own_name() -> str:
    """This process's name as a holder: machine, process id, and start time."""
    return f"launcher {socket.gethostname()} {os.getpid()} {process_started(os.getpid()):.2f}"


def host_of(name: str) -> str:
    """The machine of the process with this name."""
    return name.split(" ")[1]


def on_this_machine(name: str) -> int | None:
    """The process id, if the process of this name is alive on this machine."""
    _, host, pid, started = name.split(" ")
    found = process_started(int(pid)) if host == socket.gethostname() else None
    return int(pid) if found is not None and abs(found - float(started)) < 1.0 else None
