"""The ledger: leases on resources in one SQL table, and the heartbeat that renews them.

A lease covers several resources: the holder gets all or none. The holder's heartbeat renews it. It
ends by release, by expiry or, on the same machine, with the holder's process. Each lease has a
fencing token larger than every earlier one, which distinguishes the current holder from one that
slept past its expiry, even if both have the same name. SQLite by default; PostgreSQL for several
machines. `queue` holds the waiting runs.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
from collections.abc import Iterable

import sqlalchemy as sql
from sqlalchemy.engine import Connection

from trainwright.tasks.errors import RunHeld, ServiceUnreachable
from trainwright.tasks.leases.database import Database, database_at
from trainwright.tasks.leases.lease import Lease, insert_leases
from trainwright.tasks.leases.tables import Holder, alive, clock, leases, moment, since_boot_s

_log = logging.getLogger(__name__)

__all__ = ["TTL_S", "Heartbeat", "Holder", "Lease", "Ledger"]

TTL_S = 60.0


class Ledger:
    """The table of leases at an SQLAlchemy URL. Raises BadInput for an invalid URL."""

    def __init__(self, url: str) -> None:
        self._url = url
        database_at(url, os.getpid())

    @property
    def database(self) -> Database:
        """The database, over this process's own connections."""
        return database_at(self._url, os.getpid())

    def take(self, resources: Iterable[str], holder: Holder, run: str, ttl_s: float = TTL_S) -> int:
        """Lease all resources for a run, or none; renews those that the run already holds.

        Returns the token. Ignores the queue: use `Queue.take` for devices. Raises RunHeld,
        naming holder and resource, if one is held for another run, or by another holder for this
        run.
        """

        def statements(connection: Connection) -> int:
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

        return self.database.serialised(statements)

    def renew(
        self,
        run: str,
        resources: Iterable[str],
        ttl_s: float = TTL_S,
        *,
        holder: str | None = None,
        token: int | None = None,
    ) -> bool:
        """Extend a run's leases that this holder still has, with this token.

        Returns whether those were all of them.
        """
        wanted = sorted(set(resources))
        mine = (leases.c.resource.in_(wanted), leases.c.run == run, *_held_by(holder, token))

        def statements(connection: Connection) -> bool:
            later = sql.update(leases).where(*mine).values(expires_at=moment(connection) + ttl_s)
            return bool(connection.execute(later).rowcount == len(wanted))

        return self.database.autocommit(statements)

    def release(
        self,
        run: str,
        resources: Iterable[str] | None = None,
        *,
        holder: str | None = None,
        token: int | None = None,
    ) -> int:
        """End a run's leases: all, those on `resources`, of a holder, with a token.

        Returns their number; 0 is not an error.
        """
        statement = sql.delete(leases).where(leases.c.run == run, *_held_by(holder, token))
        if resources is not None:
            statement = statement.where(leases.c.resource.in_(sorted(set(resources))))
        return int(
            self.database.autocommit(lambda connection: connection.execute(statement).rowcount)
        )

    def held(self, prefix: str = "") -> list[Lease]:
        """The current leases on resources whose name begins with `prefix`, sorted by resource."""

        def statements(connection: Connection) -> list[Lease]:
            now = clock(connection)
            rows = connection.execute(sql.select(leases).order_by(leases.c.resource)).all()
            return [
                Lease.of(row) for row in rows if row.resource.startswith(prefix) and alive(row, now)
            ]

        return self.database.autocommit(statements)

    def holds(self, run: str, resource: str) -> bool | None:
        """Whether a resource is currently held for a run; None if no lease on it is recorded."""

        def statements(connection: Connection) -> bool | None:
            row = connection.execute(
                sql.select(leases).where(leases.c.resource == resource)
            ).first()
            return None if row is None else row.run == run and alive(row, clock(connection))

        return self.database.autocommit(statements)

    def holder_of(self, resource: str) -> Holder | None:
        """The current holder of a resource, with its process if on this machine; None if free."""

        def statements(connection: Connection) -> Holder | None:
            row = connection.execute(
                sql.select(leases).where(leases.c.resource == resource)
            ).first()
            if row is None or not alive(row, clock(connection)):
                return None
            return Holder(row.holder, row.pid if row.machine == socket.gethostname() else None)

        return self.database.autocommit(statements)

    def revoked_by(self, run: str) -> str | None:
        """The run that requests this run's devices: another one, or itself; None if none does."""
        statement = sql.select(leases.c.revoked_by).where(
            leases.c.run == run, leases.c.revoked_by.is_not(None)
        )
        asked = self.database.autocommit(
            lambda connection: connection.execute(statement).scalars().all()
        )
        return next((one for one in asked if one != run), run if asked else None)

    def ask_to_replan(self, run: str, resources: Iterable[str]) -> int:
        """Request a replan, by requesting these devices of the run for the run itself.

        Requests of other runs stay. Returns how many of the devices the run holds.
        """
        mine = (leases.c.run == run, leases.c.resource.in_(sorted(set(resources))))

        def statements(connection: Connection) -> int:
            connection.execute(
                sql.update(leases)
                .where(*mine, leases.c.revoked_by.is_(None))
                .values(revoked_by=run)
            )
            return len(connection.execute(sql.select(leases.c.resource).where(*mine)).all())

        return self.database.serialised(statements)

    def clear_replan(self, run: str) -> None:
        """Remove the request for a replan, which the run has seen."""
        statement = (
            sql.update(leases)
            .where(leases.c.run == run, leases.c.revoked_by == run)
            .values(revoked_by=None)
        )
        self.database.autocommit(lambda connection: connection.execute(statement))


def _held_by(holder: str | None, token: int | None) -> list[sql.ColumnElement[bool]]:
    named = [] if holder is None else [leases.c.holder == holder]
    return named if token is None else [*named, leases.c.token == token]


class Heartbeat:
    """Renews a run's leases inside a block: first on entry, then from a thread.

    `lost` is set when a lease has another holder, or expired while the ledger was unreachable.
    With a `token`, a later lease of the same run and holder counts as another's. `revoked` is set
    when a run requests one of them: the holder should save and release, or plan again if it is the
    same run.

    Entering raises ServiceUnreachable if the ledger is unreachable, because the age of the lease
    is then unknown.
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
        self._ledger, self._run, self._ttl_s = ledger, run, ttl_s
        self._resources = sorted(set(resources))
        self._holder, self._token = holder, token
        self._until = -math.inf
        self.lost = threading.Event()
        self.unreachable: ServiceUnreachable | None = None
        """why the last renewal failed, if the ledger did not answer"""
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
                continue
            except ServiceUnreachable as error:
                self.unreachable = error
            except Exception:  # noqa: BLE001 - outermost of this thread, which must go on
                _log.exception("heartbeat of %s failed; it is tried again", self._run)
            if since_boot_s() > self._until:  # the lease must be assumed expired
                self.lost.set()
                return

    def still_held(self) -> bool:
        """Renew now: a process that slept past the expiry must not trust its last heartbeat."""
        asked_at = since_boot_s()
        held = self._ledger.renew(
            self._run, self._resources, self._ttl_s, holder=self._holder, token=self._token
        )
        self.unreachable = None
        if held:
            self._until = asked_at + self._ttl_s
        return held

    def mine(self) -> bool:
        """Whether the leases are still held. If the ledger is unreachable: until they expire."""
        try:
            return not self.lost.is_set() and self.still_held()
        except ServiceUnreachable as error:
            self.unreachable = error
            return since_boot_s() < self._until

    def __enter__(self) -> Heartbeat:
        if not self.still_held():
            self.lost.set()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(timeout=5)
