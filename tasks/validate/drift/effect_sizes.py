"""Effect sizes between two columns: how much they differ, however many rows they have.

PSI, Jensen-Shannon distance and CDF gap compare counts in common bins: at most 20 bins with about
the same number of rows of both columns together, or the categories that 0.5 % of both have, with
all others as one. All are symmetric, and zero for equal columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainwright.tasks.runs.artefacts.data_profile import (
    Categories,
    ColumnProfile,
    Numbers,
    Statistic,
)
from trainwright.tasks.validate.drift.profile import Bins

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

GROUPS = 20
RARE_SHARE = 0.005
_ROUNDING = 1e-13


def common_counts(one: ColumnProfile, two: ColumnProfile) -> tuple[Array, Array] | None:
    """The counts of both columns in common bins; None if they hold different kinds of values."""
    if one.numbers is not None and two.numbers is not None:
        return _number_counts(one.numbers, two.numbers)
    if one.categories is not None and two.categories is not None:
        return _category_counts(one.categories, two.categories)
    return None


def _number_counts(one: Numbers, two: Numbers) -> tuple[Array, Array]:
    import numpy as np

    first, second = Bins.kept(one).merged_to(two.shift), Bins.kept(two).merged_to(one.shift)
    keys = np.union1d(first.keys, second.keys)
    counts = np.zeros((2, len(keys)))
    for row, bins in zip(counts, (first, second), strict=True):
        row[np.searchsorted(keys, bins.keys)] = bins.counts
    return _grouped(counts)


def _grouped(counts: Array) -> tuple[Array, Array]:
    """Neighbouring bins added up, to `GROUPS` or fewer of about the same share of both."""
    import numpy as np

    shares = (counts[0] / counts[0].sum() + counts[1] / counts[1].sum()) / 2
    middle = np.cumsum(shares) - shares / 2
    _, first = np.unique(
        np.minimum((middle * GROUPS).astype(np.int64), GROUPS - 1), return_index=True
    )
    grouped = np.add.reduceat(counts, first, axis=1)
    return grouped[0], grouped[1]


def _category_counts(one: Categories, two: Categories) -> tuple[Array, Array]:
    import numpy as np

    known = set(one.counts) | set(two.counts)
    if one.rest or two.rest:  # a value may be among the other's rest
        known = set(one.counts) & set(two.counts)
    totals = [sum(each.counts.values()) + each.rest for each in (one, two)]
    names = sorted(
        name
        for name in known
        if one.counts.get(name, 0) / totals[0] + two.counts.get(name, 0) / totals[1]
        >= 2 * RARE_SHARE
    )
    counts = np.array([[each.counts.get(name, 0) for name in names] for each in (one, two)], float)
    others = np.array(totals)[:, None] - counts.sum(axis=1, keepdims=True)
    counts = np.concatenate([counts.reshape(2, len(names)), others], axis=1)
    return counts[0], counts[1]


def count_statistics(one: Array, two: Array, *, ordered: bool) -> dict[Statistic, Array]:
    """The statistics of counts in common bins (last dimension); `ordered`: bins of numbers.

    psi = Σ (p - q) ln(p / q), with half a row more in each bin; js_distance is the square root of
    the Jensen-Shannon divergence in bits (Endres and Schindelin 2003); cdf_gap is the largest
    difference of cumulative shares (Kolmogorov-Smirnov); share_shift is the largest
    2 |asin √p - asin √q| (Cohen's h) of a category, with Anscombe's corrections for few rows.
    """
    import numpy as np

    rows = one.sum(axis=-1, keepdims=True), two.sum(axis=-1, keepdims=True)
    p, q = one / rows[0], two / rows[1]
    half = one.shape[-1] / 2
    smooth_p, smooth_q = (one + 0.5) / (rows[0] + half), (two + 0.5) / (rows[1] + half)
    middle = (p + q) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = [np.where(each > 0, each * np.log2(each / middle), 0.0) for each in (p, q)]
    found: dict[Statistic, Array] = {
        "psi": ((smooth_p - smooth_q) * np.log(smooth_p / smooth_q)).sum(axis=-1),
        "js_distance": np.sqrt(np.clip((parts[0] + parts[1]).sum(axis=-1) / 2, 0, 1)),
    }
    if ordered:
        gaps = np.abs(np.cumsum(p, axis=-1) - np.cumsum(q, axis=-1))
        found["cdf_gap"] = gaps.max(axis=-1)
    else:
        angles = [
            2 * np.arcsin(np.sqrt((each + 0.375) / (total + 0.75)))
            for each, total in ((one, rows[0]), (two, rows[1]))
        ]
        found["share_shift"] = np.abs(angles[0] - angles[1]).max(axis=-1)
    return found


def mean_shift(one: Numbers, two: Numbers) -> float:
    """The distance of the means in standard deviations (Cohen's d); 0 for equal means."""
    distance = abs(one.mean - two.mean)
    if not distance > _ROUNDING * max(abs(one.mean), abs(two.mean)):
        return 0.0
    deviation = ((one.deviation**2 + two.deviation**2) / 2) ** 0.5
    return float(distance / deviation) if 0 < deviation < float("inf") else 0.0


def unseen(one: Categories, two: Categories) -> dict[str, int]:
    """The categories of `two` that `one` lacks, most frequent first; none if `one` has a rest."""
    if one.rest or two.rest:
        return {}
    return {name: count for name, count in two.counts.items() if name not in one.counts}


def expected_unseen(one: Categories) -> float:
    """The share of further rows that have another category: that of singletons (Good 1953)."""
    return sum(count == 1 for count in one.counts.values()) / sum(one.counts.values())
