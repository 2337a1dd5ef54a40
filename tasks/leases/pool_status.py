"""The current state of a pool: its devices' windows, their holders, and the queue."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from trainwright.tasks.leases.ledger import Ledger
from trainwright.tasks.leases.queue import Queue
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.pool import Pool
from trainwright.tasks.spec.windows import next_change, seconds_left


def pool_document(pool: Pool, settings: Settings) -> dict[str, Any]:
    """The output of `trainwright pool --json`: devices with windows and holders, and the queue."""
    ledger = Ledger(settings.ledger_url)
    held = {lease.resource: lease for lease in ledger.held("device ")}
    now = datetime.now(UTC)
    windows = {host.name: _window(host.available, now) for host in pool.hosts}
    documents: list[dict[str, Any]] = []
    for device in pool.devices():
        lease = held.get(device.resource)
        until = datetime.fromtimestamp(lease.expires_at, UTC) if lease else None
        documents.append(
            device.model_dump()
            | windows[device.host]
            | {
                "holder": lease.holder if lease else None,
                "run": lease.run if lease else None,
                "until": until.isoformat(timespec="seconds") if until else None,
                "expires_in_s": round((until - now).total_seconds(), 1) if until else None,
                "revoked_by": lease.revoked_by if lease else None,
            }
        )
    names = {device.resource for device in pool.devices()}
    queue: list[dict[str, Any]] = [
        {
            "place": place,
            "run": one.run,
            "holder": one.holder,
            "priority": one.priority,
            "waited_s": round(waited_s, 1),
            "needed": one.needed,
            "wanted": sorted(one.wanted),
        }
        for place, (one, waited_s) in enumerate(Queue(ledger).waiting(), start=1)
        if one.wanted & names
    ]
    return {"pool": pool.name, "engine": pool.engine, "devices": documents, "queue": queue}


def _window(available: str | None, now: datetime) -> dict[str, Any]:
    """A host's daily window (UTC; None: always open), whether it is open, and its next change."""
    change = next_change(available, now) if available else None
    return {
        "available": available,
        "available_now": seconds_left(available, now) > 0,
        "available_changes_at": change.isoformat(timespec="seconds") if change else None,
    }
