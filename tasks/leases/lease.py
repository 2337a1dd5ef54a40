"""One lease, and the statements that write leases."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sql
from sqlalchemy.engine import Connection

from trainwright.tasks.leases.tables import Holder, alive, leases, tokens

# Tokens are at least the seconds since this time, so a ledger that was lost and created again
# issues larger tokens than before.
_TOKENS_FROM_S = 1_700_000_000


@dataclass(frozen=True)
class Lease:
    """A lease on a resource.

    `revoked_by` is the run that requests the resource: one with a higher priority, or the holding
    run itself, which must plan again.
    """

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
        """The holder's name in messages, with its process if it is on this machine."""
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


def insert_leases(
    connection: Connection,
    resources: Iterable[str],
    holder: Holder,
    run: str,
    now: float,
    ttl_s: float,
    priority: int,
) -> int | Lease:
    """Write leases on free, expired or own resources; needs a serialised transaction.

    Returns the token, or the conflicting lease. Renewals run concurrently, so the rows are locked:
    a lease found expired can't be renewed afterwards.
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
    connection.execute(sql.delete(tokens))  # the next token depends only on the newest
    connection.execute(sql.insert(tokens).values(id=token))
    connection.execute(sql.delete(leases).where(leases.c.resource.in_(wanted)))
    values = {"run": run, "token": token, "priority": priority, **holder.row(now + ttl_s)}
    if wanted:
        connection.execute(
            sql.insert(leases), [{"resource": resource, **values} for resource in wanted]
        )
    return token
