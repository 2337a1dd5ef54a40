"""The nodes of a pool that a cluster's queue gives out: their states, as the cluster says now."""

from __future__ import annotations

from typing import Any

from trainwright.tasks.cli.screens import console
from trainwright.tasks.errors import ServiceUnreachable
from trainwright.tasks.settings import Settings
from trainwright.tasks.slurm.nodes import shown_nodes
from trainwright.tasks.slurm.slurm_commands import options
from trainwright.tasks.spec.pool import Pool

_NAMES_SHOWN = 8


def cluster_state(pool: Pool, settings: Settings) -> dict[str, Any]:
    """`cluster` of `pool --json`: nodes of its partitions; None if unknown, and why."""
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


def show_cluster(cluster: dict[str, Any]) -> None:
    """The nodes by state and partitions."""
    nodes: list[dict[str, Any]] | None = cluster["nodes"]
    title = f"{cluster['engine'].capitalize()}'s nodes"
    if nodes is None:
        console.out.print(f"{title}: unknown: {cluster['unknown']}", markup=False)
        return
    alike: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in nodes:
        alike.setdefault((one["state"].lower(), ",".join(one["partitions"])), []).append(one)
    rows = [
        (
            state,
            str(len(those)),
            f"{sum(one['cpus_allocated'] for one in those)} of {sum(one['cpus'] for one in those)}",
            partitions,
            _names([one["name"] for one in those]),
        )
        for (state, partitions), those in sorted(alike.items())
    ]
    console.table(
        title,
        ("state", "nodes", "CPUs in use", "partitions", "names"),
        rows,
        right=(1,),
    )


def _names(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
