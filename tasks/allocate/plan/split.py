"""Splits a batch among ranks so that all finish together: water-filling on step-time curves.

With t_r(b) the time of rank r for b samples, the water level W of a global batch B is the least
time with

    Σ_r max(1, |{b: t_r(b) <= W}|) >= B

Every rank gets the samples that it finishes before W, and at least one. The rest goes, in the order
of the ranks, to those that finish one more sample exactly at W. No other split has a lower
max_r t_r(b_r), and each rank is within one sample of its real-valued share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

TimesArray = Any
"""A numpy array: seconds for 1, 2, … samples, as many as fit in memory. Never falls."""


def split_batch(
    total: int, curves: Sequence[Callable[[int], float]], limits: Sequence[int | None] | None = None
) -> list[int] | None:
    """Samples of each rank: at least one, `total` together, none above its limit.

    max_r t_r(b_r) is the least possible; ties go to the earlier rank. Returns None if no such split
    exists: fewer samples than ranks, or more than the limits hold. Raises ValueError if a curve
    falls.
    """
    import numpy as np

    bounds = [
        total if limit is None else min(total, limit) for limit in limits or [None] * len(curves)
    ]
    if total < len(curves) or min(bounds) < 1:
        return None
    tables = [
        np.array([curve(size) for size in range(1, bound + 1)])
        for curve, bound in zip(curves, bounds, strict=True)
    ]
    if any((np.diff(table) < 0).any() for table in tables):
        raise ValueError("a step time falls as samples are added")
    shares = split_kinds(total, tables, [1] * len(tables), levels_of(tables))
    return None if shares is None else [ranks[0][0] for ranks in shares]


def shares(count: int, split: Sequence[int]) -> list[int]:
    """Split `count` samples in proportion to `split`.

    Largest-remainder method; the earlier rank wins ties.
    """
    total = sum(split)
    if count == total:
        return list(split)
    exact = [count * part / total for part in split]
    whole = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(split)), key=lambda rank: (whole[rank] - exact[rank], rank))
    for rank in by_remainder[: count - sum(whole)]:
        whole[rank] += 1
    return whole


def levels_of(tables: Sequence[TimesArray]) -> TimesArray:
    """Every time that a rank can take, sorted: one of them is the water level."""
    import numpy as np

    return np.unique(np.concatenate(tables)) if tables else np.empty(0)


def split_kinds(
    total: int, tables: Sequence[TimesArray], ranks: Sequence[int], levels: TimesArray
) -> list[list[tuple[int, int]]] | None:
    """Split among `ranks[k]` ranks of each kind k.

    Returns for each kind pairs of (batch, ranks), largest batch first; None as `split_batch`.
    """
    if (
        sum(ranks) > total
        or sum(count * len(table) for count, table in zip(ranks, tables, strict=True)) < total
    ):
        return None
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        held = sum(
            count * max(1, int(table.searchsorted(levels[middle], "right")))
            for count, table in zip(ranks, tables, strict=True)
        )
        low, high = (low, middle) if held >= total else (middle + 1, high)
    level = levels[low]
    before = [max(1, int(table.searchsorted(level, "left"))) for table in tables]
    until = [max(1, int(table.searchsorted(level, "right"))) for table in tables]
    left = total - sum(count * batch for count, batch in zip(ranks, before, strict=True))
    shares = []
    for count, low_batch, high_batch in zip(ranks, before, until, strict=True):
        room = high_batch - low_batch
        full, part = divmod(min(left, count * room), room) if room else (0, 0)
        left -= full * room + part
        sizes = [
            (high_batch, full),
            (low_batch + part, 1 if part else 0),
            (low_batch, count - full - bool(part)),
        ]
        shares.append([(batch, some) for batch, some in sizes if some])
    return shares
