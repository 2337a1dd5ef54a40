"""Which ranks sit where, and what their collectives take: machines that are alike, and the devices of a kind on them.

Machines with the same devices and network form a site, because a plan that uses one of them is as good as a plan that uses
another. Ranks of a kind at a site are a group, and a configuration is a count for each group. This machine, whose link was
measured, is a site of its own; so is each machine whose memory ranks of several kinds may exhaust together.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainwright.estimator.predict.communication import (
    FIGURES_BYTES,
    GRADIENT_BUCKET_BYTES,
    Link,
    all_reduce,
    all_reduces,
    on_cycle,
)
from trainwright.tasks.allocate.plan.cost import Collectives, CostModel, Kind, Triple
from trainwright.tasks.spec.pool import Device, Network

# Between two ranks of one machine, as a prior where nobody has measured it: sums lie in the host's memory whatever device a
# rank computes on (`tasks.train.collective`), so that it is one for all kinds. Never slower than the pool's network. Rounded
# from the middle of 21 measurements of a two-core machine, idle and busy: 0.56 (0.24 to 1.23) GB/s, 0.29 (0.11 to 3.1) ms;
# `tests/benchmarks/all_reduce.py` measures and prints the link of the machine it runs on.
_LOOPBACK = Link(bandwidth_bytes_per_s=0.5e9, latency_s=0.3e-3, spread=0.0)
_UNMEASURED_LOW, _UNMEASURED_HIGH = (
    1 / 2,
    3.0,
)  # of what a prior, or the pool file's network, makes of a collective
_THIS = "this machine"  # whatever the pool's hosts call its address


class Ranks(NamedTuple):
    """What the collectives' time depends on."""

    machines: int
    widest: int
    """Most ranks on a machine other than this."""
    here: int
    """Ranks on this machine."""
    total: int
    """All of them."""
    network: tuple[float, float] | None = None
    """The slowest between their machines: bandwidth in bytes/s, latency in s. None: the quickest that there is."""


class Seating(NamedTuple):
    """How the ranks of a configuration sit: so many machines of each site, evenly."""

    ranks: Ranks
    machines: tuple[tuple[int, int], ...]
    """Site and machines, for each site in use."""


@dataclass(frozen=True)
class Site:
    """Machines with the same devices."""

    machines: tuple[str, ...]
    local: bool
    room: dict[int, int]
    """Devices by kind on each machine."""
    network: tuple[float, float]
    """Bandwidth in bytes/s, latency in s."""

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


class Layout:
    """The sites and groups of some devices. Every machine is a site of its own where `apart`."""

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
        networks = self._networks(devices)
        alike: dict[
            tuple[str | None, tuple[float, float], tuple[tuple[int, int], ...]], list[str]
        ] = {}
        for name, held in machines.items():
            own = apart or name == _THIS or not self._roomy(held, kinds)
            inventory = tuple(sorted((index, len(group)) for index, group in held.items()))
            alike.setdefault((name if own else None, _ends(networks[name]), inventory), []).append(
                name
            )
        self.sites = [
            Site(tuple(names), names[0] == _THIS, dict(inventory), ends)
            for (_, ends, inventory), names in alike.items()
        ]
        self.groups = [
            Group(number, kinds[index], count * len(site.machines))
            for number, site in enumerate(self.sites)
            for index, count in site.room.items()
        ]
        self.kinds = [kinds[index] for index in sorted(kinds)]
        self.along: dict[object, Any] = {}  # what collectives take by number of ranks, for `floor`
        self._place = {kind.index: place for place, kind in enumerate(self.kinds)}
        self._link = Link(
            bandwidth_bytes_per_s=max(
                (one.bandwidth for one in networks.values()), default=model.pool.network.bandwidth
            ),
            latency_s=min(
                (one.latency for one in networks.values()), default=model.pool.network.latency
            ),
            spread=0.0,
        )
        self._inside = Link(
            bandwidth_bytes_per_s=max(
                _LOOPBACK.bandwidth_bytes_per_s, self._link.bandwidth_bytes_per_s
            ),
            latency_s=min(_LOOPBACK.latency_s, self._link.latency_s),
            spread=0.0,
        )

    def _networks(self, devices: Sequence[Device]) -> dict[str, Network]:
        """Of each machine: the slower of its hosts' networks, where it has several."""
        networks = self.model.pool.networks()
        hosts = {device.host: machine_of(device) for device in devices}
        found: dict[str, Network] = {}
        for host, machine in hosts.items():
            network = networks[host]
            found[machine] = network.slower(found[machine]) if machine in found else network
        return found

    @functools.cached_property
    def site_of(self) -> Any:
        """The site of each group: a numpy array."""
        import numpy as np

        return np.array([group.site for group in self.groups], dtype=int)

    @functools.cached_property
    def kind_of(self) -> Any:
        """The place in `kinds` of each group's: a numpy array."""
        import numpy as np

        return np.array([self._place[group.kind.index] for group in self.groups], dtype=int)

    @functools.cached_property
    def on_each(self) -> Any:
        """Devices on each machine of a site, by site and by kind: a numpy array."""
        import numpy as np

        found = np.zeros((len(self.sites), len(self.kinds)))
        for number, site in enumerate(self.sites):
            for index, count in site.room.items():
                found[number, self._place[index]] = count
        return found

    def by_kind(self, counts: Any) -> Any:
        """Counts by kind from those by group: a numpy array."""
        import numpy as np

        return np.bincount(self.kind_of, counts, len(self.kinds))

    def _roomy(self, held: dict[int, list[Device]], kinds: dict[int, Kind]) -> bool:
        """Whether ranks fit into the machine's memory whatever their shares, or depend on how many of them there are alone."""
        sharing = [
            (kinds[index], len(group))
            for index, group in held.items()
            if kinds[index].shares_memory
        ]
        if len(held) == 1:
            return True
        most, kept = (
            largest_global_batch(self.model),
            self.model.estimate.gradient_bytes,
        )  # where it accumulates
        needed = sum(
            count * (self.model.memory_bytes(kind, most, 1) + kept) for kind, count in sharing
        )
        return all(needed <= (kind.curve.memory_limit_bytes or 0.0) for kind, _ in sharing)

    def in_use(self, counts: Sequence[int]) -> dict[int, list[int]]:
        """The sites where there are ranks, each with its groups that have some."""
        found: dict[int, list[int]] = {}
        for place in itertools.compress(range(len(self.groups)), counts):
            found.setdefault(self.groups[place].site, []).append(place)
        return found

    def choices(self, counts: Sequence[int], most: Mapping[int, int]) -> list[Seating]:
        """The ways to seat so many ranks of each group that differ in their collectives: fewer machines, or fewer on each.

        `most` is how many ranks of a site's kinds fit into the memory of one of its machines, for each site that is used. None
        where they do not fit.
        """
        here, used, least = 0, {}, {}
        for number, places in self.in_use(counts).items():
            site = self.sites[number]
            if not most[number]:
                return []
            used[number] = sum(counts[place] for place in places)
            # At least so many machines for the ranks of each kind.
            least[number] = max(
                -(-counts[place] // min(site.room[self.groups[place].kind.index], most[number]))
                for place in places
            )
            if least[number] > len(site.machines):
                return []
            here += used[number] if site.local else 0
        there = [number for number in used if not self.sites[number].local]
        narrowest = max(
            (-(-used[number] // len(self.sites[number].machines)) for number in there), default=0
        )
        widest = max((-(-used[number] // least[number]) for number in there), default=0)
        bandwidths, latencies = zip(*(self.sites[number].network for number in used), strict=True)
        slowest = min(bandwidths), max(latencies)
        found: list[Seating] = []
        for width in range(narrowest, widest + 1):
            taken = {
                number: 1 if self.sites[number].local else max(least[number], -(-ranks // width))
                for number, ranks in used.items()
            }
            total = sum(taken.values())
            if not found or total < found[-1].ranks.machines:
                most_on_one = max(
                    (-(-used[number] // taken[number]) for number in there), default=0
                )
                ranks = Ranks(
                    total, most_on_one, here, sum(used.values()), slowest if total > 1 else None
                )
                found.append(Seating(ranks, tuple(sorted(taken.items()))))
        return found

    @functools.lru_cache(maxsize=100_000)  # noqa: B019 - a layout lives as long as one plan's search
    def collectives(self, ranks: Ranks) -> Collectives:
        """Ring all-reduces: of the gradients, bucket by bucket, and of the step's figures.

        One flat ring of all ranks, as Horovod and Gloo make it, which goes at the pace of its slowest link.
        """
        size = self.model.estimate.gradient_bytes
        buckets = max(1, math.ceil(size / GRADIENT_BUCKET_BYTES))
        last = size - (buckets - 1) * GRADIENT_BUCKET_BYTES
        return Collectives(
            self._sums(size + FIGURES_BYTES, buckets + 1, ranks),
            self._sums(last + FIGURES_BYTES, 2, ranks),
        )

    def _sums(self, size: float, pieces: int, ranks: Ranks) -> Triple:
        estimate, found = self.model.estimate, Triple(0.0, 0.0, 0.0)
        if ranks.here > 1 and estimate.local_link is not None:
            agreed = all_reduce(estimate.local_link, FIGURES_BYTES, ranks.total)
            local = on_cycle(
                all_reduces(estimate.local_link, size, pieces, ranks.total),
                estimate.cycle_s,
                agreed,
            )
            found = Triple(local.median, local.low, local.high)
        elif max(ranks.here, ranks.widest) > 1:
            found = _unmeasured(all_reduces(self._inside, size, pieces, ranks.total).median)
        if ranks.machines > 1:
            link = self._link
            if ranks.network is not None:
                bandwidth, latency = ranks.network
                link = Link(bandwidth_bytes_per_s=bandwidth, latency_s=latency, spread=0.0)
            between = _unmeasured(all_reduces(link, size, pieces, ranks.total).median)
            found = Triple(*map(max, found, between))
        return found

    def seats(self, counts: Sequence[int], seating: Seating) -> list[Device]:
        """The devices of a choice, in the order of the pool."""
        taken: list[Device] = []
        places_of = self.in_use(counts)
        for number, used in seating.machines:
            site, places = self.sites[number], places_of[number]
            loads = [0] * used
            for place in places:
                # Evenly, and one more for those with the fewest ranks: loads never differ by more than one.
                base, more = divmod(counts[place], used)
                extra = set(sorted(range(used), key=lambda one: loads[one])[:more])
                for one in range(used):
                    here = base + (one in extra)
                    loads[one] += here
                    taken += self.devices[site.machines[one]][self.groups[place].kind.index][:here]
        return sorted(taken, key=lambda device: self.order[device.id])


def _ends(network: Network) -> tuple[float, float]:
    return network.bandwidth, network.latency


def machine_of(device: Device) -> str:
    """The machine that a device is on: hosts of one address are one machine."""
    return _THIS if device.local else device.address


def largest_global_batch(model: CostModel) -> int:
    """The largest global batch that the job may get."""
    size = model.job.train.global_batch_size
    return min(size if size != "auto" else model.job.train.batch_bounds[1], model.data.train_rows)


def _unmeasured(median: float) -> Triple:
    return Triple(median, median * _UNMEASURED_LOW, median * _UNMEASURED_HIGH)
