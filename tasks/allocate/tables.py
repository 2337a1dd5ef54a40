"""The SQL under leases and queue: the tables, a serialised transaction, whose rows are still alive.

Times are seconds since the epoch, by the database's clock where it has one of its own (PostgreSQL), so that machines whose clocks
differ agree on what has expired.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil
import sqlalchemy as sql
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.schema import CreateTable

from trainwright.tasks.errors import BadInput, ServiceUnreachable

_metadata = sql.MetaData()


def _owner() -> list[sql.Column[object]]:
    """Who a row belongs to, and how long it lives without a heartbeat. With `pid`, it ends with that process."""
    return [
        sql.Column("holder", sql.String(400), nullable=False),
        sql.Column("machine", sql.String(300), nullable=False),
        sql.Column("pid", sql.Integer),
        sql.Column("process_started", sql.Float),
        sql.Column("expires_at", sql.Float, nullable=False),
    ]


leases = sql.Table(
    "leases",
    _metadata,
    sql.Column("resource", sql.String(400), primary_key=True),
    sql.Column("run", sql.String(1000), nullable=False),
    sql.Column("token", sql.Integer, nullable=False),
    *_owner(),
    sql.Column("priority", sql.Integer, nullable=False, server_default="0"),
    sql.Column("revoked_by", sql.String(1000)),
)
tokens = sql.Table("tokens", _metadata, sql.Column("id", sql.Integer, primary_key=True, autoincrement=True))
waiters = sql.Table(
    "waiters",
    _metadata,
    sql.Column("run", sql.String(700), primary_key=True),
    *_owner(),
    sql.Column("priority", sql.Integer, nullable=False),
    sql.Column("deadline_at", sql.Float),
    sql.Column("enqueued_at", sql.Float, nullable=False),
    sql.Column("needed", sql.Integer, nullable=False),
    sql.Column("wanted", sql.JSON, nullable=False),
)


@dataclass(frozen=True)
class Holder:
    """Who takes a lease. With a `pid` (of this machine), the lease ends when that process does."""

    name: str
    pid: int | None = None

    def row(self, until: float) -> dict[str, object]:
        """The columns that say whose a row is."""
        return {
            "holder": self.name, "machine": socket.gethostname(), "pid": self.pid, "expires_at": until,
            "process_started": process_started(self.pid) if self.pid is not None else None,
        }  # fmt: skip


def clock(connection: Connection) -> float:
    """Now."""
    if connection.dialect.name == "postgresql":
        return float(connection.execute(sql.text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
    return time.time()


class Transaction:
    """A serialised transaction; a database out of reach is ServiceUnreachable, without its password."""

    def __init__(self, engine: Engine, url: sql.URL) -> None:
        self._engine, self._where = engine, url.render_as_string(hide_password=True)

    def __enter__(self) -> Connection:
        try:
            _create_tables(self._engine)
            self._connection = self._engine.connect()
            try:
                for statement in _SERIALISE.get(self._engine.dialect.name, ("LOCK TABLE leases",)):
                    self._connection.execute(sql.text(statement))
            except BaseException:
                self._connection.close()
                raise
        except (sql.exc.DBAPIError, OSError) as error:
            raise self._unreachable(error) from error
        return self._connection

    def _unreachable(self, error: Exception) -> ServiceUnreachable:
        reason = (str(getattr(error, "orig", error)).splitlines() or [type(error).__name__])[0]
        return ServiceUnreachable(
            f"ledger at {self._where}: {reason}; check TRAINWRIGHT_HOME and TRAINWRIGHT_LEDGER",
            service="ledger",
            address=self._where,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._connection.commit()
            else:
                self._connection.rollback()
        except sql.exc.DBAPIError as lost:
            raise self._unreachable(lost) from lost
        finally:
            self._connection.close()
        if isinstance(error, sql.exc.DBAPIError):
            raise self._unreachable(error) from error


# A client that is stopped within a transaction must not stop all others: PostgreSQL ends it. SQLite can't.
_SERIALISE = {
    "sqlite": ("BEGIN IMMEDIATE",),
    "postgresql": ("SET LOCAL idle_in_transaction_session_timeout = '2s'", "LOCK TABLE leases"),
}
_ready: set[str] = set()


def _create_tables(engine: Engine) -> None:
    """At an engine's first use; several processes may do so at once."""
    key = engine.url.render_as_string(hide_password=False)
    if key not in _ready:
        if engine.dialect.name == "sqlite" and engine.url.database:
            Path(engine.url.database).parent.mkdir(parents=True, exist_ok=True)
        with engine.begin() as connection:
            if engine.dialect.name == "postgresql":
                connection.execute(sql.text("SELECT pg_advisory_xact_lock(7126)"))
            elif engine.dialect.name == "sqlite":
                connection.execute(sql.text("BEGIN IMMEDIATE"))
            for one in (leases, tokens, waiters):
                connection.execute(CreateTable(one, if_not_exists=True))
            there = {column["name"] for column in sql.inspect(connection).get_columns("leases")}
            for name, kind in (("priority", "INTEGER NOT NULL DEFAULT 0"), ("revoked_by", "VARCHAR(1000)")):
                if name not in there:  # a ledger that an earlier version made
                    connection.execute(sql.text(f"ALTER TABLE leases ADD COLUMN {name} {kind}"))
        _ready.add(key)


def make_engine(url: str) -> Engine:
    """The engine of a database URL. Raises BadInput where it is none, or its driver is not installed."""
    try:
        engine = sql.create_engine(
            url, pool_pre_ping=True, connect_args={"timeout": 30} if url.startswith("sqlite") else {}
        )
    except (sql.exc.ArgumentError, ModuleNotFoundError) as error:  # the URL is not told: it may hold a password
        what = f"needs {error.name}; install it" if isinstance(error, ModuleNotFoundError) else "is no database URL"
        raise BadInput(
            f"TRAINWRIGHT_LEDGER: {what}; allowed: sqlite:///FILE or postgresql+psycopg://HOST/DATABASE"
        ) from None
    if engine.dialect.name == "sqlite":

        @sql.event.listens_for(engine, "connect")
        def _manual_transactions(connection: object, _: object) -> None:
            connection.isolation_level = None  # type: ignore[attr-defined]  # so that BEGIN IMMEDIATE is ours to say

    return engine


def process_started(pid: int) -> float | None:
    """When a process began; None where it is dead, whether or not its parent has noticed."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.NoSuchProcess:
        return None


def alive(row: sql.Row[tuple[object, ...]], now: float) -> bool:
    """Whether a row still counts: its time has not run out, and its process, where it is of this machine, lives."""
    if row.expires_at <= now:
        return False
    if row.pid is None or row.machine != socket.gethostname():
        return True
    started = process_started(row.pid)
    return started is not None and (row.process_started is None or abs(started - row.process_started) < 1.0)
