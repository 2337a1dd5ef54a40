"""Shows the nodes of a pool that a cluster's queue gives out."""

from __future__ import annotations

from typing import Any

from trainwright.tasks.cli.screens import console

_NAMES_SHOWN = 8


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
