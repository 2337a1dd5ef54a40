"""Opens the ledger's database: the SQLAlchemy engine of a URL, and its tables."""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sql
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.schema import CreateTable

from trainwright.infra.private_files import new_private_folders
from trainwright.tasks.errors import BadInput
from trainwright.tasks.leases.tables import boots, leases, note_boot, tokens, waiters

IDLE_S = 0.5
"""PostgreSQL ends a transaction that is idle for longer: its client has been stopped."""
ADVISORY_LOCK = 71260001
"""The number of the ledger's advisory lock in PostgreSQL."""
_ADDED_COLUMNS = (
    ("priority", "INTEGER NOT NULL DEFAULT 0"),
    ("revoked_by", "VARCHAR(1000)"),
)
"""Columns that a `leases` table created by the first version lacks."""


def make_engine(url: str, lock_timeout_s: float) -> Engine:
    """The engine of a URL; opens no connection yet.

    Raises BadInput if it is not a database URL, or its driver is not installed.
    """
    try:
        given = sql.make_url(url)
        options = _connect_options(given.get_backend_name(), lock_timeout_s)
        engine = sql.create_engine(given, connect_args=options, pool_timeout=lock_timeout_s)
    except (sql.exc.ArgumentError, ModuleNotFoundError) as error:
        what = "is not a database URL"
        if isinstance(error, ModuleNotFoundError):
            what = f"needs {error.name}; install it"
        # The message omits the URL, and the error that quotes it: they may contain a password.
        raise BadInput(
            f"TRAINWRIGHT_LEDGER: {what}; "
            "allowed: sqlite:///FILE or postgresql+psycopg://HOST/DATABASE"
        ) from None
    if engine.dialect.name == "sqlite":

        @sql.event.listens_for(engine, "connect")
        def _prepare(connection: Any, _: object) -> None:
            connection.isolation_level = None  # this module issues BEGIN IMMEDIATE itself
            # Don't wait for the disk at each poll: a power failure that loses the last leases
            # also ends their holders.
            connection.execute("PRAGMA synchronous=NORMAL")

    return engine


def _connect_options(backend: str, lock_timeout_s: float) -> dict[str, Any]:
    if backend == "sqlite":
        return {"timeout": lock_timeout_s}
    if backend != "postgresql":
        return {}
    bounds = {
        "idle_in_transaction_session_timeout": 1000 * IDLE_S,
        "lock_timeout": 1000 * lock_timeout_s,
        "statement_timeout": 1000 * lock_timeout_s,
    }
    return {
        "options": " ".join(f"-c {name}={ms:.0f}" for name, ms in bounds.items()),
        "connect_timeout": 10,
    }


def create_tables(engine: Engine, lock_timeout_s: float) -> None:
    """Create missing tables. Several processes may do so at once."""
    backend = engine.dialect.name
    if backend == "sqlite" and engine.url.database:
        file = Path(engine.url.database)
        new_private_folders(file.parent)
        with contextlib.suppress(OSError):  # SQLite says what is wrong with it
            os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
    with engine.begin() as connection:
        if backend == "postgresql":
            connection.execute(sql.text(f"SELECT pg_advisory_xact_lock({ADVISORY_LOCK})"))
        elif backend == "sqlite":
            _write_ahead(connection, lock_timeout_s)
            connection.execute(sql.text("BEGIN IMMEDIATE"))
        for one in (leases, tokens, waiters, boots):
            connection.execute(CreateTable(one, if_not_exists=True))
        if backend == "sqlite":
            note_boot(connection)
        there = {column["name"] for column in sql.inspect(connection).get_columns("leases")}
        for name, kind in _ADDED_COLUMNS:
            if name not in there:
                connection.execute(sql.text(f"ALTER TABLE leases ADD COLUMN {name} {kind}"))


def _write_ahead(connection: Connection, lock_timeout_s: float) -> None:
    """Switch SQLite to its write-ahead log; retry while another process does the same.

    Two processes that switch a new file at once would deadlock. So SQLite immediately reports to
    one of them that the file is locked, whatever its timeout
    (sqlite.org/c3ref/busy_handler.html).
    """
    until = time.monotonic() + lock_timeout_s
    while True:
        try:
            connection.execute(sql.text("PRAGMA journal_mode=WAL"))
            return
        except sql.exc.OperationalError as error:
            busy = getattr(error.orig, "sqlite_errorname", "") == "SQLITE_BUSY"
            if not busy or time.monotonic() > until:
                raise
        time.sleep(0.01 * random.uniform(0.5, 1.5))
