"""Predicts how a model will do on a data set, from the benchmark's sets that resemble it.

For each model (template and size), with e the error and l that of the better landmark,

    log((e + δ) / (l + δ)) = ridge regression on the figures + the weighted residual of the nearest

The interval comes from the same prediction of every set of the benchmark from the others: 80 % of
those residuals are within it. It is twice as wide for data that is far from all sets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np  # noqa: TID253 - loaded only to recommend

from trainwright.estimator.curves import Interval
from trainwright.tasks.recommend.similar_sets.benchmark_table import Trained
from trainwright.tasks.recommend.similar_sets.data_figures import (
    FIGURES,
    DataFigures,
    best_landmark,
)

Array = np.ndarray[Any, Any]
LEAST_SETS = 4
"""With fewer sets of a task and model there is no prediction."""
NEAREST = 3
_COVERAGE = 0.8
_RIDGE = 3.0
_FAR = 1.5
"""Data is far if its nearest set is this many times as far as those of nearly all sets are."""
_SHARE_FLOOR = 0.002
"""δ for classes: differences of errors below it count little."""


@dataclass(frozen=True)
class MetricPrediction:
    """A model's predicted error, with its 80 % interval: 1 - accuracy, or the metric itself."""

    error: Interval
    neighbours: tuple[str, ...]
    """the nearest sets, nearest first"""
    far: bool
    """whether the data is unlike all sets"""
    sets: int


@dataclass(frozen=True)
class _MeanResult:
    """A model on a set with a share of its rows; the mean over seeds."""

    data: str
    place: Array
    """the figures as a vector"""
    value: float


def predict_metric(
    figures: DataFigures, task: str, model: tuple[str, str], table: Sequence[Trained]
) -> MetricPrediction | None:
    """The prediction for a model, `(template, size)`; None if the benchmark has too few sets."""
    floor = _SHARE_FLOOR if task.endswith("classification") else 0.0
    points = _points([one for one in table if one.task == task and one.model == model], floor)
    names = sorted({one.data for one in points})
    if len(names) < LEAST_SETS:
        return None
    scale = _scale([one.place for one in points])
    here = _vector(figures)
    order = _by_distance(here, points, scale)
    typical = [
        _by_distance(one.place, [other for other in points if other.data != one.data], scale)[0][0]
        for one in points
    ]
    far = order[0][0] > _FAR * float(np.quantile(typical, 0.9))
    residuals = []
    for name in names:
        others = [one for one in points if one.data != name]
        residuals += [
            abs(_predicted(one.place, others, scale) - one.value)
            for one in points
            if one.data == name
        ]
    spread = float(np.quantile(residuals, _COVERAGE, method="higher")) * (2 if far else 1)
    value = _predicted(here, points, scale)
    base = best_landmark(figures) + floor
    most = 1.0 if floor else math.inf
    median, low, high = (
        min(max(base * math.exp(min(one, 50.0)) - floor, 0.0), most)
        for one in (value, value - spread, value + spread)
    )
    return MetricPrediction(
        Interval(median=median, low=low, high=high),
        tuple(name for _, name in order[:NEAREST]),
        far,
        len(names),
    )


def _points(rows: Sequence[Trained], floor: float) -> list[_MeanResult]:
    found: dict[tuple[str, float], list[Trained]] = {}
    for one in rows:
        found.setdefault((one.data, one.fraction), []).append(one)
    return [
        _MeanResult(
            name,
            np.mean([_vector(one.figures) for one in same], 0),
            float(np.mean([_relative(one, floor) for one in same])),
        )
        for (name, _), same in found.items()
    ]


def _relative(one: Trained, floor: float) -> float:
    return math.log((one.error + floor + 1e-12) / (best_landmark(one.figures) + floor))


def _vector(figures: DataFigures) -> Array:
    """The figures by which sets are compared. Errors of landmarks count as logarithms.

    The constant's error is left out, as its unit may be the target's.
    """
    return np.array(
        [
            math.log(figures[name]) if name.endswith("_error") else figures[name]
            for name in FIGURES
            if name != "constant_error"
        ]
    )


def _scale(places: Sequence[Array]) -> Array:
    deviation = np.std(places, 0)
    return np.where(deviation > 1e-9, deviation, 1.0)


def _by_distance(
    place: Array, points: Sequence[_MeanResult], scale: Array
) -> list[tuple[float, str]]:
    """The sets with their distances from a place, nearest first."""
    found: dict[str, float] = {}
    for one in points:
        distance = float(np.sqrt(np.square((one.place - place) / scale).mean()))
        found[one.data] = min(distance, found.get(one.data, math.inf))
    return sorted((distance, name) for name, distance in found.items())


def _predicted(place: Array, points: Sequence[_MeanResult], scale: Array) -> float:
    """The regression at a place, and the residuals of the nearest sets there."""
    places = np.stack([one.place for one in points])
    values = np.array([one.value for one in points])
    mean, level = places.mean(0), float(values.mean())
    known = (places - mean) / scale
    weights = np.linalg.solve(
        known.T @ known + _RIDGE * np.eye(known.shape[1]), known.T @ (values - level)
    )
    residuals = values - level - known @ weights
    nearest = [name for _, name in _by_distance(place, points, scale)[:NEAREST]]
    distances = np.sqrt(np.square((places - place) / scale).mean(1))
    kernel = np.where([one.data in nearest for one in points], 1 / (0.5 + distances) ** 2, 0)
    # Half of what the neighbours show: they are few.
    beside = 0.5 * float(kernel @ residuals / kernel.sum())
    # Beyond the range of the benchmark the regression stays at its edge.
    inside = np.clip(place, places.min(0), places.max(0))
    return level + float((inside - mean) / scale @ weights) + beside
