"""The frame that expectations check, and the suite inferred from a job's first data.

A table is checked directly. Images and other arrays are checked by a profile with one row per
sample: `height`, `width` and `channels` of an image, and for each input the minimum, maximum and
mean of its finite values and the number of others (`nan_count`). Classes add two columns: the
number and the share of rows with the row's label.

The inferred suite is strict about what holds for any data: nothing missing or infinite, at least
two classes with two rows each, at least ten rows, one image size. It has slack where later data
may differ: ranges may grow by their width on either side; means may move by half a standard
deviation (in small data by four standard errors of the difference of two means); each class must
be at least a quarter as frequent as the rarest class was.
"""

# ruff: noqa: TID253 -- only loaded by tasks.validate.expectations, in a separate process

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import compute

from trainwright.tasks.data.formats import Raw
from trainwright.tasks.data.stored_rows import as_input
from trainwright.tasks.spec.job import DataSpec, Task

MIN_ROWS = 10
MAX_CELLS = 5_000_000
"""A larger table is checked by a sample, with missing and extreme values and each label."""
MAX_VALUES = 50
MAX_LABELS = 1_000
_ROUNDING = 1e-9
"""Ranges are at least this share of their values wide, because sums of many values are inexact."""

Config = dict[str, Any]


def rows_of_label(target: str) -> str:
    """The name of the column with the number of rows that have the row's label."""
    return f"rows with this {target}"


def share_of_label(target: str) -> str:
    """The name of the column with the share of rows that have the row's label."""
    return f"share of this {target}"


def make_frame(raw: Raw, target: str, task: Task, *, seed: int, sampled: bool) -> pd.DataFrame:
    """One row per row of the data, with its number; a sample if `sampled` and the data is large."""
    frame = pd.DataFrame(index=pd.RangeIndex(raw.rows))
    if not raw.is_table:
        frame = profile(raw, task).drop(columns=[target], errors="ignore")
    table, rows = raw.table, None
    if raw.is_table and sampled and table.num_rows * table.num_columns > MAX_CELLS:
        rows = _sample(table, target, seed)
        table = table.take(pa.array(rows))
        frame = frame.iloc[rows]
    shown = [name for name in table.column_names if raw.is_table or name in ("file", target)]
    for number, name in enumerate(shown):
        frame.insert(number, name, table.column(name).to_pandas().to_numpy())
    if task.endswith("classification") and target in table.column_names:
        labels = raw.table.column(target).to_pandas()
        counts = labels.groupby(labels).transform("size")
        counts = counts if rows is None else counts.iloc[rows]
        frame[rows_of_label(target)] = counts.to_numpy()
        frame[share_of_label(target)] = counts.to_numpy() / raw.rows
    return frame


def profile(raw: Raw, task: Task) -> pd.DataFrame:
    """One row of figures per image, or per entry of the arrays."""
    if raw.images is not None:
        blank = (None,) * 7
        rows = [blank if image is None else _image_figures(image) for image in raw.images]
        return pd.DataFrame(
            rows, columns=[*_IMAGE_COLUMNS, *_figure_names("pixel")], dtype="float64"
        )
    columns: dict[str, Any] = {}
    for name, array in raw.arrays.items():
        values = as_input(array, task)
        if values.ndim == 4:
            for column, size in zip(
                _IMAGE_COLUMNS, (values.shape[2], values.shape[3], values.shape[1]), strict=True
            ):
                columns[column if len(raw.arrays) == 1 else f"{name}_{column}"] = np.full(
                    len(values), size
                )
        prefix = name if len(raw.arrays) > 1 else "pixel" if values.ndim == 4 else "inputs"
        columns |= dict(zip(_figure_names(prefix), _figures(values), strict=True))
    if raw.targets is not None and raw.targets.dtype.kind in "biuf":
        columns |= dict(
            zip(_figure_names("target"), _figures(raw.targets.astype(np.float64)), strict=True)
        )
    return pd.DataFrame(columns)


_IMAGE_COLUMNS = ("height", "width", "channels")


def _figure_names(prefix: str) -> list[str]:
    return [
        f"{prefix}_min",
        f"{prefix}_max",
        f"{prefix}_mean",
        "nan_count" if prefix == "pixel" else f"{prefix}_nan_count",
    ]


def _figures(values: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    flat = values.reshape(len(values), math.prod(values.shape[1:])).astype(np.float64, copy=False)
    finite = np.isfinite(flat)
    counts = finite.sum(axis=1)
    low = np.min(flat, axis=1, where=finite, initial=np.inf)
    high = np.max(flat, axis=1, where=finite, initial=-np.inf)
    total = np.sum(flat, axis=1, where=finite)
    with np.errstate(invalid="ignore"):
        mean = np.where(counts > 0, total / np.maximum(counts, 1), np.nan)
    return [
        np.where(counts > 0, low, np.nan),
        np.where(counts > 0, high, np.nan),
        mean,
        flat.shape[1] - counts,
    ]


def _image_figures(image: np.ndarray[Any, Any]) -> tuple[float, ...]:
    channels, height, width = image.shape
    return (
        height,
        width,
        channels,
        image.min() / 255,
        image.max() / 255,
        float(image.mean()) / 255,
        0,
    )


def _sample(table: Any, target: str, seed: int) -> np.ndarray[Any, Any]:
    """Row numbers, rising: random rows, and rows with missing and extreme values and each label."""
    size = max(MIN_ROWS, MAX_CELLS // table.num_columns)
    chosen = [
        np.random.Generator(np.random.PCG64(seed)).choice(table.num_rows, size, replace=False)
    ]
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        missing = compute.indices_nonzero(compute.is_null(column, nan_is_null=True))
        chosen.append(missing[:1000].to_numpy())
        if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
            extremes = compute.min_max(column).as_py()
            chosen.append(
                np.array([compute.index(column, value).as_py() for value in extremes.values()])
            )
        if name == target:
            labels = column.unique()[:MAX_LABELS]
            chosen.append(np.array([compute.index(column, label).as_py() for label in labels]))
    rows = np.unique(np.concatenate(chosen).astype(np.int64))
    return rows[rows >= 0]


def infer_suite(
    frame: pd.DataFrame, rows: int, spec: DataSpec, task: Task, *, table: bool
) -> list[Config]:
    """The expectations inferred from the frame, in Great Expectations' format. `rows`: in all."""
    target = spec.target
    suite = [
        _config(
            "expect_table_row_count_to_be_between",
            min_value=max(MIN_ROWS, rows // 2),
            max_value=max(100, rows * 10),
        )
    ]
    if table:
        suite.append(
            _config(
                "expect_table_columns_to_match_set",
                column_set=list(frame.columns),
                exact_match=True,
            )
        )
    derived = (rows_of_label(target), share_of_label(target))
    names = [name for name in frame.columns if name not in derived and (table or name != "file")]
    for name in sorted(names, key=lambda name: name != target):
        column = frame[name]
        # A file that is not an image lacks all of its profile; checking `height` is enough.
        if table or name == target or name == "height":
            missing = "refuse" if name == target or not table else spec.missing
            suite += _null_expectations(column, name, missing)
        if name == target and task.endswith("classification"):
            suite += _label_expectations(frame, rows, target)
        elif name.endswith("nan_count") and not table:
            suite.append(
                _config("expect_column_values_to_be_between", column=name, min_value=0, max_value=0)
            )
        elif name.endswith(_IMAGE_COLUMNS) and not table:
            usual = column.mode()
            if len(usual):
                suite.append(
                    _config(
                        "expect_column_values_to_be_in_set",
                        column=name,
                        value_set=[int(usual.iloc[0])],
                    )
                )
        else:
            suite += _column_expectations(column, name)
    return suite


def _null_expectations(column: pd.Series[Any], name: str, missing: str) -> list[Config]:
    """No nulls; if the job keeps missing values, not many more than in this data.

    A column without any value is left out of training, unless the job refuses missing values.
    """
    empty = len(column) > 0 and bool(column.isna().all())
    if empty and missing != "refuse":
        return []
    config = {"column": name}
    if missing == "keep":
        share, rows = float(column.isna().mean()), max(1, len(column))
        noise = 3 * math.sqrt(max(share * (1 - share), 1 / rows) / rows)
        most = share + max(0.05, share / 2) + noise
        return [
            _config(
                "expect_column_values_to_not_be_null", **config, mostly=round(max(0, 1 - most), 4)
            )
        ]
    return [_config("expect_column_values_to_not_be_null", **config)]


def _label_expectations(frame: pd.DataFrame, rows: int, target: str) -> list[Config]:
    labels = _values(frame[target])
    suite = [
        _config(
            "expect_column_unique_value_count_to_be_between",
            column=target,
            min_value=2,
            max_value=max(2, len(labels)),
        ),
        _config("expect_column_values_to_be_between", column=rows_of_label(target), min_value=2),
    ]
    if 0 < len(labels) <= MAX_LABELS:
        suite.insert(
            0, _config("expect_column_values_to_be_in_set", column=target, value_set=labels)
        )
    rarest = frame[share_of_label(target)].min() if len(labels) else 0.0
    balance = {"column": share_of_label(target), "min_value": round(float(rarest) / 4, 6)}
    return [*suite, _config("expect_column_values_to_be_between", **balance)]


def _column_expectations(column: pd.Series[Any], name: str) -> list[Config]:
    if pd.api.types.is_bool_dtype(column):
        return [_config("expect_column_values_to_be_in_set", column=name, value_set=[True, False])]
    if not pd.api.types.is_numeric_dtype(column):
        values = (
            _values(column) if column.map(type).isin([str, bool, type(None), float]).all() else []
        )
        known = 0 < len(values) <= MAX_VALUES
        return (
            [_config("expect_column_values_to_be_in_set", column=name, value_set=values)]
            if known
            else []
        )
    finite = column[np.isfinite(column.to_numpy(dtype=np.float64, na_value=np.nan))].astype(
        np.float64
    )
    if finite.empty:
        return []
    with np.errstate(over="ignore"):
        low, high, mean, deviation = map(
            float, (finite.min(), finite.max(), finite.mean(), finite.std(ddof=0))
        )
    rounding = _ROUNDING * max(abs(low), abs(high))
    slack = max(high - low, rounding) if high > low else max(abs(high), 1.0)
    drift = (
        max(deviation * max(0.5, 4 * (2 / len(finite)) ** 0.5), rounding)
        if deviation > rounding
        else slack
    )
    return [
        _config(expectation, column=name, **_bounds(least, most))
        for expectation, least, most in (
            ("expect_column_values_to_be_between", low - slack, high + slack),
            ("expect_column_mean_to_be_between", mean - drift, mean + drift),
        )
        if math.isfinite(least) and math.isfinite(most)
    ]


def _values(column: pd.Series[Any]) -> list[Any]:
    """The distinct values, as Python values, sorted."""
    return sorted(
        (value.item() if hasattr(value, "item") else value for value in column.dropna().unique()),
        key=_order,
    )


def _order(value: Any) -> tuple[str, Any]:
    return (type(value).__name__, value)


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
