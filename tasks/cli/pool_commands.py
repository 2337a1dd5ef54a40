"""Commands about pools: pool, pool probe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainwright.tasks.cli.options import Debug, Json, print_json

if TYPE_CHECKING:
    from trainwright.tasks.spec.pool import Pool


def pool(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="a pool file (default: this machine)")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a pool's devices, their daily windows, holders, and the queue.

    `trainwright pool probe` finds the devices of this machine or of hosts, for a pool file.
    """
    from trainwright.tasks import units
    from trainwright.tasks.cli.pool_cluster import show_cluster
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.leases.pool_status import cluster_state, pool_document
    from trainwright.tasks.settings import Settings
    from trainwright.tasks.spec.pool import load_pool

    settings, found = Settings.from_environment(), load_pool(file)
    document = pool_document(found, settings)
    if found.engine != "ssh":
        document["cluster"] = cluster_state(found, settings)
    queue = document["queue"]
    if as_json:
        print_json(document)
        return
    fractions = any(one["cores"] for one in document["devices"])
    columns = (
        "device",
        "type",
        *(["cores"] if fractions else []),
        "host",
        "held by",
        "until",
        "run",
    )
    rows = [
        (
            str(one["id"]),
            str(one["type"]),
            *([f"{one['cores']:g}" if one["cores"] else ""] if fractions else []),
            str(one["address"]),
            one["holder"] or _availability(one),
            f"{one['until'][11:19]} UTC, unless renewed" if one["until"] else "",
            one["run"] or "",
        )
        for one in document["devices"]
    ]
    console.table(f"pool {document['pool']}", columns, rows, right=(2,) if fractions else ())
    hours = {
        str(one["host"]): (str(one["address"]), str(one["available"]), _until(one))
        for one in document["devices"]
        if one["available"]
    }
    if hours:
        console.table(
            "daily windows",
            ("host", "address", "UTC", "now"),
            [(name, *rest) for name, rest in hours.items()],
        )
    if "cluster" in document:
        show_cluster(document["cluster"])
    if queue:
        waits = [
            (
                str(one["place"]),
                str(one["holder"]),
                str(one["priority"]),
                units.seconds(one["waited_s"]),
                f"{one['needed']} of {len(one['wanted'])}",
                str(one["run"]),
            )
            for one in queue
        ]
        console.table(
            "queue",
            ("place", "holder", "priority", "waited", "devices", "run"),
            waits,
            right=(0, 2, 3),
        )


def _availability(device: dict[str, Any]) -> str:
    """Of a device that nobody holds. A cluster gives a node, not a device of the pool file."""
    if not device["available_now"]:
        return "closed now"
    return "free" if device["engine"] == "ssh" else "asked for at training"


def _until(device: dict[str, Any]) -> str:
    state, change = "open" if device["available_now"] else "closed", device["available_changes_at"]
    return f"{state} until {change[11:16]}" if change else state


def pool_probe(
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="ADDRESS",
            help="a host to ask by ssh; repeatable (default: this machine)",
        ),
    ] = None,
    slurm: Annotated[
        bool,
        typer.Option("--slurm", help="find the kinds of nodes of this machine's Slurm cluster"),
    ] = False,
    partition: Annotated[
        str | None,
        typer.Option("--partition", metavar="NAME", help="with --slurm: only nodes of this one"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="file to write the pool to")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find devices, and print or write a pool file with them."""
    import yaml

    from trainwright.estimator.named_file import write_named
    from trainwright.tasks.cli.output import check_output
    from trainwright.tasks.cli.pool_probe import probe
    from trainwright.tasks.cli.screens import console
    from trainwright.tasks.cli.slurm_probe import probe_slurm
    from trainwright.tasks.errors import BadInput
    from trainwright.tasks.settings import Settings
    from trainwright.tasks.spec.documents import validated
    from trainwright.tasks.spec.pool import Pool, is_pool

    if out is not None:
        check_output(out, "--out", "pool file", is_pool)
    if host and slurm:
        raise BadInput("--host: got it with --slurm; allowed: one of them")
    if partition is not None and not slurm:
        raise BadInput("--partition: got it without --slurm; allowed: with --slurm")
    if slurm:
        document = probe_slurm(partition, Settings.from_environment())
        validated(Pool, document, "pool")
    else:
        document = _document(probe(host or [], Settings.from_environment()))
    text = yaml.safe_dump(document, sort_keys=False)
    if out is not None:
        write_named(out, text.encode(), "--out")
    if as_json:
        print_json(document)
    elif out is None:
        console.out.print(text, markup=False, end="")
    else:
        console.err.print(f"saved to {out}")


def _document(found: Pool) -> dict[str, Any]:
    return {
        "name": found.name,
        "hosts": [
            {
                "name": one.name,
                "address": one.address,
                "devices": [entry.model_dump(exclude_none=True) for entry in one.devices],
            }
            for one in found.hosts
        ],
    }
