"""The cheapest way to cover a batch with ranks of several kinds, as a linear program: a lower bound, and counts that reach it.

    min Σ p_k · n_k   with   Σ s_k · n_k >= B,   least <= Σ n_k <= most,   low_k <= n_k <= high_k,   n in `Rooms`

Kinds share machines, so a set S of them finds room for f(S) = Σ_sites min(room of S, what the site holds) ranks at most: a
polymatroid (J. Edmonds, "Submodular functions, matroids, and certain polyhedra", 1970). With a multiplier λ for the batch, the
rest is solved greedily by λ · s_k − p_k; the λ at which the batch is just covered is where two such solutions meet, found by
cutting between them (M. Eisner, D. Severance, "Mathematical techniques for efficient record segmentation", JACM 23, 1976).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
            found = found + np.minimum(np.cumsum(self.high[:, order], axis=1), self.holds[:, None] - others).sum(axis=0)
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


def cover(prices: Any, samples: Any, counts: Counts, batch: int) -> tuple[float, Any] | None:
    """The least Σ p · n that covers the batch, or a lower bound of it, and counts n (real numbers). None: impossible."""
    few, many = counts.heaviest(-prices), counts.heaviest(samples)
    if few is None or many is None or float(samples @ many) < batch - _CLOSE:
        return None
    few_samples, few_price = float(samples @ few), float(prices @ few)
    many_samples, many_price = float(samples @ many), float(prices @ many)
    if few_samples >= batch - _CLOSE:
        return few_price, few
    for _ in range(_MOST_CUTS):
        rate = max(0.0, (many_price - few_price) / (many_samples - few_samples))
        found = counts.heaviest(rate * samples - prices)
        assert found is not None
        held, price = float(samples @ found), float(prices @ found)
        best = few_price + rate * (batch - few_samples)
        if price + rate * (batch - held) >= best - _CLOSE * abs(best):
            share = (batch - few_samples) / (many_samples - few_samples)
            return min(best, price + rate * (batch - held)), few + share * (many - few)
        if held >= batch:
            many, many_samples, many_price = found, held, price
        else:
            few, few_samples, few_price = found, held, price
    return price + rate * (batch - held), many
