"""The suite inferred from a job's first data.

It is strict about what holds for any data: nothing missing or infinite, at least two classes with
two rows each, at least ten rows, one image size if it is one. It has slack where later data may
differ: ranges may grow by their width on either side, but not over zero if no value was on its
other side; means may move by half a standard deviation (in small data by four standard errors of
the difference of two means); each class must be at least a quarter as frequent as the rarest class
was.
"""

from __future__ import annotations

import math
from typing import Any

from trainwright.tasks.data.row_split import MIN_ROWS
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.validate.column_summary import ColumnSummary, LabelSummary
from trainwright.tasks.validate.label_columns import rows_of_label, share_of_label
from trainwright.tasks.validate.sample_frame import IMAGE_COLUMNS

_ROUNDING = 1e-9
"""Ranges are at least this share of their values wide, because sums of many values are inexact."""

Config = dict[str, Any]


def infer_suite(
    columns: list[ColumnSummary],
    labels: LabelSummary | None,
    rows: int,
    spec: DataSpec,
    *,
    table: bool,
) -> list[Config]:
    """The expectations in Great Expectations' format. `labels`: of a target with classes."""
    target = spec.target
    suite = [
        _config(
            "expect_table_row_count_to_be_between",
            min_value=max(MIN_ROWS, rows // 2),
            max_value=max(100, rows * 10),
        )
    ]
    derived = [rows_of_label(target), share_of_label(target)] if labels is not None else []
    if table:
        suite.append(
            _config(
                "expect_table_columns_to_match_set",
                column_set=[column.name for column in columns] + derived,
                exact_match=True,
            )
        )
    checked = [
        column
        for column in columns
        if column.name not in spec.ignore and (table or column.name != "file")
    ]
    for column in sorted(checked, key=lambda column: column.name != target):
        name = column.name
        # A file that is not an image lacks all of its figures; checking `height` is enough.
        if table or name == target or name == "height":
            missing = "refuse" if name == target or not table else spec.missing
            suite += _null_expectations(column, rows, missing)
        if name == target and labels is not None:
            suite += _label_expectations(labels, target)
        elif name.endswith("nan_count") and not table:
            suite.append(
                _config("expect_column_values_to_be_between", column=name, min_value=0, max_value=0)
            )
        elif name.endswith(IMAGE_COLUMNS) and not table and column.finite:
            # Images of different sizes are resized; of different channels, they become RGB.
            if column.low == column.high or name.endswith("channels"):
                values = sorted({int(column.low), int(column.high)})
                suite.append(
                    _config("expect_column_values_to_be_in_set", column=name, value_set=values)
                )
            else:
                suite += _column_expectations(column, least=1)
        else:
            suite += _column_expectations(column)
    return suite


def _null_expectations(column: ColumnSummary, rows: int, missing: str) -> list[Config]:
    """No nulls; if the job keeps missing values, not many more than in this data.

    A column without any value is left out of training, unless the job refuses missing values.
    """
    if column.missing == 1 and missing != "refuse":
        return []
    kind = "expect_column_values_to_not_be_null"
    if missing == "keep":
        share = column.missing
        noise = 3 * math.sqrt(max(share * (1 - share), 1 / max(1, rows)) / max(1, rows))
        most = share + max(0.05, share / 2) + noise
        return [_config(kind, column=column.name, mostly=round(max(0, 1 - most), 4))]
    return [_config(kind, column=column.name)]


def _label_expectations(labels: LabelSummary, target: str) -> list[Config]:
    suite = [
        _config(
            "expect_column_unique_value_count_to_be_between",
            column=target,
            min_value=2,
            max_value=max(2, labels.count),
        ),
        _config("expect_column_values_to_be_between", column=rows_of_label(target), min_value=2),
    ]
    if labels.values:
        suite.insert(
            0, _config("expect_column_values_to_be_in_set", column=target, value_set=labels.values)
        )
    balance = {"column": share_of_label(target), "min_value": round(labels.rarest / 4, 6)}
    return [*suite, _config("expect_column_values_to_be_between", **balance)]


def _column_expectations(column: ColumnSummary, least: float = -math.inf) -> list[Config]:
    """Range and mean of numbers, or the values of others. `least`: none can be less."""
    name = column.name
    if column.kind == "flag":
        return [_config("expect_column_values_to_be_in_set", column=name, value_set=[True, False])]
    if column.values:
        return [_config("expect_column_values_to_be_in_set", column=name, value_set=column.values)]
    if not column.finite:
        return []
    low, high, mean, deviation = column.low, column.high, column.mean, column.deviation
    rounding = _ROUNDING * max(abs(low), abs(high))
    slack = max(high - low, rounding) if high > low else max(abs(high), 1.0)
    drift = (
        max(deviation * max(0.5, 4 * (2 / column.finite) ** 0.5), rounding)
        if deviation > rounding
        else slack
    )
    least = max(least, 0.0) if low >= 0 else least
    greatest = 0.0 if high <= 0 and low < 0 else math.inf
    return [
        _config(expectation, column=name, **_bounds(max(least, lower), min(greatest, upper)))
        for expectation, lower, upper in (
            ("expect_column_values_to_be_between", low - slack, high + slack),
            ("expect_column_mean_to_be_between", mean - drift, mean + drift),
        )
        if math.isfinite(lower) and math.isfinite(upper)
    ]


def _bounds(low: float, high: float) -> dict[str, float]:
    """The bounds, rounded outwards to a thousandth of their distance, unless that overflows."""
    width = high - low
    if not 1e-300 < width < 1e300:
        return {"min_value": low, "max_value": high}
    unit = 10.0 ** math.floor(math.log10(width / 1000))
    digits = max(0, -round(math.log10(unit)))
    least, most = (
        round(way(end / unit) * unit, digits) for way, end in ((math.floor, low), (math.ceil, high))
    )
    return {"min_value": min(least, low), "max_value": max(most, high)}


def _config(expectation: str, **kwargs: Any) -> Config:
    return {"type": expectation, "kwargs": kwargs}
