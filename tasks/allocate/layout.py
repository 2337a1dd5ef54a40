"""Which ranks sit where, and what their collectives take: machines that are alike, and the devices of a kind on them.

Machines with the same devices form a site, because a plan that uses one of them is as good as a plan that uses another. Ranks of
a kind at a site are a group, and a configuration is a count for each group. This machine, whose link was measured, is a site of
its own; so is each machine whose memory its ranks may exhaust together.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainwright.estimator.communication import Link, all_reduce, on_cycle
from trainwright.tasks.allocate.cost import CostModel, Kind, Triple
from trainwright.tasks.pool import Device

# Between two ranks of one machine, as a prior where nobody has measured it.
_LOOPBACK = Link(bandwidth_bytes_per_s=0.5e9, latency_s=2e-3, spread=0.0)
_UNMEASURED_LOW, _UNMEASURED_HIGH = 1 / 2, 3.0  # of what a prior, or the pool file's network, makes of a collective
_THIS = "this machine"  # whatever the pool's hosts call its address


class Ranks(NamedTuple):
    """What the collectives' time depends on."""

    machines: int
    widest: int
    """Most ranks on a machine other than this."""
    here: int
    """Ranks on this machine."""


@dataclass(frozen=True)
class Site:
    """Machines with the same devices."""

    machines: tuple[str, ...]
    local: bool
    room: dict[int, int]
    """Devices by kind on each machine."""

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
        alike: dict[object, list[str]] = {}
        for name, held in machines.items():
            own = apart or name == _THIS or not self._roomy(held, kinds)
            inventory = tuple(sorted((index, len(group)) for index, group in held.items()))
            alike.setdefault((name if own else None, inventory), []).append(name)
        self.sites = [
            Site(tuple(names), names[0] == _THIS, dict(inventory)) for (_, inventory), names in alike.items()  # type: ignore[misc]
        ]
        self.groups = [
            Group(number, kinds[index], count * len(site.machines))
            for number, site in enumerate(self.sites)
            for index, count in site.room.items()
        ]
        self.groups_of = [
            [place for place, group in enumerate(self.groups) if group.site == number] for number in range(len(self.sites))
        ]  # fmt: skip
        self.kinds = [kinds[index] for index in sorted(kinds)]
        self._link = Link(
            bandwidth_bytes_per_s=model.pool.network.bandwidth, latency_s=model.pool.network.latency, spread=0.0
        )

    def _roomy(self, held: dict[int, list[Device]], kinds: dict[int, Kind]) -> bool:
        """Whether all ranks fit into the machine's memory together, whatever their shares."""
        sharing = [(kinds[index], len(group)) for index, group in held.items() if kinds[index].shares_memory]
        most = largest_global_batch(self.model)
        needed = sum(count * self.model.memory_bytes(kind, most, 1) for kind, count in sharing)
        return all(needed <= (kind.curve.memory_limit_bytes or 0.0) for kind, _ in sharing)

    def choices(self, counts: Sequence[int]) -> list[Ranks]:
        """The ways to seat so many ranks of each group that differ in their collectives: fewer machines, or fewer on each."""
        ranks, here, fixed, spread = 0, 0, 0, []
        for site, places in zip(self.sites, self.groups_of, strict=True):
            used = sum(counts[place] for place in places)
            if not used:
                continue
            ranks += used
            if site.local:
                here, fixed = used, 1
            else:
                # At least so many machines for the ranks of each kind, and in all.
                least = max(-(-counts[place] // site.room[self.groups[place].kind.index]) for place in places)
                spread.append((used, least, len(site.machines)))
        if not spread:
            return [Ranks(fixed, 0, here)]
        found: list[Ranks] = []
        narrowest = max(-(-used // machines) for used, _, machines in spread)
        widest = max(-(-used // least) for used, least, _ in spread)
        for width in range(narrowest, widest + 1):
            machines = [max(least, -(-used // width)) for used, least, _ in spread]
            most = max(-(-used // number) for (used, _, _), number in zip(spread, machines, strict=True))
            one = Ranks(fixed + sum(machines), most, here)
            if not found or one.machines < found[-1].machines:
                found.append(one)
        return found

    def collective_s(self, ranks: Ranks) -> Triple:
        """Ring all-reduces of the gradients: within each machine, of which the slowest counts, and then between machines."""
        return self._collective_s(ranks)

    @functools.cached_property
    def _collective_s(self) -> Any:
        return functools.lru_cache(maxsize=None)(self._compute)

    def _compute(self, ranks: Ranks) -> Triple:
        size, here, there = self.model.estimate.gradient_bytes, Triple(0.0, 0.0, 0.0), Triple(0.0, 0.0, 0.0)
        if ranks.here > 1 and self.model.estimate.local_link is not None:
            found = on_cycle(all_reduce(self.model.estimate.local_link, size, ranks.here), self.model.estimate.cycle_s)
            here = Triple(found.median, found.low, found.high)
        elif ranks.here > 1:
            here = _unmeasured(all_reduce(_LOOPBACK, size, ranks.here).median)
        if ranks.widest > 1:
            there = _unmeasured(all_reduce(_LOOPBACK, size, ranks.widest).median)
        between = _unmeasured(all_reduce(self._link, size, ranks.machines).median)
        within = max(here, there, key=lambda one: one.median)
        return Triple(*(one + other for one, other in zip(within, between, strict=True)))

    def seats(self, counts: Sequence[int], ranks: Ranks) -> list[Device]:
        """The devices of a choice, in the order of the pool."""
        taken: list[Device] = []
        for number, site in enumerate(self.sites):
            wanted = {self.groups[place].kind.index: counts[place] for place in self.groups_of[number] if counts[place]}
            if not wanted:
                continue
            used = sum(wanted.values())
            least = max(-(-count // site.room[index]) for index, count in wanted.items())
            number_of = 1 if site.local else max(least, -(-used // ranks.widest))
            loads = [0] * number_of
            for index, count in wanted.items():
                # Evenly, and one more for those with the fewest ranks: loads never differ by more than one.
                base, more = divmod(count, number_of)
                extra = sorted(range(number_of), key=lambda one: loads[one])[:more]
                for one in range(number_of):
                    here = base + (one in extra)
                    loads[one] += here
                    taken += self.devices[site.machines[one]][index][:here]
        return sorted(taken, key=lambda device: self.order[device.id])

    def counts(self, devices: Sequence[Device]) -> tuple[tuple[int, ...], Ranks]:
        """The count of each group, and how these devices sit."""
        site_of = {name: number for number, site in enumerate(self.sites) for name in site.machines}
        held = Counter((site_of[machine_of(device)], self.model.kind(device).index) for device in devices)
        machines = Counter(machine_of(device) for device in devices)
        there = [count for name, count in machines.items() if name != _THIS]
        return (
            tuple(held[group.site, group.kind.index] for group in self.groups),
            Ranks(len(machines), max(there, default=0), machines[_THIS]),
        )


def machine_of(device: Device) -> str:
    """The machine that a device is on: hosts of one address are one machine."""
    return _THIS if device.local else device.address


def largest_global_batch(model: CostModel) -> int:
    """The largest global batch that the job may get."""
    size = model.job.train.global_batch_size
    return min(size if size != "auto" else model.job.train.batch_bounds[1], model.data.train_rows)


def _unmeasured(median: float) -> Triple:
    return Triple(median, median * _UNMEASURED_LOW, median * _UNMEASURED_HIGH)
