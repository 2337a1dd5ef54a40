"""The cheapest way to cover a batch with ranks of several kinds, as a linear program: a lower bound, and counts that reach it.

    min Σ p_k · n_k   with   Σ s_k · n_k >= B,   least <= Σ n_k <= most,   low_k <= n_k <= high_k,   n in `Rooms`

Kinds share machines, so a set S of them finds room for f(S) = Σ_sites min(room of S, what the site holds) ranks at most: a
polymatroid (J. Edmonds, "Submodular functions, matroids, and certain polyhedra", 1970). With a multiplier λ for the batch, the
rest is solved greedily by λ · s_k − p_k; the λ at which the batch is just covered is where two such solutions meet, found by
cutting between them (M. Eisner, D. Severance, "Mathematical techniques for efficient record segmentation", JACM 23, 1976).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

_MOST_CUTS = 60  # each is valid to stop at; some eight find the best
_CLOSE = 1e-9


@dataclass(frozen=True)
class Rooms:
    """How many ranks fit, by site (rows) and kind (columns); only the sites that hold fewer than their kinds together."""

    high: Any
    low: Any
    holds: Any
    """By site: ranks of all kinds together."""
    free: Any
    """By kind: room on all other sites."""

    def of_first(self, order: Any) -> Any:
        """How many ranks the first 1, 2, … kinds of an order find room for, together."""
        import numpy as np

        found = np.cumsum(self.free[order])
        if len(self.holds):
            others = self.low.sum(axis=1, keepdims=True) - np.cumsum(self.low[:, order], axis=1)
            found = found + np.minimum(
                np.cumsum(self.high[:, order], axis=1), self.holds[:, None] - others
            ).sum(axis=0)
        return found


@dataclass(frozen=True)
class Counts:
    """The numbers of ranks to choose among: by kind, in all, and together on the machines."""

    low: Any
    high: Any
    least: int
    most: int
    rooms: Rooms

    def heaviest(self, weights: Any) -> Any | None:
        """Counts with the greatest Σ weight · n (real numbers). None: there are no such counts.

        Only that kinds of higher weight find room together is looked at, so the sum is an upper bound where other sets bind.
        """
        import numpy as np

        order = np.argsort(-weights, kind="stable")
        low = self.low[order]
        limits = np.minimum(self.rooms.of_first(order), self.most) - np.cumsum(low)
        limits = np.minimum.accumulate(limits[::-1])[::-1]
        if limits[0] < 0:
            return None
        ends = np.cumsum(self.high[order] - low)
        ends = ends + np.minimum.accumulate(np.minimum(0.0, limits - ends))
        needed = self.least - low.sum()
        if ends[-1] < needed:
            return None
        wanted = int((weights > 0).sum())
        ends = np.minimum(ends, max(ends[wanted - 1] if wanted else 0.0, needed))
        found = np.empty(len(order))
        found[order] = low + np.diff(ends, prepend=0.0)
        return found

    def covers(self, samples: Any, batch: int) -> bool:
        """Whether the batch can be covered at all."""
        found = self.heaviest(samples)
        return found is not None and float(samples @ found) >= batch - _CLOSE


class Cover(NamedTuple):
    """The least price, or a lower bound of it; what has it: counts by kind, and samples on a rank of each (real numbers)."""

    price: float
    counts: Any
    samples: Any


def cover(prices: Any, samples: Any, counts: Counts, batch: int) -> Cover | None:
    """The cheapest cover of the batch. None: impossible.

    `prices` and `samples` have a row for each choice that a rank of a kind (column) has.
    """
    import numpy as np

    kinds = np.arange(prices.shape[1])

    def at(rate: float) -> tuple[float, float, Any, Any] | None:
        """The best at this price of a sample: samples, price, counts, samples of a rank."""
        chosen = np.argmin(prices - rate * samples, axis=0)
        price, held = prices[chosen, kinds], samples[chosen, kinds]
        found = counts.heaviest(rate * held - price)
        return None if found is None else (float(held @ found), float(price @ found), found, held)

    most = samples.max(axis=0)
    few, full = at(0.0), counts.heaviest(most)
    if few is None or full is None or float(most @ full) < batch - _CLOSE:
        return None
    if few[0] >= batch - _CLOSE:
        return Cover(*few[1:])
    at_most = np.where(samples == most, prices, np.inf).min(axis=0)
    many = (float(most @ full), float(at_most @ full), full, most)
    for _ in range(_MOST_CUTS):
        rate = max(0.0, (many[1] - few[1]) / (many[0] - few[0]))
        found = at(rate)
        if found is None:
            return None
        best = few[1] + rate * (batch - few[0])
        bound = found[1] + rate * (batch - found[0])
        if bound >= best - _CLOSE * abs(best):
            share = (batch - few[0]) / (many[0] - few[0])
            together = (1 - share) * few[2] + share * many[2]
            held = (1 - share) * few[2] * few[3] + share * many[2] * many[3]
            return Cover(min(best, bound), together, held / np.maximum(together, 1e-300))
        if found[0] >= batch:
            many = found
        else:
            few = found
    return Cover(bound, *many[2:])
