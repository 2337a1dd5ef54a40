"""The covering relaxation: the cheapest ranks that hold a batch, as a linear program.

    min Σ p_k · n_k   with   Σ s_k · n_k >= B,   least <= Σ n_k <= most,
                             low_k <= n_k <= high_k,   n within the capacity

Kinds share machines: a set S of kinds finds room for f(S) = Σ_sites min(room of S, what the site
holds) ranks at most, a polymatroid (J. Edmonds, "Submodular functions, matroids, and certain
polyhedra", 1970). With a Lagrange multiplier λ for the batch, the rest is solved greedily, in the
order of λ · s_k − p_k. The λ at which the batch is just covered is where two such solutions meet;
cutting between them finds it (M. Eisner, D. Severance, "Mathematical techniques for efficient
record segmentation in large shared databases", JACM 23, 1976).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

_MAX_CUTS = 60  # each cut gives a valid bound; about eight find the optimum
_CLOSE = 1e-9


@dataclass(frozen=True)
class Capacity:
    """How many ranks fit, by site (rows) and kind (columns).

    Only sites that hold fewer ranks than their kinds together have a row.
    """

    high: Any
    low: Any
    holds: Any
    """By site: ranks of all kinds together."""
    free: Any
    """By kind: room on all other sites."""

    def of_first(self, order: Any) -> Any:
        """How many ranks the first 1, 2, … kinds of an order find room for: f(S) of each prefix."""
        import numpy as np

        found = np.cumsum(self.free[order])
        if len(self.holds):
            others = self.low.sum(axis=1, keepdims=True) - np.cumsum(self.low[:, order], axis=1)
            found = found + np.minimum(
                np.cumsum(self.high[:, order], axis=1), self.holds[:, None] - others
            ).sum(axis=0)
        return found


@dataclass(frozen=True)
class CountLimits:
    """The numbers of ranks to choose among: by kind, in total, and together on the machines."""

    low: Any
    high: Any
    least: int
    most: int
    capacity: Capacity

    def heaviest(self, weights: Any) -> Any | None:
        """Counts (real numbers) with the greatest Σ weight · n; None if no counts are allowed.

        Capacity is checked for the sets of heaviest kinds only, so the sum is an upper bound if
        other sets bind.
        """
        import numpy as np

        order = np.argsort(-weights, kind="stable")
        low = self.low[order]
        limits = np.minimum(self.capacity.of_first(order), self.most) - np.cumsum(low)
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
        """Whether ranks with these samples can hold the batch at all."""
        found = self.heaviest(samples)
        return found is not None and float(samples @ found) >= batch - _CLOSE


class Cover(NamedTuple):
    """The least price, or a lower bound of it, and the solution (real numbers) that attains it."""

    price: float
    counts: Any
    """Ranks by kind."""
    samples: Any
    """Samples of a rank of each kind."""


def cover(prices: Any, samples: Any, limits: CountLimits, batch: int) -> Cover | None:
    """The cheapest cover of the batch; None if there is none.

    `prices` and `samples` have a row for each choice that a rank of a kind (column) has.
    """
    import numpy as np

    kinds = np.arange(prices.shape[1])

    def at(rate: float) -> tuple[float, float, Any, Any] | None:
        """The optimum at this multiplier: samples, price, counts, samples of a rank."""
        chosen = np.argmin(prices - rate * samples, axis=0)
        price, held = prices[chosen, kinds], samples[chosen, kinds]
        found = limits.heaviest(rate * held - price)
        return None if found is None else (float(held @ found), float(price @ found), found, held)

    most = samples.max(axis=0)
    few, full = at(0.0), limits.heaviest(most)
    if few is None or full is None or float(most @ full) < batch - _CLOSE:
        return None
    if few[0] >= batch - _CLOSE:
        return Cover(*few[1:])
    at_most = np.where(samples == most, prices, np.inf).min(axis=0)
    many = (float(most @ full), float(at_most @ full), full, most)
    for _ in range(_MAX_CUTS):
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
