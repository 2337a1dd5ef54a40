"""Who holds what, until when: leases in one SQL table, taken all or none.

A lease is renewed by its holder's heartbeat and ends by release, by expiry, or, on the same machine, with its holder's process.
Each lease carries a token larger than every earlier one's, so that a holder that slept through its expiry can be told from
the present one. SQLite here; any SQLAlchemy URL elsewhere.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil
import sqlalchemy as sql
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.schema import CreateTable

from trainwright.tasks.errors import BadInput, RunHeld, ServiceUnreachable

TTL_S = 60.0

_metadata = sql.MetaData()
_leases = sql.Table(
    "leases",
    _metadata,
    sql.Column("resource", sql.String(400), primary_key=True),
    sql.Column("holder", sql.String(400), nullable=False),
    sql.Column("run", sql.String(1000), nullable=False),
    sql.Column("token", sql.Integer, nullable=False),
    sql.Column("machine", sql.String(300), nullable=False),
    sql.Column("pid", sql.Integer),
    sql.Column("process_started", sql.Float),
    sql.Column("expires_at", sql.Float, nullable=False),
)
_tokens = sql.Table("tokens", _metadata, sql.Column("id", sql.Integer, primary_key=True, autoincrement=True))


@dataclass(frozen=True)
class Holder:
    """Who takes a lease. With a `pid` (of this machine), the lease ends when that process does."""

    name: str
    pid: int | None = None


@dataclass(frozen=True)
class Lease:
    """A resource that is held."""

    resource: str
    holder: str
    run: str
    token: int
    expires_at: float


class Ledger:
    """The table of leases at an SQLAlchemy URL."""

    def __init__(self, url: str) -> None:
        self._engine = _engine(url)
        self._url = sql.make_url(url)

    def take(self, resources: Iterable[str], holder: Holder, run: str, ttl_s: float = TTL_S) -> int:
        """Lease every resource for a run, or none; what the run holds already is renewed. Returns the token.

        Raises RunHeld, naming the holder and the resource, where one is held for another run, or by another for this one.
        """
        wanted = sorted(set(resources))
        started = _process_started(holder.pid) if holder.pid is not None else None
        with self._transaction() as connection:
            now = time.time()
            for row in connection.execute(sql.select(_leases).where(_leases.c.resource.in_(wanted))):
                if (row.run, row.holder) != (run, holder.name) and _alive(row, now):
                    raise RunHeld(
                        f"{row.resource} is held by {row.holder} for {row.run}",
                        resource=row.resource, holder=row.holder, run=row.run, expires_in_s=round(row.expires_at - now, 1),
                    )  # fmt: skip
            inserted = connection.execute(sql.insert(_tokens)).inserted_primary_key
            token = int(inserted[0]) if inserted else 0
            connection.execute(sql.delete(_leases).where(_leases.c.resource.in_(wanted)))
            values = {
                "holder": holder.name, "run": run, "token": token, "machine": socket.gethostname(), "pid": holder.pid,
                "process_started": started, "expires_at": now + ttl_s,
            }  # fmt: skip
            if wanted:
                connection.execute(sql.insert(_leases), [{"resource": resource, **values} for resource in wanted])
        return token

    def renew(self, run: str, resources: Iterable[str], ttl_s: float = TTL_S, *, holder: str | None = None) -> bool:
        """Move the expiry of a run's leases on. False where one of them is no longer the run's (or this holder's)."""
        wanted = sorted(set(resources))
        with self._transaction() as connection:
            changed = connection.execute(
                sql.update(_leases)
                .where(_leases.c.resource.in_(wanted), _leases.c.run == run, *_held_by(holder))
                .values(expires_at=time.time() + ttl_s)
            )
            return bool(changed.rowcount == len(wanted))

    def release(self, run: str, resources: Iterable[str] | None = None, *, holder: str | None = None) -> int:
        """End a run's leases (all, these, or only a holder's). Returns how many there were; none is no error."""
        statement = sql.delete(_leases).where(_leases.c.run == run, *_held_by(holder))
        if resources is not None:
            statement = statement.where(_leases.c.resource.in_(sorted(set(resources))))
        with self._transaction() as connection:
            return int(connection.execute(statement).rowcount)

    def held(self, prefix: str = "") -> list[Lease]:
        """What is held now, by resource."""
        with self._transaction() as connection:
            now = time.time()
            rows = connection.execute(sql.select(_leases).order_by(_leases.c.resource)).all()
        return [
            Lease(row.resource, row.holder, row.run, row.token, row.expires_at)
            for row in rows
            if row.resource.startswith(prefix) and _alive(row, now)
        ]

    def _transaction(self) -> _Transaction:
        return _Transaction(self._engine, self._url)


class _Transaction:
    """A serialised transaction; a database out of reach is ServiceUnreachable, without its password."""

    def __init__(self, engine: Engine, url: sql.URL) -> None:
        self._engine, self._where = engine, url.render_as_string(hide_password=True)

    def __enter__(self) -> Connection:
        try:
            _create_tables(self._engine)
            self._connection = self._engine.connect()
            try:
                self._connection.execute(sql.text(_SERIALISE.get(self._engine.dialect.name, "LOCK TABLE leases")))
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


def _held_by(holder: str | None) -> list[sql.ColumnElement[bool]]:
    return [] if holder is None else [_leases.c.holder == holder]


_SERIALISE = {"sqlite": "BEGIN IMMEDIATE"}
_ready: set[str] = set()


def _create_tables(engine: Engine) -> None:
    """At an engine's first use; several processes may do so at once."""
    key = engine.url.render_as_string(hide_password=False)
    if key not in _ready:
        if engine.dialect.name == "sqlite" and engine.url.database:
            Path(engine.url.database).parent.mkdir(parents=True, exist_ok=True)
        with engine.begin() as connection:
            for one in (_leases, _tokens):
                connection.execute(CreateTable(one, if_not_exists=True))
        _ready.add(key)


def _engine(url: str) -> Engine:
    try:
        engine = sql.create_engine(url, connect_args={"timeout": 30} if url.startswith("sqlite") else {})
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


def _process_started(pid: int) -> float | None:
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


def _alive(row: sql.Row[tuple[object, ...]], now: float) -> bool:
    if row.expires_at <= now:
        return False
    if row.pid is None or row.machine != socket.gethostname():
        return True
    started = _process_started(row.pid)
    return started is not None and (row.process_started is None or abs(started - row.process_started) < 1.0)


class Heartbeat:
    """Renews a run's leases from a thread while the block runs. `lost` is set when one of them is another's."""

    def __init__(
        self, ledger: Ledger, run: str, resources: Iterable[str], ttl_s: float = TTL_S, *, holder: str | None = None
    ) -> None:
        self._ledger, self._run, self._resources, self._ttl_s = ledger, run, sorted(set(resources)), ttl_s
        self._holder, self._until = holder, time.time() + ttl_s
        self.lost = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease-heartbeat", daemon=True)

    def _beat(self) -> None:
        while not self._done.wait(self._ttl_s / 6):
            try:
                if not self.still_held():
                    self.lost.set()
                    return
            except ServiceUnreachable:
                if time.time() > self._until:  # nobody can say that the lease is still ours
                    self.lost.set()
                    return

    def still_held(self) -> bool:
        """Ask the ledger now, and renew: what sleeps past its expiry must not trust the last beat."""
        asked_at = time.time()
        held = self._ledger.renew(self._run, self._resources, self._ttl_s, holder=self._holder)
        if held:
            self._until = asked_at + self._ttl_s
        return held

    def mine(self) -> bool:
        """Whether the leases are still ours, as far as anybody can say: a ledger out of reach is given their time to live."""
        try:
            return not self.lost.is_set() and self.still_held()
        except ServiceUnreachable:
            return time.time() < self._until

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(timeout=5)
