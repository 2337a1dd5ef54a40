"""A PostgreSQL server for tests and benchmarks, with its own cluster in a temporary folder."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = "/usr/lib/postgresql"


@contextlib.contextmanager
def postgresql() -> Iterator[str]:
    """Runs the server of Debian's package and yields its URL.

    Raises FileNotFoundError if PostgreSQL is not installed.
    """
    programs = sorted(Path(PROGRAMS).glob("*/bin"))
    if not programs:
        raise FileNotFoundError("PostgreSQL is not installed (make setup-system installs it)")
    as_user: list[str] = []
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]

    def run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, cwd="/")

    with tempfile.TemporaryDirectory(prefix="trainwright-pg-", ignore_cleanup_errors=True) as name:
        if as_user:
            run("chown", "postgres:postgres", name)
        control = (*as_user, str(programs[-1] / "pg_ctl"), "-D", f"{name}/data", "-w")
        run(*control, "initdb", "-o", "-A trust -U trainwright")
        options = {
            "listen_addresses": "''",
            "unix_socket_directories": name,
            "max_connections": "200",
            "fsync": "off",
        }
        settings = " ".join(f"-c {key}={value}" for key, value in options.items())
        run(*control, "start", "-l", f"{name}/log", "-o", settings)
        try:
            yield f"postgresql+psycopg://trainwright@/postgres?host={name}"
        finally:
            run(*control, "stop", "-m", "immediate")
