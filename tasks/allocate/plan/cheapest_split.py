"""The split of a batch that costs least: not always the one that finishes first.

With t_k(b) the time of a rank of kind k for b samples and w_k the power that it draws while it
computes, the cost of a split depends on the slowest rank's time T and on the work X of all ranks:

    min V(T, X)   with   T = max_r t_r(b_r),   X = Σ_r w_r · t_r(b_r),   Σ_r b_r = B,   b_r >= 1

V never falls with T or X. For each T, the least X is a resource allocation problem. It is solved on
the lower convex hulls of w_k · t_k, where taking samples by rising slope is optimal (B. Fox,
"Discrete optimization via marginal analysis", Management Science 13, 1966). That is exact if the
curves are convex. Otherwise it is a lower bound; then all splits are enumerated if they are few, or
a dynamic program over the ranks finds the least X.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainwright.tasks.allocate.plan.confidence import TOLERANCE

Split = list[list[tuple[int, int]]]
"""By kind: pairs of (samples, ranks), the most samples first."""
_GRID = 256
"""Levels of T that are looked at together."""
_MAX_SPLITS = 30_000
"""Splits up to this number are enumerated."""
_MAX_SUMS = 2_000_000
"""Sums that one dynamic program may compute."""
_MAX_PROGRAMS = 60
"""Levels of T at which the curves' hulls, and perhaps a dynamic program, are computed again."""


class Hull(NamedTuple):
    """The lower convex hull of a rank's times, as segments with rising slopes."""

    begin: Any
    """Samples at which each segment begins; the first begins at 1."""
    length: Any
    """Samples of each segment."""
    slope: Any
    """Seconds for each more sample."""
    convex: bool
    """Whether the hull is the curve itself."""


def hull_of(times: Any, knots: Iterable[int]) -> Hull:
    """The hull of the times for 1, 2, … samples, which are straight lines between the knots."""
    import numpy as np

    last = len(times)
    corners = sorted({1, last, *(knot for knot in knots if 1 < knot < last)})
    kept: list[int] = []
    for corner in corners:
        while len(kept) > 1 and _above(times, kept[-2], kept[-1], corner):
            kept.pop()
        kept.append(corner)
    begin, end = np.array(kept[:-1], dtype=int), np.array(kept[1:], dtype=int)
    slope = (times[end - 1] - times[begin - 1]) / (end - begin)
    inside = np.array([corner for corner in corners if corner not in kept], dtype=int)
    at = np.searchsorted(end, inside)
    straight = times[begin[at] - 1] + slope[at] * (inside - begin[at])
    convex = bool((times[inside - 1] <= straight * (1 + TOLERANCE)).all())
    return Hull(begin, end - begin, slope, convex)


def _above(times: Any, left: int, middle: int, right: int) -> bool:
    """Whether the point in the middle is on or above the line between the others."""
    one, two, three = times[left - 1], times[middle - 1], times[right - 1]
    return bool((two - one) * (right - left) >= (three - one) * (middle - left))


@dataclass(frozen=True, eq=False)
class RankKind:
    """Some ranks of one kind, and the times that they may take."""

    ranks: int
    times: Any
    """Median seconds for 1, 2, … samples, as many as memory and limits allow."""
    knots: Sequence[int]
    """Samples between which the times are straight lines."""
    watts: float
    """w_k. Zero if not known: nothing that is computed from X is known then."""
    factor: float = 1.0
    """The time at the job's confidence, relative to the median."""


ValueFunction = Callable[[Any, Any, Any], Any]
"""V(T, U, X), with U = max_r t_r · factor_r: numbers or numpy arrays; infinite outside limits."""


class CheapestSplit(NamedTuple):
    """The split found (None: none within the limits), and a lower bound of V over all splits."""

    split: Split | None
    value: float
    bound: float


def cheapest_split(
    batch: int,
    kinds: Sequence[RankKind],
    value: ValueFunction,
    *,
    by_upper: bool = False,
) -> CheapestSplit:
    """The split of least V. `by_upper`: V depends on U and X only, otherwise mainly on T and X."""
    return _Search(batch, kinds, value, by_upper=by_upper).run()


def least_value(
    batch: int, kinds: Sequence[RankKind], value: ValueFunction, *, by_upper: bool = False
) -> float:
    """A lower bound of V over all splits; infinite if there are none within the limits."""
    search = _Search(batch, kinds, value, by_upper=by_upper)
    _, bounds = search.intervals([(0, len(search.levels))])
    return float(bounds.min()) if len(bounds) else math.inf


class _Marginal:
    """Samples taken one by one by rising cost, on the hulls of some kinds' times."""

    def __init__(self, kinds: Sequence[RankKind], times: Sequence[Any]) -> None:
        import numpy as np

        self._kinds = kinds
        hulls = [hull_of(one, kind.knots) for kind, one in zip(kinds, times, strict=True)]
        rate = np.concatenate(
            [kind.watts * hull.slope for kind, hull in zip(kinds, hulls, strict=True)]
        )
        order = np.argsort(rate, kind="stable")
        self.rate = rate[order]
        self._of = np.repeat(np.arange(len(kinds)), [len(hull.slope) for hull in hulls])[order]
        self._begin = np.concatenate([hull.begin for hull in hulls])[order]
        self._length = np.concatenate([hull.length for hull in hulls])[order]
        self._ranks = np.array([kind.ranks for kind in kinds])
        self._first = sum(kind.ranks * kind.watts * float(kind.times[0]) for kind in kinds)

    def taken(self, batch: int, finished: Any) -> Any:
        """Samples beyond each rank's first, by segment (last axis).

        `finished` are the most samples of a rank, by kind (first axis).
        """
        import numpy as np

        room = np.clip(finished[self._of].T - self._begin, 0, self._length) * self._ranks[self._of]
        need = batch - int(self._ranks.sum())
        return np.diff(np.minimum(np.cumsum(room, axis=-1), need), axis=-1, prepend=0)

    def work(self, taken: Any) -> Any:
        """X of these samples on the hulls: a lower bound."""
        return self._first + taken @ self.rate

    def last_rate(self, taken: Any) -> float:
        """The cost of the last sample taken."""
        import numpy as np

        return float(self.rate[np.flatnonzero(taken)[-1]]) if taken.any() else 0.0

    def splits(self, taken: Any) -> Iterator[Split]:
        """Two splits that take these samples.

        One spreads each kind's samples evenly over its ranks, which is best for convex curves; the
        other gives a rank all samples of a segment before the next one gets any.
        """
        import numpy as np

        totals = np.bincount(self._of, taken, len(self._kinds)).astype(int) + self._ranks
        even: Split = []
        for total, ranks in zip(totals.tolist(), self._ranks.tolist(), strict=True):
            base, more = divmod(total, ranks)
            even.append([one for one in ((base + 1, more), (base, ranks - more)) if one[1]])
        yield even
        shares = [[1] * kind.ranks for kind in self._kinds]
        for of, length, some in zip(
            self._of.tolist(), self._length.tolist(), taken.tolist(), strict=True
        ):
            for rank in range(len(shares[of])):
                more = min(length, some)
                shares[of][rank] += more
                some -= more
        yield _counted(shares)


class _Search:
    """The search for one split. A level is a value of T, or of U if V depends on U only."""

    def __init__(
        self,
        batch: int,
        kinds: Sequence[RankKind],
        value: ValueFunction,
        *,
        by_upper: bool,
    ) -> None:
        import numpy as np

        self._batch, self._kinds, self._value_of = batch, kinds, value
        self._by_upper = by_upper
        self._factors = [kind.factor for kind in kinds]
        self._ranks = np.array([kind.ranks for kind in kinds])
        self._times = [kind.times * (kind.factor if by_upper else 1.0) for kind in kinds]
        self.levels = self._feasible_levels()
        self._marginal = (
            _Marginal(kinds, [kind.times for kind in kinds]) if len(self.levels) else None
        )
        self._best: Split | None = None
        self._value = math.inf

    def run(self) -> CheapestSplit:
        """Narrow the levels down to those that can be better than the best split found."""
        import numpy as np

        pending = [(0, len(self.levels))]
        while True:
            found, bounds = self.intervals(pending)
            if not len(bounds):
                return self._result(math.inf)
            first = int(np.argmin(bounds))
            self._try_marginal(self.levels[found[first][1] - 1])
            kept = [
                (interval, bound)
                for interval, bound in zip(found, bounds.tolist(), strict=True)
                if bound < self._value * (1 - TOLERANCE)
            ]
            pending = [interval for interval, _ in kept]
            if all(end - begin == 1 for begin, end in pending):
                break
        if not kept:
            return self._result(math.inf)
        if math.comb(self._batch - 1, int(self._ranks.sum()) - 1) <= _MAX_SPLITS:
            self._enumerate()
            return self._result(math.inf)
        return self._result(self._programs([begin for begin, _ in pending]))

    def _result(self, bound: float) -> CheapestSplit:
        return CheapestSplit(self._best, self._value, min(bound, self._value))

    def _feasible_levels(self) -> Any:
        """Every level that a split can have, from the least on: a sorted numpy array."""
        import numpy as np

        if self._ranks.sum() > self._batch or not all(map(len, self._times)):
            return np.empty(0)
        levels = np.unique(np.concatenate(self._times))
        low, high = 0, len(levels)
        while low < high:
            middle = (low + high) // 2
            finished = self._finished(levels[middle])
            holds = finished.min() > 0 and int(self._ranks @ finished) >= self._batch
            low, high = (low, middle) if holds else (middle + 1, high)
        return levels[low:]

    def _finished(self, level: Any) -> Any:
        """By kind (rows): samples that a rank finishes at this level, or at each of these."""
        import numpy as np

        return np.array([times.searchsorted(level, "right") for times in self._times])

    def _work(self, levels: Any) -> Any:
        """A lower bound of the least X with T at most each of these levels."""
        assert self._marginal is not None
        return self._marginal.work(self._marginal.taken(self._batch, self._finished(levels)))

    def _at(self, levels: Any, work: Any) -> Any:
        """A lower bound of V at these levels with this X."""
        if self._by_upper:
            return self._value_of(levels / max(self._factors), levels, work)
        return self._value_of(levels, levels * min(self._factors), work)

    def intervals(self, pending: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], Any]:
        """Divide intervals of levels; returns the parts, and a lower bound of V in each."""
        import numpy as np

        found: list[tuple[int, int]] = []
        for begin, end in pending:
            parts = min(end - begin, max(2, _GRID // len(pending)))
            cuts = (
                [begin + (end - begin) * part // parts for part in range(parts + 1)]
                if parts
                else []
            )
            found += itertools.pairwise(cuts)
        if not found:
            return [], np.empty(0)
        first, last = np.array(found).T
        return found, self._at(self.levels[first], self._work(self.levels[last - 1]))

    def _try_marginal(self, level: float) -> None:
        assert self._marginal is not None
        taken = self._marginal.taken(self._batch, self._finished(level))
        for split in self._marginal.splits(taken):
            self._try(split)

    def _try(self, split: Split) -> None:
        value = self._exact(split)
        if value < self._value:
            self._best, self._value = split, value

    def _exact(self, split: Split) -> float:
        slowest = upper = work = 0.0
        for kind, shares in zip(self._kinds, split, strict=True):
            for samples, ranks in shares:
                time = float(kind.times[samples - 1])
                slowest, upper = max(slowest, time), max(upper, time * kind.factor)
                work += ranks * kind.watts * time
        return float(self._value_of(slowest, upper, work))

    def _enumerate(self) -> None:
        """Try every split."""
        import numpy as np

        of = [number for number, kind in enumerate(self._kinds) for _ in range(kind.ranks)]
        kinds = [self._kinds[number] for number in of]
        most = [len(kind.times) for kind in kinds]
        shares, left = np.empty((1, 0), dtype=int), np.array([self._batch])
        for place in range(len(of) - 1):
            choices = np.arange(1, most[place] + 1)
            left = (left[:, None] - choices).ravel()
            shares = np.column_stack(
                [np.repeat(shares, len(choices), axis=0), np.tile(choices, len(shares))]
            )
            others = len(of) - 1 - place
            kept = (left >= others) & (left <= sum(most[place + 1 :]))
            shares, left = shares[kept], left[kept]
        shares = np.column_stack([shares, left])
        times = np.column_stack(
            [kind.times[shares[:, place] - 1] for place, kind in enumerate(kinds)]
        )
        factors, watts = (
            np.array([getattr(kind, name) for kind in kinds]) for name in ("factor", "watts")
        )
        values = self._value_of(times.max(axis=1), (times * factors).max(axis=1), times @ watts)
        best = shares[int(np.argmin(values))].tolist()
        self._try(
            _counted(
                [
                    [samples for samples, kind in zip(best, of, strict=True) if kind == number]
                    for number in range(len(self._kinds))
                ]
            )
        )

    def _programs(self, places: list[int]) -> float:
        """Solve dynamic programs for these levels; returns a lower bound of V over the others.

        The least X up to a level is a lower bound for all levels below. So the highest level is
        solved first, and then the middle of what is left.
        """
        left, solved = _MAX_PROGRAMS, math.inf
        stack: list[tuple[list[int], float | None]] = [(places, None)]
        while stack:
            some, work = stack.pop()
            levels = self.levels[some]
            if work is None and left:
                left, work = left - 1, self._least_work(float(levels[-1]))
            bounds = self._at(levels, self._work(levels).clip(min=work))
            worth = [
                place
                for place, bound in zip(some, bounds.tolist(), strict=True)
                if bound < self._value * (1 - TOLERANCE)
            ]
            if not worth:
                continue
            if work is None or len(some) == 1:
                solved = min(solved, float(bounds.min()))
            elif worth[-1] != some[-1]:
                stack.append((worth, None))
            elif len(worth) == 1:
                stack.append((worth, work))
            else:
                middle = len(worth) // 2
                stack += [(worth[middle:], work), (worth[:middle], None)]
        return solved

    def _slack(self, level: float, work: float) -> float:
        """By how much X may exceed `work` at this level for V to stay below the best; V is convex
        or straight in X, or infinite beyond a limit."""
        low, high = work, 2 * work + 1.0
        while self._at(level, high) < self._value and high < 1e300:
            high *= 2
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self._at(level, middle) < self._value else (low, middle)
        return (high - work) * (1 + 1e-6)

    def _least_work(self, level: float) -> float:
        """The least X with T at most this level, or a lower bound of it if that is too much effort.

        With a multiplier λ for the batch, Σ_r (w·t(b_r) − λ·b_r) is at least the sum of its minima.
        So a share whose own term is too far above its minimum is in no split that gets V below the
        best. Returns a lower bound of X if V with it is not below the best.
        """
        import numpy as np

        finished = self._finished(level)
        tables = [
            kind.times[:most] for kind, most in zip(self._kinds, finished.tolist(), strict=True)
        ]
        marginal = _Marginal(self._kinds, tables)
        taken = marginal.taken(self._batch, finished)
        least, rate = float(marginal.work(taken)), marginal.last_rate(taken)
        for split in marginal.splits(taken):
            self._try(split)
        if self._at(level, least) >= self._value * (1 - TOLERANCE):
            return least
        rows = []
        for kind, times in zip(self._kinds, tables, strict=True):
            costs = kind.watts * times
            reduced = costs - rate * np.arange(1, len(times) + 1)
            rows.append((costs, reduced, float(reduced.min())))
        slack = self._slack(level, least)
        windows = [np.flatnonzero(reduced <= low + slack) + 1 for _, reduced, low in rows]
        sums_of = sum(int(n) * len(one) for n, one in zip(self._ranks, windows, strict=True))
        if sums_of * self._batch > _MAX_SUMS:
            return least
        sums = np.full(self._batch + 1, np.inf)
        sums[0] = 0.0
        chosen: list[tuple[int, Any]] = []
        for number, (ranks, window) in enumerate(zip(self._ranks.tolist(), windows, strict=True)):
            costs = rows[number][0]
            for _ in range(ranks):
                after = np.full(self._batch + 1, np.inf)
                by = np.zeros(self._batch + 1, dtype=int)
                for samples in window.tolist():
                    tried = sums[: self._batch + 1 - samples] + float(costs[samples - 1])
                    better = tried < after[samples:]
                    after[samples:][better] = tried[better]
                    by[samples:][better] = samples
                sums = after
                chosen.append((number, by))
        if math.isinf(float(sums[self._batch])):
            return least + slack  # no split in the windows: V is not below the best
        found: list[list[int]] = [[] for _ in self._kinds]
        left = self._batch
        for number, by in reversed(chosen):
            found[number].append(int(by[left]))
            left -= int(by[left])
        self._try(_counted(found))
        return float(sums[self._batch])


def _counted(shares: Sequence[Sequence[int]]) -> Split:
    return [sorted(collections.Counter(one).items(), key=lambda pair: -pair[0]) for one in shares]
