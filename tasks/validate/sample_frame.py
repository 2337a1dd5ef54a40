"""The frame that expectations check if the data is no table: one row of figures per sample.

Images have `height`, `width` and `channels`; each input has the minimum, maximum and mean of its
finite values and the number of others (`nan_count`). Classes add two columns: the number and the
share of rows with the row's label.
"""

# ruff: noqa: TID253 -- only loaded by tasks.validate.expectations, in a separate process

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from trainwright.tasks.data.formats import Raw
from trainwright.tasks.data.modalities.array_inputs import as_input
from trainwright.tasks.spec.data_spec import Task
from trainwright.tasks.validate.label_columns import rows_of_label, share_of_label

IMAGE_COLUMNS = ("height", "width", "channels")


def make_frame(raw: Raw, target: str, task: Task) -> pd.DataFrame:
    """One row per row of the data, with its number: a table's own columns, or figures."""
    frame = pd.DataFrame(index=pd.RangeIndex(raw.rows))
    if not raw.is_table:
        frame = sample_figures(raw, task).drop(columns=[target], errors="ignore")
    table = raw.table
    shown = [name for name in table.column_names if raw.is_table or name in ("file", target)]
    for number, name in enumerate(shown):
        frame.insert(number, name, table.column(name).to_pandas().to_numpy())
    if task.endswith("classification") and target in table.column_names:
        labels = table.column(target).to_pandas()
        counts = labels.groupby(labels).transform("size")
        frame[rows_of_label(target)] = counts.to_numpy()
        frame[share_of_label(target)] = counts.to_numpy() / raw.rows
    return frame


def sample_figures(raw: Raw, task: Task) -> pd.DataFrame:
    """One row of figures per image, or per entry of the arrays."""
    if raw.images is not None:
        blank = (None,) * 7
        rows = [blank if image is None else _image_figures(image) for image in raw.images]
        return pd.DataFrame(
            rows, columns=[*IMAGE_COLUMNS, *_figure_names("pixel")], dtype="float64"
        )
    columns: dict[str, Any] = {}
    for name, array in raw.arrays.items():
        values = as_input(array, task)
        if values.ndim == 4:
            for column, size in zip(
                IMAGE_COLUMNS, (values.shape[2], values.shape[3], values.shape[1]), strict=True
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
