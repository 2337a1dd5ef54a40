"""Placement: the machines on which the ranks of a configuration run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from trainwright.estimator.devices import summing_type
from trainwright.tasks.allocate.plan.collectives import RingShape
from trainwright.tasks.allocate.plan.topology import Topology
from trainwright.tasks.spec.pool import Device


class Placement(NamedTuple):
    """A number of machines of each site, with the site's ranks spread evenly over them."""

    ring: RingShape
    machines: tuple[tuple[int, int], ...]
    """Site and number of machines, for each site in use."""


def placements(topology: Topology, counts: Sequence[int]) -> list[Placement]:
    """The ways to place `counts[g]` ranks of each group g whose collectives differ.

    They trade fewer machines against fewer ranks on each. Empty if there are too few devices.
    """
    sites, groups = topology.sites, topology.groups
    used_groups = itertools.compress(groups, counts)
    summing = summing_type([group.kind.device_type for group in used_groups])
    here, used, least = 0, {}, {}
    for number, places in topology.in_use(counts).items():
        site = sites[number]
        used[number] = sum(counts[place] for place in places)
        # The minimum number of machines for the ranks of each kind.
        least[number] = max(
            -(-counts[place] // site.room[groups[place].kind.index]) for place in places
        )
        if least[number] > len(site.machines):
            return []
        here += used[number] if site.local else 0
    remote = [number for number in used if not sites[number].local]
    narrowest = max(
        (-(-used[number] // len(sites[number].machines)) for number in remote), default=0
    )
    widest = max((-(-used[number] // least[number]) for number in remote), default=0)
    bandwidths, latencies = zip(*(sites[number].network for number in used), strict=True)
    slowest = min(bandwidths), max(latencies)
    found: list[Placement] = []
    for width in range(narrowest, widest + 1):
        taken = {
            number: 1 if sites[number].local else max(least[number], -(-ranks // width))
            for number, ranks in used.items()
        }
        total = sum(taken.values())
        if not found or total < found[-1].ring.machines:
            on_one = max((-(-used[number] // taken[number]) for number in remote), default=0)
            network = slowest if total > 1 else None
            inner = _inner(topology, [one for one in used if used[one] > taken[one]], summing)
            ring = RingShape(
                total, on_one, here, sum(used.values()), network, inner, summing is not None
            )
            found.append(Placement(ring, tuple(sorted(taken.items()))))
    return found


def _inner(
    topology: Topology, several: Sequence[int], summing: str | None
) -> tuple[float, float] | None:
    """The slowest link inside machines of these sites, without this machine's if it was measured.

    `summing`: the type of devices that sum among each other. None: there is no link.
    """
    measured = topology.model.estimate.local_link is not None and summing is None
    links = [
        topology.sites[number].links.inside(summing)
        for number in several
        if not (measured and topology.sites[number].local)
    ]
    return (min(one[0] for one in links), max(one[1] for one in links)) if links else None


def sharing_memory(
    topology: Topology, counts: Sequence[int], placement: Placement
) -> dict[int, int]:
    """By kind whose ranks share their machine's memory: the most ranks that share it."""
    places_of, found = topology.in_use(counts), dict[int, int]()
    for number, machines in placement.machines:
        sharing = [
            place for place in places_of[number] if topology.groups[place].kind.shares_memory
        ]
        ranks = sum(-(-counts[place] // machines) for place in sharing)
        for place in sharing:
            index = topology.groups[place].kind.index
            found[index] = max(ranks, found.get(index, 0))
    return found


def placed_devices(topology: Topology, counts: Sequence[int], placement: Placement) -> list[Device]:
    """The devices of these ranks, in the order of the pool."""
    taken: list[Device] = []
    places_of = topology.in_use(counts)
    for number, used in placement.machines:
        site, places = topology.sites[number], places_of[number]
        loads = [0] * used
        for place in places:
            # Evenly, with the rest on machines with the fewest ranks: loads differ by at most one.
            base, more = divmod(counts[place], used)
            extra = set(sorted(range(used), key=lambda one: loads[one])[:more])
            for one in range(used):
                here = base + (one in extra)
                loads[one] += here
                devices = topology.devices[site.machines[one]]
                taken += devices[topology.groups[place].kind.index][:here]
    return sorted(taken, key=lambda device: topology.order[device.id])
