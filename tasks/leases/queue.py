"""The queue for devices: waiting runs in the ledger's database. `queue_order` defines the order.

A run that does not poll for `ttl_s`, or whose local process died, is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import sqlalchemy as sql
from sqlalchemy.engine import Connection

from trainwright.tasks.leases import queue_order
from trainwright.tasks.leases.lease import Lease, insert_leases
from trainwright.tasks.leases.ledger import TTL_S, Ledger
from trainwright.tasks.leases.queue_order import AGE_S, Holding, Waiter
from trainwright.tasks.leases.tables import Holder, alive, clock, leases, waiters


@dataclass(frozen=True)
class Turn:
    """A run's position in the queue."""

    place: int
    """1: the next one"""
    length: int
    """number of runs in the queue"""
    rivals: int
    """number of runs ahead that want one of its devices; at 0, its turn may come at any moment, so
    it should poll often"""
    available: frozenset[str]
    """the devices that it may take now"""
    waited_s: float
    blocked_by: Lease | None
    """a lease of another run on one of its devices, if any"""


class Queue:
    """The runs that wait for a ledger's devices. Each rises one priority level per `age_s`."""

    def __init__(self, ledger: Ledger, age_s: float = AGE_S) -> None:
        self._ledger, self._age_s = ledger, age_s

    def look(
        self,
        run: str,
        holder: Holder,
        wanted: Iterable[str],
        needed: int,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        ttl_s: float = TTL_S,
    ) -> Turn:
        """Join the queue, or keep the place in it. Returns the run's position.

        Requests missing devices from runs with lower priority. `deadline_s` counts from the
        arrival in the queue, which stays the same if `wanted` or `needed` change.
        """
        names = sorted(set(wanted))

        def statements(connection: Connection) -> Turn:
            now = clock(connection)
            queue = self._waiting(connection, now)
            since = next((one.enqueued_at for one in queue if one.run == run), now)
            deadline_at = None if deadline_s is None else since + deadline_s
            me = Waiter(run, holder.name, priority, deadline_at, since, needed, frozenset(names))
            values = {
                "priority": priority,
                "deadline_at": deadline_at,
                "enqueued_at": since,
                "needed": needed,
                "wanted": names,
                **holder.row(now + ttl_s),
            }
            # Import only the dialect in use: each takes a while.
            insert: Any = import_module(f"sqlalchemy.dialects.{connection.dialect.name}").insert
            connection.execute(
                insert(waiters)
                .values(run=run, **values)
                .on_conflict_do_update(index_elements=["run"], set_=values)
            )
            return self._turn(connection, me, [one for one in queue if one.run != run], now)

        return self._ledger.database.autocommit(statements)

    def keep(self, run: str, ttl_s: float = TTL_S) -> tuple[Turn, Waiter] | None:
        """Keep a waiting run's place. Returns its position and entry, None if it is not queued."""

        def statements(connection: Connection) -> tuple[Turn, Waiter] | None:
            now = clock(connection)
            queue = self._waiting(connection, now)
            me = next((one for one in queue if one.run == run), None)
            if me is None:
                return None
            connection.execute(
                sql.update(waiters).where(waiters.c.run == run).values(expires_at=now + ttl_s)
            )
            return self._turn(connection, me, [one for one in queue if one.run != run], now), me

        return self._ledger.database.autocommit(statements)

    def take(
        self,
        run: str,
        holder: Holder,
        resources: Iterable[str],
        *,
        priority: int = 0,
        ttl_s: float = TTL_S,
    ) -> int | None:
        """Lease devices and leave the queue, if it is this run's turn.

        Returns the token; None if it is not its turn. The run keeps what it already holds, unless
        another run requested it. A run outside the queue comes after all runs in it.
        """
        names = set(resources)

        def statements(connection: Connection) -> int | None:
            now = clock(connection)
            queue = queue_order.in_order(self._waiting(connection, now), now, self._age_s)
            place = next((number for number, one in enumerate(queue) if one.run == run), len(queue))
            taken, own = self._leases(connection, now, run, holder.name)
            if queue_order.available(names, queue[:place], taken) | own & names != names:
                return None
            token = insert_leases(connection, names, holder, run, now, ttl_s, priority)
            if isinstance(token, Lease):  # its holder renewed an expired lease just now
                return None
            connection.execute(sql.delete(waiters).where(waiters.c.run == run))
            return token

        return self._ledger.database.serialised(statements)

    def leave(self, run: str) -> None:
        """Leave the queue; no error if the run is not in it."""
        self._ledger.database.autocommit(
            lambda connection: connection.execute(sql.delete(waiters).where(waiters.c.run == run))
        )

    def waiting(self) -> list[tuple[Waiter, float]]:
        """The waiting runs in order, and how many seconds each has waited."""

        def statements(connection: Connection) -> list[tuple[Waiter, float]]:
            now = clock(connection)
            rows = connection.execute(sql.select(waiters)).all()
            ordered = queue_order.in_order(
                [_waiter(row) for row in rows if alive(row, now)], now, self._age_s
            )
            return [(one, max(0.0, now - one.enqueued_at)) for one in ordered]

        return self._ledger.database.autocommit(statements)

    def _turn(self, connection: Connection, me: Waiter, others: list[Waiter], now: float) -> Turn:
        queue = queue_order.in_order([*others, me], now, self._age_s)
        place = queue.index(me)
        taken, own = self._leases(connection, now, me.run, me.holder)
        free = queue_order.available(me.wanted, queue[:place], taken) | own & me.wanted
        if len(free) < me.needed:
            held: dict[str, list[Lease]] = {}
            for lease in taken.values():
                if lease.resource in me.wanted:
                    held.setdefault(lease.run, []).append(lease)
            runs = [
                Holding(
                    run,
                    max(one.priority for one in own),
                    max(one.token for one in own),
                    frozenset(one.resource for one in own),
                )
                for run, own in held.items()
            ]
            for one in queue_order.to_revoke(me, queue[:place], runs):
                connection.execute(
                    sql.update(leases)
                    .where(
                        leases.c.run == one.run,
                        leases.c.token <= one.token,
                        leases.c.resource.in_(sorted(one.resources)),
                    )
                    .values(revoked_by=me.run)
                )
        blocked_by = next((taken[name] for name in sorted(me.wanted) if name in taken), None)
        rivals = sum(not one.wanted.isdisjoint(me.wanted) for one in queue[:place])
        return Turn(place + 1, len(queue), rivals, free, max(0.0, now - me.enqueued_at), blocked_by)

    def _waiting(self, connection: Connection, now: float) -> list[Waiter]:
        """The waiting runs that are alive. Drops the others."""
        living, dead = [], []
        for row in connection.execute(sql.select(waiters)).all():
            if alive(row, now):
                living.append(_waiter(row))
            else:
                dead.append((row.run, row.expires_at))
        if dead:  # checks the expiry again, because one may have polled just now
            connection.execute(
                sql.delete(waiters).where(sql.tuple_(waiters.c.run, waiters.c.expires_at).in_(dead))
            )
        return living

    def _leases(
        self, connection: Connection, now: float, run: str, holder: str
    ) -> tuple[dict[str, Lease], frozenset[str]]:
        """Other runs' leases by resource, and the resources of this run and holder."""
        rows = connection.execute(sql.select(leases)).all()
        held = [Lease.of(row) for row in rows if alive(row, now)]
        own = frozenset(
            one.resource
            for one in held
            if (one.run, one.holder, one.revoked_by) == (run, holder, None)
        )
        return {one.resource: one for one in held if one.resource not in own}, own


def _waiter(row: Any) -> Waiter:
    return Waiter(
        row.run,
        row.holder,
        row.priority,
        row.deadline_at,
        row.enqueued_at,
        row.needed,
        frozenset(row.wanted),
    )
