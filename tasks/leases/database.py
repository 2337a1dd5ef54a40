"""How the ledger's tables are read and changed: statement by statement, or, to take a lease, by a transaction of its own.

Both are bounded in time, and a database out of reach, or locked for too long, is ServiceUnreachable. A connection that was
lost on the way (the server was restarted, or ended the transaction of a client that was stopped in it) is opened again and the
work done again: every piece of work here may be done twice.

A process that is stopped (SIGSTOP) in the middle of a transaction must not stop all others. So looking, renewing and releasing
use none, and PostgreSQL ends one that is left idle for IDLE_S. SQLite can't: the lock is the operating system's, and lives as
long as the process that is stopped. There a transaction lasts under a millisecond; should a process be stopped just then, the
others give up after LOCK_TIMEOUT_S with an error that names it, and heartbeats, triggers and waiting runs ask again. Safety
does not suffer: nothing is taken meanwhile, and a lease that can't be renewed counts as lost at the end of its time.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
import sqlalchemy as sql
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.schema import CreateTable

from trainwright.tasks.errors import BadInput, ServiceUnreachable
from trainwright.tasks.leases.tables import leases, tokens, waiters

LOCK_TIMEOUT_S = 10.0
IDLE_S = 0.5
_ATTEMPTS = 4
_UNDONE = ("40001", "40P01")  # PostgreSQL undid it for another: serialisation, deadlock
_LOCK = 71260001  # the number of our advisory lock
_WAL_WRITE_LOCK = 120  # the byte of the -shm file that SQLite's writer locks (sqlite.org/walformat.html, section 2.3.1)
Done = TypeVar("Done")
Work = Callable[[Connection], Done]


class Database:
    """The database at an SQLAlchemy URL. Raises BadInput where it is none, or its driver is not installed."""

    def __init__(self, url: str) -> None:
        self._engine = _engine(url)
        self._where = self._engine.url.render_as_string(hide_password=True)
        self._is_sqlite = self._engine.dialect.name == "sqlite"

    def autocommit(self, work: Work[Done]) -> Done:
        """Statement by statement, each atomic by itself: between them a client holds no lock, even if it is stopped there."""
        return self._do(
            work, lambda connection: None, isolation_level=None if self._is_sqlite else "AUTOCOMMIT"
        )

    def serialised(self, work: Work[Done]) -> Done:
        """In a transaction that no other serialised work runs beside."""
        return self._do(work, self._lock)

    def _do(
        self,
        work: Work[Done],
        begin: Callable[[Connection], None],
        isolation_level: str | None = None,
    ) -> Done:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                _create_tables(self._engine)
                with self._engine.connect() as connection:
                    if isolation_level is not None:
                        connection = connection.execution_options(isolation_level=isolation_level)
                    begin(connection)
                    done = work(connection)
                    connection.commit()
                    return done
            except sql.exc.DBAPIError as error:
                lost = (
                    error.connection_invalidated or getattr(error.orig, "sqlstate", None) in _UNDONE
                )
                if not lost or attempt == _ATTEMPTS:
                    raise self._unreachable(error) from error
            except (
                sql.exc.TimeoutError,
                OSError,
            ) as error:  # no connection of the pool is free; no folder
                raise self._unreachable(error) from error
        raise AssertionError("the last attempt returns or raises")

    def _lock(self, connection: Connection) -> None:
        """Begin a transaction that no other serialised work runs beside."""
        if self._is_sqlite:
            connection.execute(sql.text("BEGIN IMMEDIATE"))
            return
        # Asked for again and again, not waited for: the server would give it to a client that is stopped while it waits.
        until, pause_s = time.monotonic() + LOCK_TIMEOUT_S, 0.01
        while not connection.execute(
            sql.text(f"SELECT pg_try_advisory_xact_lock({_LOCK})")
        ).scalar_one():
            connection.rollback()
            if time.monotonic() > until:
                raise OSError(f"locked by others for {LOCK_TIMEOUT_S:g} s")
            time.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(0.1, pause_s * 1.5)

    def _unreachable(self, error: Exception) -> ServiceUnreachable:
        reason = (str(getattr(error, "orig", error)).splitlines() or [type(error).__name__])[0]
        if self._is_sqlite and "locked" in reason:
            reason += _who_locks(str(self._engine.url.database))
        return ServiceUnreachable(
            f"ledger at {self._where}: {reason}; check TRAINWRIGHT_HOME and TRAINWRIGHT_LEDGER",
            service="ledger",
            address=self._where,
        )


def _who_locks(database: str) -> str:
    """The process that holds SQLite's lock for writing, and whether it is stopped, as far as the system tells.

    Never by opening the file: closing it again would give up every lock that this process has on it.
    """
    try:
        inode = os.stat(f"{database}-shm").st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()  # 1: POSIX ADVISORY WRITE pid major:minor:inode first last
            ours = words[1:4] == ["POSIX", "ADVISORY", "WRITE"] and words[5].endswith(f":{inode}")
            if ours and words[6] == str(_WAL_WRITE_LOCK):
                stopped = psutil.Process(int(words[4])).status() == psutil.STATUS_STOPPED
                return f" by process {words[4]}" + (
                    ", which is stopped: wake it or kill it" if stopped else ""
                )
    except (OSError, ValueError, IndexError, psutil.Error):
        pass  # it is only to tell more
    return ""


_engines: dict[tuple[int, str], Engine] = {}
_ready: set[str] = set()


def _engine(url: str) -> Engine:
    """The engine of a URL, one in a process: connections are kept, and never shared with a forked child."""
    key = (os.getpid(), url)
    if key not in _engines:
        _engines[key] = _make_engine(url)
    return _engines[key]


def _make_engine(url: str) -> Engine:
    try:
        given = sql.make_url(url)
        options: dict[str, Any] = (
            {"timeout": LOCK_TIMEOUT_S} if given.get_backend_name() == "sqlite" else {}
        )
        if given.get_backend_name() == "postgresql":
            bounds = {
                "idle_in_transaction_session_timeout": 1000 * IDLE_S,
                "lock_timeout": 1000 * LOCK_TIMEOUT_S,
                "statement_timeout": 1000 * LOCK_TIMEOUT_S,
            }
            options = {
                "options": " ".join(f"-c {name}={ms:.0f}" for name, ms in bounds.items()),
                "connect_timeout": 10,
            }
        engine = sql.create_engine(given, connect_args=options, pool_timeout=LOCK_TIMEOUT_S)
    except (
        sql.exc.ArgumentError,
        ModuleNotFoundError,
    ) as error:  # the URL is not told: it may hold a password
        what = (
            f"needs {error.name}; install it"
            if isinstance(error, ModuleNotFoundError)
            else "is no database URL"
        )
        raise BadInput(
            f"TRAINWRIGHT_LEDGER: {what}; allowed: sqlite:///FILE or postgresql+psycopg://HOST/DATABASE"
        ) from None
    if engine.dialect.name == "sqlite":

        @sql.event.listens_for(engine, "connect")
        def _prepare(connection: Any, _: object) -> None:
            connection.isolation_level = None  # so that BEGIN IMMEDIATE is ours to say
            # No wait for the disk at each look: what a power failure takes back, it took from the holders too.
            connection.execute("PRAGMA synchronous=NORMAL")

    return engine


def _create_tables(engine: Engine) -> None:
    """At an engine's first use; several processes may do so at once."""
    key = engine.url.render_as_string(hide_password=False)
    if key not in _ready:
        if engine.dialect.name == "sqlite" and engine.url.database:
            Path(engine.url.database).parent.mkdir(parents=True, exist_ok=True)
        with engine.begin() as connection:
            if engine.dialect.name == "postgresql":
                connection.execute(sql.text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
            elif engine.dialect.name == "sqlite":
                _write_ahead(connection)
                connection.execute(sql.text("BEGIN IMMEDIATE"))
            for one in (leases, tokens, waiters):
                connection.execute(CreateTable(one, if_not_exists=True))
            there = {column["name"] for column in sql.inspect(connection).get_columns("leases")}
            for name, kind in (
                ("priority", "INTEGER NOT NULL DEFAULT 0"),
                ("revoked_by", "VARCHAR(1000)"),
            ):
                if name not in there:  # a ledger that an earlier version made
                    connection.execute(sql.text(f"ALTER TABLE leases ADD COLUMN {name} {kind}"))
        _ready.add(key)


def _write_ahead(connection: Connection) -> None:
    """Turn SQLite to its write-ahead log. Asked for again: two that turn a new file at once would wait for each other, so
    SQLite tells one of them at once that it is locked, whatever its time-out (sqlite.org/c3ref/busy_handler.html)."""
    until = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            connection.execute(sql.text("PRAGMA journal_mode=WAL"))
            return
        except sql.exc.OperationalError as error:
            if (
                getattr(error.orig, "sqlite_errorname", "") != "SQLITE_BUSY"
                or time.monotonic() > until
            ):
                raise
        time.sleep(0.01 * random.uniform(0.5, 1.5))
