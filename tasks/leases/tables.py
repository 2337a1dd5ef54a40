"""The tables of leases and of the queue, the database's clock, and which rows are alive.

Times are seconds since the epoch, by the database's own clock if it has one (PostgreSQL), so that
machines whose clocks differ agree on expiry. SQLite has none: there, a table has the time of the
machine's boot as the first process after it saw it, and the kernel's seconds since then are added.
So setting the machine's clock ends no lease. `database` runs the statements.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sql
from sqlalchemy.engine import Connection

_metadata = sql.MetaData()


def _owner() -> list[sql.Column[object]]:
    """The holder of a row, and when it expires. With a `pid`, the row ends with that process."""
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
tokens = sql.Table("tokens", _metadata, sql.Column("id", sql.Integer, primary_key=True))
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

boots = sql.Table(
    "boots",
    _metadata,
    sql.Column("boot", sql.String(36), primary_key=True),
    sql.Column("began_at", sql.Float, nullable=False),
)
_EPOCH_S = 1e9
"""Larger than any time since a boot: earlier versions stored the start of a process by the clock,
which is not compared."""


@dataclass(frozen=True)
class Holder:
    """The holder of a lease. With a `pid` (of this machine), the lease ends with that process."""

    name: str
    pid: int | None = None

    def row(self, until: float) -> dict[str, object]:
        """The columns that identify the holder of a row."""
        return {
            "holder": self.name,
            "machine": socket.gethostname(),
            "pid": self.pid,
            "expires_at": until,
            "process_started": process_started(self.pid) if self.pid is not None else None,
        }


def dag_run_holder(dag_id: str, run_id: str) -> str:
    """The holder's name for all tasks of a DAG run."""
    return f"Airflow {dag_id} {run_id}"


def clock(connection: Connection) -> float:
    """The current time."""
    return float(connection.execute(sql.select(moment(connection))).scalar_one())


def moment(connection: Connection) -> sql.ColumnElement[float]:
    """The current time as an SQL expression: the database's own clock if it has one."""
    if connection.dialect.name == "postgresql":
        return sql.cast(sql.func.extract("epoch", sql.func.clock_timestamp()), sql.Float)
    began = sql.select(boots.c.began_at).where(boots.c.boot == _boot()).scalar_subquery()
    return began + sql.literal(since_boot_s(), sql.Float)


def note_boot(connection: Connection) -> None:
    """Record when this machine's boot began, unless a process has done so since."""
    began = {"boot": _boot(), "began_at": time.time() - since_boot_s()}
    connection.execute(sql.insert(boots).prefix_with("OR IGNORE").values(began))


def since_boot_s() -> float:
    """Seconds on a clock that is never adjusted, and that runs while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_started(pid: int) -> float | None:
    """The start of a process in seconds since the boot; None if it is dead, reaped or not."""
    try:
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    # proc(5): fields 3, state, and 22, starttime, in ticks
    return None if words[0] in (b"Z", b"X") else int(words[19]) / os.sysconf("SC_CLK_TCK")


def alive(row: sql.Row[tuple[object, ...]], now: float) -> bool:
    """Whether a row is valid: not expired, and its process, if on this machine, is alive."""
    if row.expires_at <= now:
        return False
    if row.pid is None or row.machine != socket.gethostname():
        return True
    started = process_started(row.pid)
    known = row.process_started
    return started is not None and (known is None or known > _EPOCH_S or abs(started - known) < 1.0)
