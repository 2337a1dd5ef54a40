"""Lower bounds that the search prunes by: of the collectives' time, and of what it takes to cover a batch.

Every bound here holds for all configurations of a node, so that what it prunes is worse than what was found.
"""

from __future__ import annotations

from typing import Any

from trainwright.tasks.allocate.cost import Triple
from trainwright.tasks.allocate.layout import Layout, Ranks

_STEPS = 8  # of the multiplier of a cover's second constraint: any value is a valid bound, more steps a tighter one


class CollectiveFloor:
    """The least that the collectives of some number of ranks can take, wherever they sit: `median[n]` and `high[n]`.

    Both never fall with n: they hold for n ranks or more. `width` is an interval of the most ranks on a machine other than this;
    (0, 0): there are none.
    """

    def __init__(self, layout: Layout, most: int, width: tuple[int, int]) -> None:
        import numpy as np

        self._layout, self._width = layout, width
        self._site_of = np.array([group.site for group in layout.groups], dtype=int)
        self._size = np.array([site.size if site.local else min(site.size, width[1]) for site in layout.sites])
        self._machines = np.array([len(site.machines) for site in layout.sites])
        self._local = np.array([site.local for site in layout.sites], dtype=bool)
        per_machine = np.array([site.size if site.local else width[1] for site in layout.sites])
        self.room = np.array(
            [
                min(group.count, int(self._machines[group.site] * per_machine[group.site]))
                for group in layout.groups
            ],
            dtype=float,
        )  # fmt: skip
        there = sorted(
            (min(site.size, width[1]) for site in layout.sites if not site.local for _ in site.machines), reverse=True
        )
        here = next((site.size for site in layout.sites if site.local), 0)
        seats = np.cumsum([0, *there])
        ranks = np.arange(most + 1)
        self.median, self.high = np.full(most + 1, np.inf), np.full(most + 1, np.inf)
        for low_here, high_here in [(0, 0), *ranges(here)]:
            used = np.searchsorted(seats, np.maximum(0, ranks - high_here), "left")
            possible = used < len(seats)
            machines = np.maximum(np.minimum(used, len(there)), 1 if width[1] else 0) + (1 if high_here else 0)
            median, high = self._within(low_here, width[0])
            between = np.array([self._between(one)[::2] for one in range(int(machines.max()) + 1)])[machines]
            self.median = np.where(possible, np.minimum(self.median, median + between[:, 0]), self.median)
            self.high = np.where(possible, np.minimum(self.high, high + between[:, 1]), self.high)
        self.median = np.minimum.accumulate(self.median[::-1])[::-1]
        self.high = np.minimum.accumulate(self.high[::-1])[::-1]

    def at(self, ranks: int, counts: Any) -> tuple[float, float]:
        """Median and high end for so many ranks or more, of which every group has these counts at least."""
        import numpy as np

        used = np.bincount(self._site_of, weights=counts, minlength=len(self._size))
        machines = int(np.ceil(used / np.maximum(1, self._size)).sum())
        here = int(used[self._local].sum())
        width = max(self._width[0], int(np.ceil(used / self._machines)[~self._local].max(initial=0)))
        median, high = self._within(here, width)
        between = self._between(machines)
        return max(float(self.median[ranks]), median + between.median), max(
            float(self.high[ranks]), high + between.high
        )

    def _within(self, here: int, width: int) -> tuple[float, float]:
        one, other = self._time(Ranks(1, 0, here)), self._time(Ranks(1, width, 0))
        # Of two machines the one with the higher median counts, and its high end may be the lower.
        high = min(one.high, other.high) if here > 1 and width > 1 else max(one.high, other.high)
        return max(one.median, other.median), high

    def _between(self, machines: int) -> Triple:
        return self._time(Ranks(max(1, machines), 0, 0))

    def _time(self, ranks: Ranks) -> Triple:
        return self._layout.collective_s(ranks)


def ranges(most: int) -> list[tuple[int, int]]:
    """1 to `most` in ranges (low, high): single numbers first, wider ones beyond."""
    found, low = [], 1
    while low <= most:
        high = min(most, max(low, int(low * 1.2)))
        found.append((low, high))
        low = high + 1
    return found


def cover(
    prices: Any, samples: Any, low: Any, high: Any, total: int, least: int, most: int
) -> tuple[float, Any] | None:
    """min Σ p·n with Σ s·n >= total, least <= Σ n <= most, low <= n <= high, n real: a lower bound, and n. None: impossible.

    Without the count of ranks it is a fractional knapsack: by price per sample. The count enters with a multiplier μ (weak
    duality: min Σ (p + μ)·n − μ·limit is a lower bound for every μ of the right sign), found by bisection.
    """
    import numpy as np

    if low.sum() > most or high.sum() < least or (samples * high).sum() < total:
        return None
    best, found = _fill(prices, samples, low, high, total)
    count = found.sum()
    if least <= count <= most:
        return best, found
    if count > most:
        order = np.argsort(-samples, kind="stable")
        room = np.minimum((high - low)[order], np.maximum(0.0, most - low.sum() - _before((high - low)[order])))
        if (samples * low).sum() + (samples[order] * room).sum() < total - 1e-9:
            return None
        limit, sign = most, 1.0
        reach = float(prices.max() / samples.min() * samples.max())
    else:
        limit, sign = least, -1.0
        reach = float(prices.max())
    low_mu, high_mu = 0.0, reach
    for _ in range(_STEPS):
        mu = (low_mu + high_mu) / 2
        value, plan = _fill(prices + sign * mu, samples, low, high, total)
        value -= sign * mu * limit
        best = max(best, value)
        count = plan.sum()
        if (count > most) if sign > 0 else (count < least):
            low_mu = mu
        else:
            high_mu, found = mu, plan
    return best, found


def _before(values: Any) -> Any:
    import numpy as np

    return np.concatenate(([0.0], np.cumsum(values)[:-1]))


def _fill(prices: Any, samples: Any, low: Any, high: Any, total: int) -> tuple[float, Any]:
    """The fractional knapsack: what is worth its price by itself in full, then the cheapest per sample until it is covered."""
    import numpy as np

    found = np.where(prices < 0, high, low).astype(float)
    need = total - float((samples * found).sum())
    if need > 0:
        order = np.argsort(prices / samples, kind="stable")
        room = (high - found)[order]
        held = samples[order] * room
        taken = np.clip(need - _before(held), 0.0, held)
        found[order] += taken / samples[order]
    return float((prices * found).sum()), found


def roomiest(samples: Any, low: Any, high: Any, total: int, least: int, most: int) -> Any | None:
    """Counts that cover the batch with the fewest ranks, and then `least` of them. None where `most` do not cover it."""
    import numpy as np

    order = np.argsort(-samples, kind="stable")
    rooms = (high - low)[order]
    before = _before(rooms)
    missing = total - float((samples * low).sum()) - _before(samples[order] * rooms)
    needed = np.clip(np.ceil(missing / samples[order]), 0.0, rooms)
    taken = np.maximum(needed, np.clip(least - low.sum() - before, 0.0, rooms))
    found = low.copy().astype(float)
    found[order] += taken
    if found.sum() > most or (samples * found).sum() < total or found.sum() < least:
        return None
    return found
