"""What a rank of each kind may hold, and how long it works for that, within an interval of water levels.

A rank's time is a straight line between the knots of its kind's curve, and what a rank costs is a convex function of its time
that bends in a few places. So the least of cost minus a price for each sample is at an end of the interval, at a knot, or beside
a bend: there is no need to look at any other share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Choices(NamedTuple):
    """By choice (row) and kind (column): samples, and seconds at the median. Some rows may be alike."""

    samples: Any
    times: Any


class Tables:
    """The times of every kind, one after the other: `tables` by kind for 1, 2, … samples, as far as memory goes."""

    def __init__(self, tables: Sequence[Any], knots: Sequence[Iterable[int]]) -> None:
        import numpy as np

        self._tables = tables
        self._all = np.concatenate([*tables, [np.inf]])
        self._ends = np.array([len(table) for table in tables])
        self._before = np.cumsum(self._ends) - self._ends - 1
        rows = max((len(set(one)) for one in knots), default=0)
        self._knots = np.ones((rows, len(tables)))
        for place, one in enumerate(knots):
            inside = sorted(set(one))
            self._knots[: len(inside), place] = inside

    def until(self, seconds: Any, side: str = "right") -> Any:
        """By kind: how many samples are finished by these seconds (one for all kinds, or one for each); `left`: before them."""
        import numpy as np

        each = np.broadcast_to(seconds, len(self._tables)).tolist()
        found = [
            table.searchsorted(one, side) for table, one in zip(self._tables, each, strict=True)
        ]
        return np.array(found, dtype=float)

    def times(self, samples: Any) -> Any:
        """Seconds by kind (the last axis); a kind for which memory has no room at all takes no time."""
        import numpy as np

        at = self._before + np.minimum(samples, self._ends).astype(int)
        return np.where(self._ends > 0, self._all[at], 0.0)

    def between(self, low: Any, high: Any, bends_s: Iterable[float] = ()) -> Choices:
        """The choices from `low` to `high` samples that matter, where the cost bends at these times."""
        import numpy as np

        bends = [self.until(one) for one in bends_s]
        inner = [low + 1, *self._knots, *bends, *(one + 1 for one in bends)]
        samples = np.vstack([low, np.clip(inner, low, high), high])
        return Choices(samples, self.times(samples))
