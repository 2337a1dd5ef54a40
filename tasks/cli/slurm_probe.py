"""Finds the kinds of nodes of a Slurm cluster, for a pool file.

It reads `scontrol show nodes`: nodes that are down, drained or failing are left out, and nodes with
the same partition, features, GPUs, CPUs and memory are one kind, a host with a count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from trainwright.estimator.devices import DEVICE_TYPES
from trainwright.tasks import progress
from trainwright.tasks.errors import BadInput
from trainwright.tasks.settings import Settings
from trainwright.tasks.slurm import slurm_commands
from trainwright.tasks.slurm.nodes import Node, shown_nodes


def pool_document(nodes: Iterable[Node], default: str, partition: str | None) -> dict[str, Any]:
    """The pool file of these nodes; those of `partition`, if it is given.

    Raises BadInput if none takes jobs.
    """
    every = list(nodes)
    wanted = [node for node in every if partition is None or partition in node.partitions]
    kinds = Counter(
        (_partition(node, default, partition), node.features, node.gpus, node.cpus, node.memory_mib)
        for node in wanted
        if node.there and node.partitions
    )
    hosts: list[dict[str, Any]] = []
    for (where, features, gpus, cpus, memory_mib), count in kinds.items():
        devices, options = _devices(features, gpus, cpus)
        if not devices:
            continue
        if where is not None and partition is None:
            options["partition"] = where
        if features:
            options["constraint"] = "&".join(features)
        one = {"name": _name(devices[0], {host["name"] for host in hosts}), "count": count}
        one |= {"devices": devices, "memory": f"{memory_mib}MiB"}
        hosts.append(one | ({"slurm": options} if options else {}))
    if not hosts:
        there = sorted({name for node in every for name in node.partitions})
        raise BadInput(
            f"--partition: got {partition or 'none'}; no node of it that takes jobs has known "
            f"devices; allowed: {', '.join(there) or 'a partition with nodes'}"
        )
    chosen = {"slurm": {"partition": partition}} if partition is not None else {}
    return {"name": "probed", "engine": "slurm", **chosen, "hosts": hosts}


def _partition(node: Node, default: str, given: str | None) -> str | None:
    """The partition to ask for; None: the one that counts without asking."""
    if given is not None or default in node.partitions:
        return given
    return next(iter(node.partitions), None)


def _devices(
    features: tuple[str, ...], gpus: tuple[tuple[str, int], ...], cpus: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A kind's devices, and the options of its jobs. The CPUs of a node with GPUs serve these."""
    if not gpus:
        return [{"type": "cpu", "cores": float(cpus)}], {}
    known = {name: _type_of(name, features) for name, _ in gpus}
    name, count = gpus[0]
    if len(gpus) > 1 or known[name] is None:
        said = ", ".join(f"{one}:{number}" for one, number in gpus)
        progress.emit("notice", message=f"nodes with {said}: not one known device type; left out")
        return [], {}
    options: dict[str, Any] = {"cpus_per_gpu": max(1, cpus // count)}
    if name != "gpu":
        options["gres"] = name
    return [{"type": known[name], "count": count}], options


def _type_of(gres: str, features: tuple[str, ...]) -> str | None:
    """The device type that the GPUs' name, or a feature, names; the smaller one if two do."""
    for text in (gres, *features):
        words = set(re.split(r"[^a-z0-9]+", text.lower().replace("rtx_", "rtx")))
        alike = [
            one
            for name, one in DEVICE_TYPES.items()
            if name.count("-") and name.split("-")[1] in words and one.memory_bytes
        ]
        exact = [one for one in alike if set(one.name.split("-")[2:]) <= words]
        if exact or alike:
            least = min(exact or alike, key=lambda one: one.memory_bytes or 0.0)
            if not exact and len(alike) > 1:
                others = ", ".join(one.name for one in alike)
                message = f"GPUs {text} may be {others}; {least.name} is assumed"
                progress.emit("notice", message=message)
            return least.name
    return None


def _name(device: dict[str, Any], used: set[str]) -> str:
    kind = device["type"].removeprefix("nvidia-").removeprefix("amd-")
    plain = f"{kind}{int(device['cores'])}" if "cores" in device else kind
    numbered = (f"{plain}-kind{number}" for number in range(2, 10_000))
    return next(one for one in (plain, *numbered) if one not in used)


def probe_slurm(partition: str | None, settings: Settings) -> dict[str, Any]:
    """The pool file of the cluster that this machine's Slurm commands reach.

    Raises BadInput, ServiceUnreachable.
    """
    partitions = slurm_commands.said(settings, "sinfo", "--noheader", "--format=%P")
    default = re.search(r"^(\S+)\*$", partitions, re.MULTILINE)
    return pool_document(shown_nodes(settings), default[1] if default else "", partition)
