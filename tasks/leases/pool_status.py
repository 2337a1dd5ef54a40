"""The current state of a pool: windows of its devices, holders, queue; the nodes of a cluster."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from trainwright.tasks.errors import ServiceUnreachable
from trainwright.tasks.leases.ledger import Ledger
from trainwright.tasks.leases.queue import Queue
from trainwright.tasks.settings import Settings
from trainwright.tasks.slurm.nodes import shown_nodes
from trainwright.tasks.slurm.slurm_commands import options
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


def cluster_state(pool: Pool, settings: Settings) -> dict[str, Any]:
    """`cluster` of `pool --json`: nodes of its partitions; None if unknown, and why.

    Waits for Slurm's answer. Raises BadInput if the settings about Slurm are wrong.
    """
    state: dict[str, Any] = {"engine": pool.engine, "nodes": None, "unknown": ""}
    if pool.engine != "slurm":
        return state | {"unknown": "the cluster is asked at training only"}
    asked = [options(pool, host, settings).partition for host in pool.hosts]
    partitions = [] if None in asked else [name for one in asked for name in (one or "").split(",")]
    try:
        nodes = [one for one in shown_nodes(settings) if one.offers(partitions)]
    except ServiceUnreachable as error:
        return state | {"unknown": str(error)}
    fields = ("name", "state", "partitions", "cpus", "cpus_allocated", "memory_mib", "gpus")
    return state | {"nodes": [{name: getattr(one, name) for name in fields} for one in nodes]}


def _window(available: str | None, now: datetime) -> dict[str, Any]:
    """A host's daily window (UTC; None: always open), whether it is open, and its next change."""
    change = next_change(available, now) if available else None
    return {
        "available": available,
        "available_now": seconds_left(available, now) > 0,
        "available_changes_at": change.isoformat(timespec="seconds") if change else None,
    }
