"""The benchmark that is shipped with the package: how templates did on known data sets.

One row of benchmark.csv is one training: a data set, a share of its rows, a template in one size.
`tests/benchmarks/recommend/measure_templates.py` makes the file.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from trainwright.tasks.recommend.similar_sets.data_figures import FIGURES, DataFigures

FILE = "benchmark.csv"
COLUMNS = (
    "set",
    "task",
    *FIGURES,
    "template",
    "size",
    "fraction",
    "seed",
    "metric",
    "error",
    "relative_error",
    "seconds",
)


@dataclass(frozen=True)
class Trained:
    """One training of the benchmark."""

    data: str
    """name of the data set"""
    task: str
    figures: DataFigures
    template: str
    size: str
    fraction: float
    """share of the set's rows that were used"""
    seed: int
    metric: float
    """on the validation rows: accuracy, RMSE or MAE"""
    error: float
    """1 - accuracy, or the metric itself"""
    relative_error: float
    """by that of the better landmark"""
    seconds: float

    @property
    def model(self) -> tuple[str, str]:
        """Template and size."""
        return self.template, self.size


@cache
def benchmark() -> tuple[Trained, ...]:
    """The rows of the shipped file."""
    text = files("trainwright.tasks.recommend.similar_sets").joinpath(FILE).read_text()
    return tuple(read_rows(text.splitlines()))


def read_rows(lines: Iterable[str]) -> list[Trained]:
    """The rows of a file of this form."""
    return [_row(one) for one in csv.DictReader(lines)]


def _row(values: dict[str, Any]) -> Trained:
    return Trained(
        data=values["set"],
        task=values["task"],
        figures={name: float(values[name]) for name in FIGURES},
        template=values["template"],
        size=values["size"],
        fraction=float(values["fraction"]),
        seed=int(values["seed"]),
        metric=float(values["metric"]),
        error=float(values["error"]),
        relative_error=float(values["relative_error"]),
        seconds=float(values["seconds"]),
    )
