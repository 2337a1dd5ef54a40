"""What the inferred suite needs of a column: computed by `duckdb_table`, or from a frame."""

# ruff: noqa: TID253 -- only loaded by tasks.validate.expectations, in a separate process

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd

ValueKind = Literal["number", "flag", "text", "other"]

MAX_VALUES = 50
MAX_LABELS = 1_000


@dataclass(frozen=True)
class ColumnSummary:
    """A column. `missing` is the share of rows without a value (or NaN), `finite` the number of
    rows with a finite number.

    `low`, `high`, `mean` and `deviation` are those of the finite numbers. `values` are a text
    column's distinct values, sorted, if they are at most `MAX_VALUES`. `usual` is the most
    frequent whole number, of frames only.
    """

    name: str
    kind: ValueKind
    missing: float = 0.0
    finite: int = 0
    low: float = 0.0
    high: float = 0.0
    mean: float = 0.0
    deviation: float = 0.0
    values: list[Any] = field(default_factory=list)
    usual: int = 0


@dataclass(frozen=True)
class LabelSummary:
    """The classes: their number, their names if they are few, the share of the rarest."""

    count: int
    values: list[Any]
    rarest: float


def of_series(column: pd.Series[Any]) -> ColumnSummary:
    """The summary of a frame's column."""
    name = str(column.name)
    missing = float(column.isna().mean()) if len(column) else 0.0
    if pd.api.types.is_bool_dtype(column):
        return ColumnSummary(name, "flag", missing)
    if not pd.api.types.is_numeric_dtype(column):
        text = column.map(type).isin([str, bool, type(None), float]).all()
        values = distinct(column) if text else []
        return ColumnSummary(
            name,
            "text" if text else "other",
            missing,
            values=values if len(values) <= MAX_VALUES else [],
        )
    numbers = column.to_numpy(dtype=np.float64, na_value=np.nan)
    finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        return ColumnSummary(name, "number", missing)
    with np.errstate(over="ignore"):
        return ColumnSummary(
            name,
            "number",
            missing,
            len(finite),
            float(finite.min()),
            float(finite.max()),
            float(finite.mean()),
            float(finite.std()),
            usual=int(column.mode().iloc[0]),
        )


def of_labels(labels: pd.Series[Any], rows: int) -> LabelSummary:
    """The classes in a column of labels."""
    counts = labels.value_counts()
    values = distinct(labels) if len(counts) <= MAX_LABELS else []
    return LabelSummary(len(counts), values, float(counts.min()) / rows if len(counts) else 0.0)


def distinct(column: pd.Series[Any]) -> list[Any]:
    """The distinct values, as Python values, sorted."""
    return in_order(
        value.item() if hasattr(value, "item") else value for value in column.dropna().unique()
    )


def in_order(values: Any) -> list[Any]:
    """Values of one or more types in order."""
    return sorted(values, key=lambda value: (type(value).__name__, value))
