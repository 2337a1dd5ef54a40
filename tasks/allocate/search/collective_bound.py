"""Lower bounds of the time of collectives, over all placements of some ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

from trainwright.estimator.devices import summing_type
from trainwright.tasks.allocate.plan.collectives import RingShape
from trainwright.tasks.allocate.plan.cost import Collectives, overlap_at
from trainwright.tasks.allocate.plan.topology import Topology

_CLOSE = 1e-9


class LeastCollectives(NamedTuple):
    """A lower bound of the time of collectives, at the median and at the job's confidence."""

    median: Collectives
    upper: Collectives

    def at(self, z: float) -> Collectives:
        """The bound at the median (z = 0) or at the job's confidence."""
        return self.median if z == 0 else self.upper


class CollectiveBound:
    """Lower bounds for a minimum number of ranks; they never fall with that number.

    `width` is an interval of the most ranks on a machine other than this one; (0, 0): all ranks
    are on this machine. `room` is the number of ranks of a group that still fit, and `holds` the
    number of ranks that fit on a site.
    """

    def __init__(self, topology: Topology, max_ranks: int, width: tuple[int, int]) -> None:
        import numpy as np

        self.topology, self.width = topology, width
        self._z = topology.model.z
        self._one_machine = width[1] == 0
        sites = topology.sites
        self.machines = np.array([len(site.machines) for site in sites])
        self._local = np.array([site.local for site in sites], dtype=bool)
        self._size = np.array(
            [site.size if site.local else min(site.size, width[1]) for site in sites]
        )
        self.holds = (self.machines * self._size).astype(float)
        counts = [group.count for group in topology.groups]
        self.room = np.minimum(counts, self.holds[topology.site_of])
        self._seats: dict[bytes, Any] = {}
        self._unlike_links = len({site.links for site in sites}) > 1
        local = [group.kind for group in topology.groups if sites[group.site].local]
        self._on_devices = any(summing_type([kind.device_type]) for kind in local)
        """whether ranks here may sum quicker than what was measured"""
        self._least = self._over_all_numbers(max_ranks)

    def _over_all_numbers(self, max_ranks: int) -> Any:
        """The bounds for 0 to `max_ranks` ranks or more.

        Rows: the total and its tail at the median, the same at the job's confidence.
        """
        import numpy as np

        remote = self._seats_of(np.where(self._local, 0, self._size))
        room_here = next((site.size for site in self.topology.sites if site.local), 0)
        ranks = np.arange(max_ranks + 1)
        least = np.full((4, max_ranks + 1), np.inf)
        for low_here, high_here in [(0, 0), *ranges(room_here)]:
            used = np.searchsorted(remote, np.maximum(0, ranks - high_here), "left")
            possible = used < len(remote)
            machines = np.maximum(np.minimum(used, len(remote) - 1), 1 if self.width[1] else 0)
            machines = machines + (1 if high_here else 0)
            one, several = (
                self._by_ranks(many, min(low_here, 2), max_ranks, high_here == 0) for many in (1, 2)
            )
            found = np.where(machines > 1, several, one)
            least = np.where(possible, np.minimum(least, found), least)
        return np.minimum.accumulate(least[:, ::-1], axis=1)[:, ::-1]

    def at_least(self, ranks: int) -> LeastCollectives:
        """The bound for this many ranks or more."""
        return self._named(self._least[:, ranks])

    def _seats_of(self, on_each: Any) -> Any:
        """Seats on the 0, 1, 2, … machines with the most, if each machine of a site has these."""
        import numpy as np

        seats = np.repeat(np.minimum(on_each, self._size), self.machines)
        return np.cumsum([0, *np.sort(seats[seats > 0])[::-1]])

    def _machines_for(self, ranks: float, of: Any) -> int | None:
        """The fewest machines for this many ranks of these kinds (a mask); None: too few exist."""
        import numpy as np

        key = of.tobytes()
        if key not in self._seats:
            self._seats[key] = self._seats_of(self.topology.on_each[:, of].sum(axis=1))
        found = int(np.searchsorted(self._seats[key], ranks - _CLOSE, "left"))
        return found if found < len(self._seats[key]) else None

    def covering(self, samples: Any, batch: int) -> tuple[int, Any] | None:
        """The fewest machines that hold a batch, with these samples on a rank of each kind.

        Returns their number and the ranks by group on them. None: all machines hold less.
        """
        import numpy as np

        order = np.argsort(-samples, kind="stable")
        seats = np.minimum(np.cumsum(self.topology.on_each[:, order], axis=1), self._size[:, None])
        taken = np.diff(seats, prepend=0.0)
        held = taken @ samples[order]
        fullest = np.argsort(-held, kind="stable")
        total = np.cumsum((self.machines * held)[fullest])
        last = int(np.searchsorted(total, batch - _CLOSE, "left"))
        if last == len(total):
            return None
        used = np.zeros(len(held))
        used[fullest[: last + 1]] = self.machines[fullest[: last + 1]]
        used[fullest[last]] -= np.floor((total[last] - batch + _CLOSE) / held[fullest[last]])
        rank_of = np.argsort(order)
        site_of, kind_of = self.topology.site_of, self.topology.kind_of
        return int(used.sum()), (used[:, None] * taken)[site_of, rank_of[kind_of]]

    def at(
        self, ranks: int, counts: Any, least: Any, most: Any, machines: int = 1
    ) -> LeastCollectives:
        """The bound for this many ranks or more on this many machines or more.

        `counts` are the fewest ranks by group; `least` and `most` the fewest and most by kind.
        Infinite if they do not fit.
        """
        import numpy as np

        used = np.bincount(self.topology.site_of, weights=counts, minlength=len(self._size))
        machines = max(machines, int(np.ceil(used / np.maximum(1, self._size)).sum()))
        several = np.flatnonzero(least > 1)
        masks = (
            [(least[one], np.arange(len(least)) == one) for one in several]
            if len(several) > 1
            else []
        )
        for count, mask in [(ranks, most > 0), (least.sum(), least > 0), *masks]:
            needed = self._machines_for(count, mask)
            if needed is None:
                return self._named([np.inf] * 4)
            machines = max(machines, needed)
        here = int(used[self._local].sum())
        found = np.maximum(self._least[:, ranks], self._ends(machines, here, ranks))
        if self._unlike_links and ranks > 1:
            found = np.maximum(found, self._by_links(ranks, used > 0, least, most, machines))
        return self._named(found)

    def _by_links(self, ranks: int, used: Any, least: Any, most: Any, machines: int) -> Any:
        """The bound by the links of the sites that can have the ranks.

        `used`: the sites that surely have some. A kind that is surely used and that only one site
        has makes that site sure, too.
        """
        import numpy as np

        sites, on_each = self.topology.sites, self.topology.on_each
        seats = np.minimum(on_each[:, most > 0].sum(axis=1), self._size)
        holders = on_each[:, least > 0] > 0
        alone = holders[:, holders.sum(axis=0) == 1].any(axis=1)
        sure = used | alone
        times: list[Any] = []
        if machines == 1:  # all ranks on a machine that has all kinds that are surely used
            able = (seats >= ranks) & (on_each >= least).all(axis=1)
            if sure.any():
                able &= sure & (sure.sum() == 1)
            times += [self._on_one_machine(int(site), ranks) for site in np.flatnonzero(able)]
        bandwidths, latencies = np.array([site.network for site in sites]).T
        between = (
            self._slowest_of(-bandwidths, self.machines * seats, sure, ranks),
            self._slowest_of(latencies, self.machines * seats, sure, ranks),
        )
        if between[0] is not None and between[1] is not None:
            network = (-between[0], between[1])
            times.append(self._ends_of(RingShape(2, 0, 0, ranks, network)))
        return np.min(times, axis=0) if times else np.full(4, np.inf)

    @staticmethod
    def _slowest_of(slowness: Any, seats: Any, sure: Any, ranks: int) -> float | None:
        """The least possible slowness of the slowest site, if these ranks use all sure sites."""
        import numpy as np

        order = np.argsort(slowness, kind="stable")
        last = int(np.searchsorted(np.cumsum(seats[order]), ranks - _CLOSE, "left"))
        if last == len(order):
            return None
        slowest = float(slowness[order[last]])
        return max(slowest, float(slowness[sure].max())) if sure.any() else slowest

    def _on_one_machine(self, site: int, ranks: int) -> Any:
        import numpy as np

        one = self.topology.sites[site]
        widest, here = (0, ranks) if one.local else (ranks, 0)
        types = {
            self.topology.kinds[place].device_type
            for place in np.flatnonzero(self.topology.on_each[site])
        }
        inside = [one.links.inside(summing_type([name])) for name in types]
        fastest = max(link[0] for link in inside), min(link[1] for link in inside)
        return self._ends_of(RingShape(1, widest, here, ranks, None, fastest))

    def _ends_of(self, ring: RingShape) -> list[float]:
        one = self.topology.collectives.time(ring._replace(on_devices=self._on_devices))
        return [end for z in (0.0, self._z) for end in one.at(z)[:2]]

    def _by_ranks(self, machines: int, here: int, max_ranks: int, elsewhere: bool) -> Any:
        """`_ends` for 0 to `max_ranks` ranks; all searches of a topology share them."""
        import numpy as np

        kept = self.topology.collectives.lower_bounds
        key = (machines, here, max_ranks, elsewhere, self._one_machine)
        if key not in kept:
            kept[key] = np.array(
                [self._ends(machines, here, total, elsewhere) for total in range(max_ranks + 1)]
            ).T
        return kept[key]

    def _ends(self, machines: int, here: int, total: int, elsewhere: bool = False) -> Any:
        """The bound for these numbers of ranks, machines and ranks on this machine, or more.

        `elsewhere`: no rank is on this machine.
        """
        import numpy as np

        if total < 2:
            return np.zeros(4)
        if machines > 1:
            rings = [RingShape(2, 0, min(here, 2), total)]
        else:  # one machine, or several: a network may be faster than the link inside a machine
            rings = [] if self._one_machine else [RingShape(2, 0, min(here, 2), total)]
            rings += [RingShape(1, total, 0, total)] if here < 2 else []
            rings += [] if elsewhere else [RingShape(1, 0, total, total)]
        return np.min([self._ends_of(ring) for ring in rings], axis=0)

    def _named(self, ends: Any) -> LeastCollectives:
        median, tail, upper, upper_tail = (float(one) for one in ends)
        overlap = self.topology.collectives.overlap
        return LeastCollectives(
            Collectives(median, tail, overlap_at(0.0, overlap)),
            Collectives(upper, upper_tail, overlap_at(self._z, overlap)),
        )


def ranges(most: int) -> list[tuple[int, int]]:
    """1 to `most` in ranges (low, high): single numbers first, wider ranges beyond."""
    found, low = [], 1
    while low <= most:
        high = min(most, max(low, int(low * 1.2)))
        found.append((low, high))
        low = high + 1
    return found
