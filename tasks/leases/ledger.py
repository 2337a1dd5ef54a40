"""Who holds what, until when: leases in one SQL table, taken all or none.

A lease is renewed by its holder's heartbeat and ends by release, by expiry, or, on the same machine, with its holder's process.
Each lease carries a token larger than every earlier one's, so that a holder that slept through its expiry can be told from
the present one, even from another process of its own name. SQLite here; any SQLAlchemy URL elsewhere. Who waits: `queue`.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sql
from sqlalchemy.engine import Connection

from trainwright.tasks.errors import RunHeld, ServiceUnreachable
from trainwright.tasks.leases.database import Database
from trainwright.tasks.leases.tables import Holder, alive, clock, leases, moment, tokens

TTL_S = 60.0
# Tokens keep up with the clock, so that those of a ledger that was lost and begun anew are larger than any it gave before.
_TOKENS_FROM_S = 1_700_000_000


@dataclass(frozen=True)
class Lease:
    """A resource that is held. `revoked_by` is the run that asks for it: of a higher priority, or the same, to plan anew."""

    resource: str
    holder: str
    run: str
    token: int
    expires_at: float
    priority: int = 0
    revoked_by: str | None = None
    pid: int | None = None
    """the holder's process, if the lease ends with a process of this machine"""

    @property
    def by(self) -> str:
        """The holder, as a message names it: with its process, if that is of this machine."""
        if self.pid is None or f"pid {self.pid}" in self.holder:
            return self.holder
        return f"{self.holder} (pid {self.pid})"

    @classmethod
    def of(cls, row: Any) -> Lease:
        """The lease in a row of the table."""
        return cls(
            row.resource,
            row.holder,
            row.run,
            row.token,
            row.expires_at,
            row.priority,
            row.revoked_by,
            row.pid if row.machine == socket.gethostname() else None,
        )


class Ledger:
    """The table of leases at an SQLAlchemy URL."""

    def __init__(self, url: str) -> None:
        self.database = Database(url)

    def take(self, resources: Iterable[str], holder: Holder, run: str, ttl_s: float = TTL_S) -> int:
        """Lease every resource for a run, or none; what the run holds already is renewed. Returns the token.

        Takes no turn: devices are taken with `Queue.take`. Raises RunHeld, naming the holder and the resource, where one is
        held for another run, or by another for this one.
        """

        def work(connection: Connection) -> int:
            found = insert_leases(connection, resources, holder, run, clock(connection), ttl_s, 0)
            if isinstance(found, Lease):
                raise RunHeld(
                    f"{found.resource} is held by {found.by} for {found.run}",
                    resource=found.resource,
                    holder=found.holder,
                    run=found.run,
                    expires_in_s=round(found.expires_at - clock(connection), 1),
                )
            return found

        return self.database.serialised(work)

    def renew(
        self,
        run: str,
        resources: Iterable[str],
        ttl_s: float = TTL_S,
        *,
        holder: str | None = None,
        token: int | None = None,
    ) -> bool:
        """Move the expiry of a run's leases on. False where one of them is no longer the run's (this holder's, this token's)."""
        wanted = sorted(set(resources))
        mine = (leases.c.resource.in_(wanted), leases.c.run == run, *_held_by(holder, token))

        def work(connection: Connection) -> bool:
            later = sql.update(leases).where(*mine).values(expires_at=moment(connection) + ttl_s)
            return bool(connection.execute(later).rowcount == len(wanted))

        return self.database.autocommit(work)

    def release(
        self,
        run: str,
        resources: Iterable[str] | None = None,
        *,
        holder: str | None = None,
        token: int | None = None,
    ) -> int:
        """End a run's leases (all, these, only a holder's or a token's). Returns how many there were; none is no error."""
        statement = sql.delete(leases).where(leases.c.run == run, *_held_by(holder, token))
        if resources is not None:
            statement = statement.where(leases.c.resource.in_(sorted(set(resources))))
        return int(
            self.database.autocommit(lambda connection: connection.execute(statement).rowcount)
        )

    def held(self, prefix: str = "") -> list[Lease]:
        """What is held now, by resource."""

        def work(connection: Connection) -> list[Lease]:
            now = clock(connection)
            rows = connection.execute(sql.select(leases).order_by(leases.c.resource)).all()
            return [
                Lease.of(row) for row in rows if row.resource.startswith(prefix) and alive(row, now)
            ]

        return self.database.autocommit(work)

    def holds(self, run: str, resource: str) -> bool | None:
        """Whether a resource is held for a run now; None where nobody has taken it since it was released, if ever."""

        def work(connection: Connection) -> bool | None:
            row = connection.execute(
                sql.select(leases).where(leases.c.resource == resource)
            ).first()
            return None if row is None else row.run == run and alive(row, clock(connection))

        return self.database.autocommit(work)

    def holder_of(self, resource: str) -> Holder | None:
        """Who holds a resource currently, with its process if that is of this machine; None: nobody."""

        def work(connection: Connection) -> Holder | None:
            row = connection.execute(
                sql.select(leases).where(leases.c.resource == resource)
            ).first()
            if row is None or not alive(row, clock(connection)):
                return None
            return Holder(row.holder, row.pid if row.machine == socket.gethostname() else None)

        return self.database.autocommit(work)

    def revoked_by(self, run: str) -> str | None:
        """The run that asks for a device of this one, another before itself; None where nobody does."""
        statement = sql.select(leases.c.revoked_by).where(
            leases.c.run == run, leases.c.revoked_by.is_not(None)
        )
        asked = self.database.autocommit(
            lambda connection: connection.execute(statement).scalars().all()
        )
        return next((one for one in asked if one != run), run if asked else None)

    def ask_to_plan_anew(self, run: str, resources: Iterable[str]) -> int:
        """Ask a run for its own devices, these. Returns how many of them it holds; whom another asks for them keeps that."""
        mine = (leases.c.run == run, leases.c.resource.in_(sorted(set(resources))))

        def work(connection: Connection) -> int:
            connection.execute(
                sql.update(leases)
                .where(*mine, leases.c.revoked_by.is_(None))
                .values(revoked_by=run)
            )
            return len(connection.execute(sql.select(leases.c.resource).where(*mine)).all())

        return self.database.serialised(work)

    def heard(self, run: str) -> None:
        """The run knows that it is to plan anew."""
        statement = (
            sql.update(leases)
            .where(leases.c.run == run, leases.c.revoked_by == run)
            .values(revoked_by=None)
        )
        self.database.autocommit(lambda connection: connection.execute(statement))


def insert_leases(
    connection: Connection,
    resources: Iterable[str],
    holder: Holder,
    run: str,
    now: float,
    ttl_s: float,
    priority: int,
) -> int | Lease:
    """Within serialised work: write leases over what is free, expired or this holder's own. The token, or the lease in the way.

    Renewals run beside it: the rows are locked, so that one that is found expired can't be renewed any more.
    """
    wanted = sorted(set(resources))
    there = (
        sql.select(leases)
        .where(leases.c.resource.in_(wanted))
        .order_by(leases.c.resource)
        .with_for_update()
    )
    for row in connection.execute(there).all():
        if (row.run, row.holder) != (run, holder.name) and alive(row, now):
            return Lease.of(row)
    newest = connection.execute(sql.select(sql.func.max(tokens.c.id))).scalar_one()
    token = max(int(newest or 0) + 1, int(now) - _TOKENS_FROM_S)
    connection.execute(sql.delete(tokens))  # the newest alone says what comes next
    connection.execute(sql.insert(tokens).values(id=token))
    connection.execute(sql.delete(leases).where(leases.c.resource.in_(wanted)))
    values = {"run": run, "token": token, "priority": priority, **holder.row(now + ttl_s)}
    if wanted:
        connection.execute(
            sql.insert(leases), [{"resource": resource, **values} for resource in wanted]
        )
    return token


def _held_by(holder: str | None, token: int | None) -> list[sql.ColumnElement[bool]]:
    named = [] if holder is None else [leases.c.holder == holder]
    return named if token is None else [*named, leases.c.token == token]


class Heartbeat:
    """Renews a run's leases, at once and then from a thread, while the block runs. `lost` is set when one is another's.

    Entering raises ServiceUnreachable where the ledger can't be asked: nobody knows how old the lease is by then.

    `revoked` is set when a run asks for one: save, and release (or plan anew, where it is the same run). With a `token`, a later
    lease of the same run and holder is another's too.
    """

    def __init__(
        self,
        ledger: Ledger,
        run: str,
        resources: Iterable[str],
        ttl_s: float = TTL_S,
        *,
        holder: str | None = None,
        token: int | None = None,
    ) -> None:
        self._ledger, self._run, self._resources, self._ttl_s = (
            ledger,
            run,
            sorted(set(resources)),
            ttl_s,
        )
        self._holder, self._token = holder, token
        self._until = -math.inf
        self.lost = threading.Event()
        self.revoked = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease-heartbeat", daemon=True)

    def _beat(self) -> None:
        while not self._done.wait(self._ttl_s / 6):
            try:
                if not self.still_held():
                    self.lost.set()
                    return
                if self._ledger.revoked_by(self._run) is not None:
                    self.revoked.set()
            except ServiceUnreachable:
                if _clock_s() > self._until:  # nobody can say that the lease is still ours
                    self.lost.set()
                    return

    def still_held(self) -> bool:
        """Ask the ledger now, and renew: what sleeps past its expiry must not trust the last beat."""
        asked_at = _clock_s()
        held = self._ledger.renew(
            self._run, self._resources, self._ttl_s, holder=self._holder, token=self._token
        )
        if held:
            self._until = asked_at + self._ttl_s
        return held

    def mine(self) -> bool:
        """Whether the leases are still ours, as far as anybody can say: a ledger out of reach is given their time to live."""
        try:
            return not self.lost.is_set() and self.still_held()
        except ServiceUnreachable:
            return _clock_s() < self._until

    def __enter__(self) -> Heartbeat:
        if not self.still_held():
            self.lost.set()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(timeout=5)


def _clock_s() -> float:
    """Seconds on a clock that nobody sets, and that goes on while the machine is suspended, as leases do."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


__all__ = ["TTL_S", "Heartbeat", "Holder", "Lease", "Ledger", "insert_leases"]
