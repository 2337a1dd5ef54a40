"""The machines of a plan and the devices on them, grouped so that alike machines are one choice.

Machines with the same devices and network form a site: a plan that uses one of them is as good as
a plan that uses another. Devices of a kind at a site are a group, and a configuration is a number
of ranks for each group. This machine, whose link was measured, is a separate site.

`placement` puts ranks on machines; `collectives` predicts the time of their sums. A topology knows
only devices, not how a model is divided among ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.tasks.allocate.plan.collectives import INNER, CollectiveModel
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.plan.kinds import Kind
from trainwright.tasks.spec.pool import LOCAL_ADDRESSES, Device, Pool

THIS_MACHINE = "this machine"
"""The machine of every local device, at any address in the pool file."""
Inventory = tuple[tuple[int, int], ...]
"""Kind and number of devices of a machine."""
Links = tuple[tuple[float, float], tuple[float, float]]
"""Bandwidth in bytes/s and latency in s, between machines and inside a machine."""


@dataclass(frozen=True)
class Site:
    """Machines with the same devices and the same network."""

    machines: tuple[str, ...]
    local: bool
    room: dict[int, int]
    """Devices on each machine, by kind."""
    network: tuple[float, float]
    """Bandwidth in bytes/s, latency in s."""
    inner: tuple[float, float]
    """The same inside a machine, where it was not measured."""

    @property
    def size(self) -> int:
        """Devices on each machine."""
        return sum(self.room.values())


@dataclass(frozen=True)
class Group:
    """The devices of a kind at a site."""

    site: int
    kind: Kind
    count: int


class Topology:
    """The sites and groups of some devices. With `apart`, every machine is a separate site."""

    def __init__(self, model: CostModel, devices: Sequence[Device], *, apart: bool = False) -> None:
        self.model = model
        self.order = {device.id: place for place, device in enumerate(devices)}
        machines: dict[str, dict[int, list[Device]]] = {}
        kinds: dict[int, Kind] = {}
        for device in devices:
            kind = model.kind(device)
            kinds[kind.index] = kind
            machine = machines.setdefault(machine_of(device), {})
            machine.setdefault(kind.index, []).append(device)
        self.devices = machines
        """By machine and kind."""
        links = links_of(model.pool)
        alike: dict[tuple[str | None, Links, Inventory], list[str]] = {}
        for name, held in machines.items():
            own = apart or name == THIS_MACHINE
            inventory = tuple(sorted((index, len(some)) for index, some in held.items()))
            alike.setdefault((name if own else None, links[name], inventory), []).append(name)
        self.sites = [
            Site(tuple(names), names[0] == THIS_MACHINE, dict(inventory), network, inner)
            for (_, (network, inner), inventory), names in alike.items()
        ]
        self.groups = [
            Group(number, kinds[index], count * len(site.machines))
            for number, site in enumerate(self.sites)
            for index, count in site.room.items()
        ]
        self.kinds = [kinds[index] for index in sorted(kinds)]
        self._place = {kind.index: place for place, kind in enumerate(self.kinds)}
        used = [links[name] for name in machines] or [*links.values()]
        self.collectives = CollectiveModel(
            model.estimate, [network for network, _ in used], [inner for _, inner in used]
        )

    @functools.cached_property
    def most_sharing_memory(self) -> int:
        """The most ranks that can share the memory of a machine."""
        sharing = {kind.index for kind in self.kinds if kind.shares_memory}
        return (
            max(
                (
                    sum(count for index, count in site.room.items() if index in sharing)
                    for site in self.sites
                ),
                default=0,
            )
            or 1
        )

    @functools.cached_property
    def site_of(self) -> Any:
        """The site of each group: a numpy array."""
        import numpy as np

        return np.array([group.site for group in self.groups], dtype=int)

    @functools.cached_property
    def kind_of(self) -> Any:
        """The position in `kinds` of each group's kind: a numpy array."""
        import numpy as np

        return np.array([self._place[group.kind.index] for group in self.groups], dtype=int)

    @functools.cached_property
    def on_each(self) -> Any:
        """Devices on each machine of a site, by site (rows) and kind (columns): a numpy array."""
        import numpy as np

        found = np.zeros((len(self.sites), len(self.kinds)))
        for number, site in enumerate(self.sites):
            for index, count in site.room.items():
                found[number, self._place[index]] = count
        return found

    def by_kind(self, counts: Any) -> Any:
        """Sums of counts by group, by kind: a numpy array."""
        import numpy as np

        return np.bincount(self.kind_of, counts, len(self.kinds))

    def counts_of(self, devices: Sequence[Device]) -> list[int]:
        """The number of these devices in each group."""
        site_of = {name: number for number, site in enumerate(self.sites) for name in site.machines}
        held = Counter(
            (site_of[machine_of(device)], self.model.kind(device).index) for device in devices
        )
        return [held[group.site, group.kind.index] for group in self.groups]

    def in_use(self, counts: Sequence[int]) -> dict[int, list[int]]:
        """The sites with ranks, each with its groups that have some."""
        found: dict[int, list[int]] = {}
        for place in itertools.compress(range(len(self.groups)), counts):
            found.setdefault(self.groups[place].site, []).append(place)
        return found


def machine_of(device: Device) -> str:
    """The machine of a device: hosts with the same address are one machine."""
    return THIS_MACHINE if device.local else device.address


PAYLOAD = 1448 / 1538
"""The share of a network's bandwidth that data gets: TCP in Ethernet frames, with their gaps."""


def links_of(pool: Pool) -> dict[str, Links]:
    """The links between and inside machines, by machine: the slowest of its hosts'."""
    networks, found = pool.networks(), dict[str, Links]()
    for host in pool.hosts:
        local = host.address in LOCAL_ADDRESSES
        name, network = THIS_MACHINE if local else host.address, networks[host.name]
        inner = (
            host.inner.bandwidth or max(INNER[0], network.bandwidth),
            host.inner.latency or min(INNER[1], network.latency),
        )
        one = ((PAYLOAD * network.bandwidth, network.latency), inner)
        found[name] = tuple(map(_slower, found[name], one)) if name in found else one  # type: ignore[assignment]
    return found


def with_bandwidth(pool: Pool, factor: float) -> Pool:
    """The pool with so many times the bandwidth between hosts, and the same inside them."""
    networks, hosts = pool.networks(), []
    for host in pool.hosts:
        own = networks[host.name].bandwidth
        inner = host.inner.bandwidth or max(INNER[0], own)
        changed = {
            "network": host.network.model_copy(update={"bandwidth": factor * own}),
            "inner": host.inner.model_copy(update={"bandwidth": inner}),
        }
        hosts.append(host.model_copy(update=changed))
    return pool.model_copy(update={"hosts": hosts})


def _slower(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return min(one[0], other[0]), max(one[1], other[1])
