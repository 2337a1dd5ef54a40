"""The least time that the collectives of some ranks can take, wherever those sit."""

from __future__ import annotations

from typing import Any

from trainwright.tasks.allocate.plan.cost import Collectives, Triple
from trainwright.tasks.allocate.plan.placement import Layout, Ranks

_CLOSE = 1e-9


class CollectiveFloor:
    """Lower bounds for so many ranks or more, which never fall with their number.

    `width` is an interval of the most ranks on a machine other than this; (0, 0): there are none. `room` is how many ranks of a
    group that leaves room for, and `holds` how many a site holds.
    """

    def __init__(self, layout: Layout, most: int, width: tuple[int, int]) -> None:
        import numpy as np

        self.layout, self.width = layout, width
        sites = layout.sites
        self.machines = np.array([len(site.machines) for site in sites])
        self._local = np.array([site.local for site in sites], dtype=bool)
        self._size = np.array(
            [site.size if site.local else min(site.size, width[1]) for site in sites]
        )
        self.holds = (self.machines * self._size).astype(float)
        self.room = np.minimum([group.count for group in layout.groups], self.holds[layout.site_of])
        self._seats: dict[bytes, Any] = {}
        there = self._seats_of(np.where(self._local, 0, self._size))
        here = next((site.size for site in sites if site.local), 0)
        ranks = np.arange(most + 1)
        # Rows: the whole at the median, what comes after the backward pass, the whole at the high end.
        least = np.full((3, most + 1), np.inf)
        for low_here, high_here in [(0, 0), *ranges(here)]:
            used = np.searchsorted(there, np.maximum(0, ranks - high_here), "left")
            possible = used < len(there)
            machines = np.maximum(np.minimum(used, len(there) - 1), 1 if width[1] else 0) + (
                1 if high_here else 0
            )
            one, several = (
                self._along(many, min(low_here, 2), most, high_here == 0) for many in (1, 2)
            )
            found = np.where(machines > 1, several, one)
            least = np.where(possible, np.minimum(least, found), least)
        self._least = np.minimum.accumulate(least[:, ::-1], axis=1)[:, ::-1]

    def of(self, ranks: int) -> Collectives:
        """The least for so many ranks or more."""
        return _of(self._least[:, ranks])

    def _seats_of(self, on_each: Any) -> Any:
        """Seats on the 0, 1, 2, … machines that have most, where each machine of a site has so many."""
        import numpy as np

        seats = np.repeat(np.minimum(on_each, self._size), self.machines)
        return np.cumsum([0, *np.sort(seats[seats > 0])[::-1]])

    def _needed(self, ranks: float, of: Any) -> int | None:
        """Machines that so many ranks of these kinds (a mask) take at least. None: there are too few."""
        import numpy as np

        key = of.tobytes()
        if key not in self._seats:
            self._seats[key] = self._seats_of(self.layout.on_each[:, of].sum(axis=1))
        found = int(np.searchsorted(self._seats[key], ranks - _CLOSE, "left"))
        return found if found < len(self._seats[key]) else None

    def covering(self, samples: Any, batch: int) -> tuple[int, Any] | None:
        """The fewest machines that hold a batch, with so many samples on a rank of each kind, and the counts by group there.

        None: there are too few.
        """
        import numpy as np

        order = np.argsort(-samples, kind="stable")
        seats = np.minimum(np.cumsum(self.layout.on_each[:, order], axis=1), self._size[:, None])
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
        site_of, kind_of = self.layout.site_of, self.layout.kind_of
        return int(used.sum()), (used[:, None] * taken)[site_of, rank_of[kind_of]]

    def at(self, ranks: int, counts: Any, least: Any, most: Any, machines: int = 1) -> Collectives:
        """The least for so many ranks or more, on so many machines or more, with these counts of groups, and of kinds, at least.

        `most` is what kinds have at most. Infinite where they do not fit.
        """
        import numpy as np

        used = np.bincount(self.layout.site_of, weights=counts, minlength=len(self._size))
        machines = max(machines, int(np.ceil(used / np.maximum(1, self._size)).sum()))
        several = np.flatnonzero(least > 1)
        masks = (
            [(least[one], np.arange(len(least)) == one) for one in several]
            if len(several) > 1
            else []
        )
        for count, mask in [(ranks, most > 0), (least.sum(), least > 0), *masks]:
            needed = self._needed(count, mask)
            if needed is None:
                return _of([np.inf] * 3)
            machines = max(machines, needed)
        here = int(used[self._local].sum())
        found = self._ends(machines, here, ranks)
        return _of(np.maximum(self._least[:, ranks], found))

    def _along(self, machines: int, here: int, most: int, elsewhere: bool) -> Any:
        """`_ends` for 0 to `most` ranks: it depends on no more of the other numbers than this."""
        import numpy as np

        kept = self.layout.along
        key = (machines, here, most, elsewhere)
        if key not in kept:
            kept[key] = np.array(
                [self._ends(machines, here, total, elsewhere) for total in range(most + 1)]
            ).T
        return kept[key]

    def _ends(self, machines: int, here: int, total: int, elsewhere: bool = False) -> Any:
        """For so many ranks or more, so many machines or more, so many ranks here or more; `elsewhere`: none here."""
        import numpy as np

        if total < 2:
            return np.zeros(3)
        if machines > 1:
            options = [Ranks(2, 0, min(here, 2), total)]
        else:  # on one machine, or on several, which is no quicker than on one elsewhere
            options = [Ranks(1, total, 0, total)] if here < 2 else []
            options += [] if elsewhere else [Ranks(1, 0, total, total)]
        found = [self.layout.collectives(one) for one in options]
        return np.min(
            [(one.whole.median, one.after.median, one.whole.high) for one in found], axis=0
        )


def _of(ends: Any) -> Collectives:
    median, after, high = (float(one) for one in ends)
    return Collectives(Triple(median, median, high), Triple(after, after, after))


def ranges(most: int) -> list[tuple[int, int]]:
    """1 to `most` in ranges (low, high): single numbers first, wider ones beyond."""
    found, low = [], 1
    while low <= most:
        high = min(most, max(low, int(low * 1.2)))
        found.append((low, high))
        low = high + 1
    return found
