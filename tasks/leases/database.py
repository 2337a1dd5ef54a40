"""Runs statements on the ledger's database: one by one, or in a serialised transaction.

Both are bounded in time: a database that is unreachable, or locked for too long, raises
ServiceUnreachable. If a connection is lost (the server restarted, or ended the transaction of a
stopped client), it is opened again and the statements run again: all statements here must be safe
to run twice.

A process that is stopped (SIGSTOP) in the middle of a transaction must not stop all others. So
polling, renewing and releasing use no transaction, and PostgreSQL ends one that is idle for
`engine.IDLE_S`. SQLite can't: its lock is the operating system's, and lives as long as the stopped
process. A transaction there takes less than a millisecond. If a process is stopped within it, the
others give up after `LOCK_TIMEOUT_S` with an error that names the process; heartbeats, triggers and
waiting runs try again. That is safe: no process can take anything meanwhile, and a lease that can't
be renewed counts as lost when it expires.
"""

from __future__ import annotations

import functools
import os
import random
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil
import sqlalchemy as sql
from sqlalchemy.engine import Connection

from trainwright.tasks.errors import ServiceUnreachable
from trainwright.tasks.leases.engine import ADVISORY_LOCK, create_tables, make_engine

LOCK_TIMEOUT_S = 10.0
_ATTEMPTS = 4
_UNDONE = ("40001", "40P01")
"""PostgreSQL rolled the transaction back for another: serialisation failure, deadlock."""
_WAL_WRITE_LOCK = 120
"""The byte of the -shm file that SQLite's writer locks (sqlite.org/walformat.html, 2.3.1)."""
Returned = TypeVar("Returned")
Statements = Callable[[Connection], Returned]


class Database:
    """The database at an SQLAlchemy URL. Raises BadInput as `make_engine` does."""

    def __init__(self, url: str) -> None:
        self._engine = make_engine(url, LOCK_TIMEOUT_S)
        self._where = self._engine.url.render_as_string(hide_password=True)
        self._is_sqlite = self._engine.dialect.name == "sqlite"
        self._has_tables = False

    def autocommit(self, statements: Statements[Returned]) -> Returned:
        """Run them one by one, each atomic by itself.

        Between two statements the client holds no lock, even if it is stopped there.
        """
        level = None if self._is_sqlite else "AUTOCOMMIT"
        return self._run(statements, lambda connection: None, isolation_level=level)

    def serialised(self, statements: Statements[Returned]) -> Returned:
        """Run them in a transaction, at a time when no other serialised transaction runs."""
        return self._run(statements, self._lock)

    def _run(
        self,
        statements: Statements[Returned],
        begin: Callable[[Connection], None],
        isolation_level: str | None = None,
    ) -> Returned:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                if not self._has_tables:
                    create_tables(self._engine, LOCK_TIMEOUT_S)
                    self._has_tables = True
                with self._engine.connect() as connection:
                    if isolation_level is not None:
                        connection = connection.execution_options(isolation_level=isolation_level)
                    begin(connection)
                    result = statements(connection)
                    connection.commit()
                    return result
            except sql.exc.DBAPIError as error:
                undone = getattr(error.orig, "sqlstate", None) in _UNDONE
                lost = error.connection_invalidated or undone
                if not lost or attempt == _ATTEMPTS:
                    raise self._unreachable(error) from error
            except (sql.exc.TimeoutError, OSError, sqlite3.Error) as error:
                # no free connection; no folder; locked while the connection was prepared
                raise self._unreachable(error) from error
        raise AssertionError("the last attempt returns or raises")

    def _lock(self, connection: Connection) -> None:
        """Begin a transaction that runs while no other serialised one does."""
        if self._is_sqlite:
            connection.execute(sql.text("BEGIN IMMEDIATE"))
            return
        # Polled, because the server would grant a blocking request to a client that is stopped
        # while it waits.
        until, pause_s = time.monotonic() + LOCK_TIMEOUT_S, 0.01
        request = sql.text(f"SELECT pg_try_advisory_xact_lock({ADVISORY_LOCK})")
        while not connection.execute(request).scalar_one():
            connection.rollback()
            if time.monotonic() > until:
                raise OSError(f"locked by others for {LOCK_TIMEOUT_S:g} s")
            time.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(0.1, pause_s * 1.5)

    def _unreachable(self, error: Exception) -> ServiceUnreachable:
        reason = (str(getattr(error, "orig", error)).splitlines() or [type(error).__name__])[0]
        if self._is_sqlite and "locked" in reason:
            reason += _lock_holder(str(self._engine.url.database))
        return ServiceUnreachable(
            f"ledger at {self._where}: {reason}; check TRAINWRIGHT_HOME and TRAINWRIGHT_LEDGER",
            service="ledger",
            address=self._where,
        )


@functools.lru_cache(maxsize=16)
def database_at(url: str, process: int) -> Database:
    """The database of a URL, one for each process (`os.getpid()`).

    Cached because a process makes many ledgers of one URL, and each would otherwise connect and
    create the tables again. The process is part of the key, so that a forked child never uses its
    parent's connections.
    """
    return Database(url)


def _lock_holder(database: str) -> str:
    """Names the process that holds SQLite's write lock, and whether it is stopped; or nothing.

    Read from /proc, never by opening the file: closing it again would drop every lock that this
    process has on it.
    """
    try:
        inode = os.stat(f"{database}-shm").st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()  # 1: POSIX ADVISORY WRITE pid major:minor:inode first last
            ours = words[1:4] == ["POSIX", "ADVISORY", "WRITE"] and words[5].endswith(f":{inode}")
            if ours and words[6] == str(_WAL_WRITE_LOCK):
                stopped = psutil.Process(int(words[4])).status() == psutil.STATUS_STOPPED
                advice = ", which is stopped: continue it (SIGCONT) or kill it" if stopped else ""
                return f" by process {words[4]}{advice}"
    except (OSError, ValueError, IndexError, psutil.Error):
        pass  # the error is reported without its cause
    return ""
