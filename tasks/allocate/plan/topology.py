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
from typing import Any, NamedTuple

from trainwright.estimator.devices import (
    DEVICE_TYPES,
    LINK_LATENCY_S,
    LINK_SHARE,
    summing_type,
)
from trainwright.tasks.allocate.plan.collectives import INNER, CollectiveModel
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.plan.kinds import Kind
from trainwright.tasks.spec.pool import LOCAL_ADDRESSES, Device, Pool

THIS_MACHINE = "this machine"
"""The machine of every local device, at any address in the pool file."""
Inventory = tuple[tuple[int, int], ...]
"""Kind and number of devices of a machine."""


class Links(NamedTuple):
    """The links of a machine: bandwidth in bytes/s and latency in s."""

    network: tuple[float, float]
    """to other machines"""
    inner: tuple[float, float]
    """between ranks on it, through its memory"""
    given: tuple[float | None, float | None]
    """what of that the pool file states"""

    def inside(self, device_type: str | None) -> tuple[float, float]:
        """Between ranks on it that sum on their devices of this type; None: through memory."""
        kind = DEVICE_TYPES.get(device_type or "")
        if kind is None or kind.link_bytes_per_s is None:
            return self.inner
        bandwidth, latency = self.given
        return (
            bandwidth or LINK_SHARE * kind.link_bytes_per_s,
            latency or LINK_LATENCY_S,
        )


@dataclass(frozen=True)
class Site:
    """Machines with the same devices and the same network."""

    machines: tuple[str, ...]
    local: bool
    room: dict[int, int]
    """Devices on each machine, by kind."""
    links: Links
    """Of each machine; this one's may have been measured."""

    @property
    def network(self) -> tuple[float, float]:
        """Bandwidth in bytes/s, latency in s, to other machines."""
        return self.links.network

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
            Site(tuple(names), names[0] == THIS_MACHINE, dict(inventory), links_of_site)
            for (_, links_of_site, inventory), names in alike.items()
        ]
        self.groups = [
            Group(number, kinds[index], count * len(site.machines))
            for number, site in enumerate(self.sites)
            for index, count in site.room.items()
        ]
        self.kinds = [kinds[index] for index in sorted(kinds)]
        self._place = {kind.index: place for place, kind in enumerate(self.kinds)}
        used = [links[name] for name in machines] or [*links.values()]
        types = {device.type for device in devices}
        inner = [one.inside(summing_type([name])) for one in used for name in types]
        measured = model.estimate.local_link
        if measured is not None and THIS_MACHINE in machines:
            inner.append((measured.bandwidth_bytes_per_s, measured.latency_s))
        inner += [one.inner for one in used]
        self.collectives = CollectiveModel(model.estimate, [one.network for one in used], inner)

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
        one = Links(
            (PAYLOAD * network.bandwidth, network.latency),
            inner,
            (host.inner.bandwidth, host.inner.latency),
        )
        found[name] = _slower_links(found[name], one) if name in found else one
    return found


def with_bandwidth(pool: Pool, factor: float) -> Pool:
    """The pool with so many times the bandwidth between hosts.

    Inside them it is the same, but through the memory of hosts whose devices sum on their own.
    """
    networks, hosts = pool.networks(), []
    for host in pool.hosts:
        own = networks[host.name].bandwidth
        inner = host.inner.bandwidth or max(INNER[0], own)
        changed = {"network": host.network.model_copy(update={"bandwidth": factor * own})}
        if not any(summing_type([one.type]) for one in host.devices):
            changed["inner"] = host.inner.model_copy(update={"bandwidth": inner})
        hosts.append(host.model_copy(update=changed))
    return pool.model_copy(update={"hosts": hosts})


def _slower_links(one: Links, other: Links) -> Links:
    bandwidths, latencies = (
        [value for value in values if value is not None]
        for values in zip(one.given, other.given, strict=True)
    )
    return Links(
        _slower(one.network, other.network),
        _slower(one.inner, other.inner),
        (min(bandwidths, default=None), max(latencies, default=None)),
    )


def _slower(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return min(one[0], other[0]), max(one[1], other[1])
