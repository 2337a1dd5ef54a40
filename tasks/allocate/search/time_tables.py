"""Step times of all kinds as tables, and the shares of a rank that the relaxation must consider.

A rank's time is concave between the knots of its kind's curve (mostly a straight line), and its
cost is a convex function of its time that bends in a few places. So the minimum of cost minus a
price for each sample lies at an end of the interval of shares, at a knot, or next to a bend: no
other share can be better.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class ShareChoices(NamedTuple):
    """Samples, and median seconds, by choice (rows) and kind (columns). Rows may repeat."""

    samples: Any
    times: Any


class TimeTables:
    """Seconds for 1, 2, … samples, as many as memory holds, for every kind.

    `knots` are the samples between which a kind's time is concave.
    """

    def __init__(self, tables: Sequence[Any], knots: Sequence[Iterable[int]]) -> None:
        import numpy as np

        self._tables = tables
        some = [table for table in tables if len(table)]
        self.levels = np.unique(np.concatenate(some)) if some else np.empty(0)
        """Every time that a rank can take, sorted: one of them is the slowest rank's."""
        self._all = np.concatenate([*tables, [np.inf]])
        self._ends = np.array([len(table) for table in tables])
        self._before = np.cumsum(self._ends) - self._ends - 1
        rows = max((len(set(one)) for one in knots), default=0)
        self._knots = np.ones((rows, len(tables)))
        for place, one in enumerate(knots):
            inside = sorted(set(one))
            self._knots[: len(inside), place] = inside

    def until(self, seconds: Any, side: str = "right") -> Any:
        """By kind: samples that a rank finishes within these seconds (one number, or one by kind).

        With `side="left"`: samples that it finishes before them.
        """
        import numpy as np

        each = np.broadcast_to(seconds, len(self._tables)).tolist()
        found = [
            table.searchsorted(one, side) for table, one in zip(self._tables, each, strict=True)
        ]
        return np.array(found, dtype=float)

    def times(self, samples: Any) -> Any:
        """Seconds by kind (the last axis); 0 for a kind whose memory holds no sample."""
        import numpy as np

        at = self._before + np.minimum(samples, self._ends).astype(int)
        return np.where(self._ends > 0, self._all[at], 0.0)

    def between(self, low: Any, high: Any, bends_s: Iterable[Any] = ()) -> ShareChoices:
        """The choices from `low` to `high` samples, if the cost bends at these times.

        A bend is one time for all kinds, or one by kind.
        """
        import numpy as np

        bends = [self.until(one) for one in bends_s]
        inner = [low + 1, *self._knots, *bends, *(one + 1 for one in bends)]
        samples = np.vstack([low, np.clip(inner, low, high), high])
        return ShareChoices(samples, self.times(samples))
