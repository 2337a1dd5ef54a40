"""The nodes of a Slurm cluster, as `scontrol show nodes` lists them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from trainwright.tasks.settings import Settings
from trainwright.tasks.slurm import slurm_commands

_ABSENT = {
    *("DOWN", "ERROR", "FAIL", "FAILING", "FUTURE", "INVAL", "INVALID_REG", "UNKNOWN"),
    *("DRAIN", "DRAINED", "DRAINING"),
}
_SILENT = {"NOT_RESPONDING", "NO_RESPOND"}
_STARTED_ON_DEMAND = {
    *("POWER_DOWN", "POWERED_DOWN", "POWERING_DOWN", "POWER_UP", "POWERING_UP"),
}
_SIGNS = "*~#!%$@^-+"
"""What Slurm's commands put after a state: * is silent, ~ # ! % are of its power."""


@dataclass(frozen=True)
class Node:
    """What Slurm says about a node."""

    name: str
    partitions: tuple[str, ...]
    features: tuple[str, ...]
    gpus: tuple[tuple[str, int], ...]
    """Slurm's names of its GPUs, such as gpu or gpu:a100, and their numbers"""
    cpus: int
    cpus_allocated: int
    memory_mib: int
    state: str

    @property
    def there(self) -> bool:
        """Whether it takes jobs, now or when it is free."""
        words = {word.rstrip(_SIGNS) for word in self.state.split("+")}
        silent = "*" in self.state or not words.isdisjoint(_SILENT)
        # a node of a cloud that Slurm starts when a job needs it is silent until then
        off = re.search("[~#!%]", self.state) or not words.isdisjoint(_STARTED_ON_DEMAND)
        return words.isdisjoint(_ABSENT) and (not silent or bool(off))

    def offers(self, partitions: Iterable[str]) -> bool:
        """Whether it belongs to one of these partitions; if none is given, always."""
        wanted = set(partitions)
        return not wanted or not wanted.isdisjoint(self.partitions)


def nodes_of(shown: str) -> list[Node]:
    """The nodes in the output of `scontrol -o show nodes`: one a line, with FIELD=VALUE."""
    found = []
    for line in shown.splitlines():
        fields = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line))
        if "NodeName" in fields:
            reserved = int(fields.get("MemSpecLimit", "0"))
            found.append(
                Node(
                    name=fields["NodeName"],
                    partitions=_listed(fields.get("Partitions", "")),
                    features=_listed(fields.get("ActiveFeatures", "")),
                    gpus=_gpus(fields.get("Gres", "")),
                    cpus=int(fields["CPUEfctv" if "CPUEfctv" in fields else "CPUTot"]),
                    cpus_allocated=int(fields.get("CPUAlloc", "0")),
                    memory_mib=int(fields["RealMemory"]) - reserved,
                    state=fields["State"],
                )
            )
    return found


def _listed(text: str) -> tuple[str, ...]:
    return () if text in ("", "(null)") else tuple(text.split(","))


def _gpus(gres: str) -> tuple[tuple[str, int], ...]:
    """`gpu:a100:8(S:0-1),nic:2` -> gpu:a100, 8."""
    found = re.findall(r"(?:^|,)(gpu(?::[^:,()]+)?):(\d+)(?=[(,]|$)", gres)
    return tuple((name, int(count)) for name, count in found)


def shown_nodes(settings: Settings) -> list[Node]:
    """The nodes of the cluster that this machine's commands reach. Raises ServiceUnreachable."""
    return nodes_of(slurm_commands.said(settings, "scontrol", "--oneliner", "show", "nodes"))
