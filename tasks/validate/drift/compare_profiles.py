"""Compares the profile of a run's data with that of a reference.

A column has drifted if one of its statistics is above its threshold: the larger of an effect that
matters (`FLOORS`) and of the noise between random halves of the reference, which is scaled to the
numbers of rows compared. No p-values: with millions of rows every difference is significant.
"""

from __future__ import annotations

import math

from trainwright.tasks.runs.artefacts.data_profile import (
    ColumnDrift,
    ColumnProfile,
    DataProfile,
    Statistic,
)
from trainwright.tasks.validate.drift.effect_sizes import (
    common_counts,
    count_statistics,
    expected_unseen,
    mean_shift,
    unseen,
)
from trainwright.tasks.validate.drift.histograms import histogram

FLOORS: dict[Statistic, float] = {
    "psi": 0.1,
    "js_distance": 0.134,  # of a PSI of 0.1: JS² ≈ PSI / (8 ln 2)
    "cdf_gap": 0.05,
    "mean_shift": 0.06,
    "null_share": 0.01,
    "share_shift": 0.055,
    "new_share": 0.005,
    "lost_share": 0.005,
    "kind": 0.0,
}
WORDS: dict[Statistic, str] = {
    "psi": "PSI",
    "js_distance": "Jensen-Shannon distance",
    "cdf_gap": "largest CDF gap",
    "mean_shift": "mean shift in standard deviations",
    "null_share": "difference of the share of nulls",
    "share_shift": "shift of a category's share (Cohen's h)",
    "new_share": "share of new categories",
    "lost_share": "share of lost categories",
    "kind": "another kind of values",
}
_FEW_ROWS = 12
"""A category with fewer rows can be new by chance."""
_UNCERTAIN = 3.0
"""Noise counts for more by this share over √rows, because it is estimated from the rows."""
_NAMED = 5


def compare(profile: DataProfile, reference: DataProfile) -> list[ColumnDrift]:
    """The comparison of each column of both, drifted ones first.

    Columns that only one of them has are left to the expectations.
    """
    found = [
        _column(name, column, reference.columns[name], reference.noise_factors)
        for name, column in profile.columns.items()
        if name in reference.columns and min(column.rows, reference.columns[name].rows) > 0
    ]
    return sorted(found, key=lambda one: -_relative(one.value, one.threshold))


def _column(
    name: str, column: ColumnProfile, reference: ColumnProfile, factors: dict[Statistic, float]
) -> ColumnDrift:
    values = _values(column, reference)
    thresholds = {
        statistic: max(FLOORS[statistic], _noise(statistic, column, reference, factors))
        for statistic in values
    }
    new = lost = dict[str, int]()
    if column.categories is not None and reference.categories is not None:
        new = unseen(reference.categories, column.categories)
        lost = unseen(column.categories, reference.categories)
        singles = max(expected_unseen(column.categories), expected_unseen(reference.categories))
        few = _FEW_ROWS / max(1, min(column.present, reference.present)) + 2 * singles
        thresholds["new_share"] = max(FLOORS["new_share"], few)
        thresholds["lost_share"] = max(FLOORS["lost_share"], few)
    drifted = any(values[one] > thresholds[one] for one in values)
    worst = max(values, key=lambda one: _relative(values[one], thresholds[one]))
    return ColumnDrift(
        column=name,
        drifted=drifted,
        statistic=worst,
        value=values[worst],
        threshold=thresholds[worst],
        values=values,
        thresholds=thresholds,
        new=list(new)[:_NAMED],
        lost=list(lost)[:_NAMED],
        histogram=histogram(column, reference) if drifted else None,
    )


def _values(column: ColumnProfile, reference: ColumnProfile) -> dict[Statistic, float]:
    nulls = abs(column.nulls / column.rows - reference.nulls / reference.rows)
    values: dict[Statistic, float] = {"null_share": nulls}
    if not column.present or not reference.present:
        return values
    counts = common_counts(column, reference)
    if counts is None:
        same = _kind(column) == _kind(reference)
        return values | ({} if same else {"kind": 1.0})
    ordered = column.numbers is not None
    for statistic, value in count_statistics(*counts, ordered=ordered).items():
        values[statistic] = float(value)
    if column.numbers is not None and reference.numbers is not None:
        values["mean_shift"] = mean_shift(column.numbers, reference.numbers)
    if column.categories is not None and reference.categories is not None:
        new = unseen(reference.categories, column.categories)
        lost = unseen(column.categories, reference.categories)
        values["new_share"] = sum(new.values()) / column.present
        values["lost_share"] = sum(lost.values()) / reference.present
    return values


def _kind(column: ColumnProfile) -> str:
    return "numbers" if column.numbers else "categories" if column.categories else "other"


def _noise(
    statistic: Statistic,
    column: ColumnProfile,
    reference: ColumnProfile,
    factors: dict[Statistic, float],
) -> float:
    """The reference's noise, scaled to the rows compared: by the root of 1/n + 1/m.

    PSI, which is like a square, by 1/n + 1/m. PSI and Jensen-Shannon distance are not scaled down:
    in few rows they do not fall as fast.
    """
    noise = reference.noise.get(statistic)
    if noise is None or not column.present or not reference.present:
        return 0.0
    few = 1 + _UNCERTAIN / math.sqrt(min(column.present, reference.present))
    noise *= factors.get(statistic, 1.0) * few
    scale = (1 / reference.present + 1 / column.present) / (4 / reference.present)
    if statistic in ("psi", "js_distance"):
        scale = max(1.0, scale)
    return noise * (scale if statistic == "psi" else math.sqrt(scale))


def _relative(value: float, threshold: float) -> float:
    """How far a value is above its threshold; 1 at the threshold."""
    return value / threshold if threshold else math.inf if value else 0.0


def drift_line(column: ColumnDrift) -> str:
    """A column's comparison in words, as in `column 'age': mean shift 0.31, threshold 0.06`."""
    words = WORDS[column.statistic]
    line = f"column {column.column!r}: {words} {column.value:.3g}, threshold {column.threshold:.3g}"
    shares: list[tuple[str, Statistic, list[str]]] = [
        ("new", "new_share", column.new),
        ("lost", "lost_share", column.lost),
    ]
    for what, share, names in shares:
        if names and column.values[share] > column.thresholds[share]:
            line += f"; {what}: {', '.join(name[:40] for name in names)}"
    return line
