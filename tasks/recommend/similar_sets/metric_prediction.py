"""Predicts how a model will do on a data set, from the benchmark's sets that resemble it.

With e the error of a model (template and size) on a set, and l that of the best landmark there,

    log((e + δ) / (l + δ)) = what all models share on the set + the model's own mean + the rest

What models share comes from a ridge regression on the figures and the residuals of the nearest
sets; the rest, by which the order of models differs from set to set, from a stronger regression.

The interval comes from the same prediction of every set of the benchmark from the others: 80 % of
those residuals are within it. The logarithm of a small share of wrong rows varies more than that of
a large one; so residuals of classes are scaled by a power of the predicted error, relative to that
of the best constant c (normalised conformal prediction: H. Papadopoulos et al., Inductive
confidence machines for regression, 2002). The interval is twice as wide for data that is far from
all sets, and ends at c.
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
_RIDGE, _RIDGE_OF_MODEL = 30.0, 60.0
_FAR = 1.5
"""Data is far if its nearest set is this many times as far as those of nearly all sets are."""
_SHARE_FLOOR = 0.002
"""δ for classes: differences of errors below it count little."""
_LEAST_RESIDUAL = 0.02
"""Residuals count as larger by this when their scale is fitted, so that none is 0."""


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
class _Results:
    """All models on sets with a share of their rows; means over seeds."""

    data: list[str]
    places: Array
    """(results, figures)"""
    values: Array
    """(results, models), NaN where a model was not trained"""
    landmarks: Array
    """(results,) log((l + δ) / (c + δ))"""

    def part(self, chosen: Array) -> _Results:
        """Some of the results, by a mask."""
        names = [name for name, one in zip(self.data, chosen, strict=True) if one]
        return _Results(names, self.places[chosen], self.values[chosen], self.landmarks[chosen])


def predict_metric(
    figures: DataFigures, task: str, model: tuple[str, str], table: Sequence[Trained]
) -> MetricPrediction | None:
    """The prediction for a model, `(template, size)`; None if the benchmark has too few sets."""
    floor = _SHARE_FLOOR if task.endswith("classification") else 0.0
    trained = _enough([one for one in table if one.task == task])
    models = sorted({one.model for one in trained})
    if model not in models:
        return None
    column = models.index(model)
    results = _results(trained, models, floor)
    own = results.part(~np.isnan(results.values[:, column]))
    names = sorted(set(own.data))
    scale = _scale(results.places)
    here = _vector(figures)
    order = _by_distance(here, own, scale)
    typical = [
        _by_distance(place, own.part(np.array(own.data) != name), scale)[0][0]
        for name, place in zip(own.data, own.places, strict=True)
    ]
    far = order[0][0] > _FAR * float(np.quantile(typical, 0.9))
    residuals: list[float] = []
    sizes: list[float] = []
    for name in names:
        others = results.part(np.array(results.data) != name)
        one = own.part(np.array(own.data) == name)
        for place, value, landmark in zip(
            one.places, one.values[:, column], one.landmarks, strict=True
        ):
            found = _predicted(place, others, column, scale)
            residuals.append(abs(found - value))
            sizes.append(found + landmark)
    value = _predicted(here, results, column, scale)
    base, constant = best_landmark(figures) + floor, figures["constant_error"]
    size = value + math.log(base / (constant + floor))
    level = min(1.0, _COVERAGE * (1 + 1 / len(names)))  # of finitely many sets, for a further one
    spread = _half_width(residuals, sizes if floor else [0.0] * len(sizes), size, level)
    spread *= 2 if far else 1
    median, low, high = (
        max(base * math.exp(min(one, 50.0)) - floor, 0.0)
        for one in (value, value - spread, value + spread)
    )
    if floor:
        median, low, high = (min(one, 1.0) for one in (median, low, high))
    high = max(median, min(high, constant))
    return MetricPrediction(
        Interval(median=median, low=low, high=high),
        tuple(name for _, name in order[:NEAREST]),
        far,
        len(names),
    )


def _half_width(
    residuals: Sequence[float], sizes: Sequence[float], size: float, level: float
) -> float:
    """A share of `level` of the residuals is within it, if they vary with the predicted size.

    `sizes`: logarithms of the predicted errors of the residuals; `size`: that of the asked one.
    """
    around = np.array(sizes) - np.mean(sizes)
    logs = np.log(np.array(residuals) + _LEAST_RESIDUAL)
    power = float(around @ logs / max(float(around @ around), 1e-9))
    here = float(np.clip(size, min(sizes), max(sizes)) - np.mean(sizes))
    scaled = np.array(residuals) * np.exp(-power * around)
    return float(np.quantile(scaled, level, method="higher")) * math.exp(power * here)


def _enough(rows: Sequence[Trained]) -> list[Trained]:
    """The trainings of the models that were trained on enough sets."""
    sets: dict[tuple[str, str], set[str]] = {}
    for one in rows:
        sets.setdefault(one.model, set()).add(one.data)
    return [one for one in rows if len(sets[one.model]) >= LEAST_SETS]


def _results(rows: Sequence[Trained], models: Sequence[tuple[str, str]], floor: float) -> _Results:
    found: dict[tuple[str, float], list[Trained]] = {}
    for one in rows:
        found.setdefault((one.data, one.fraction), []).append(one)
    values = np.full((len(found), len(models)), np.nan)
    for row, same in enumerate(found.values()):
        for column, model in enumerate(models):
            known = [_relative(one, floor) for one in same if one.model == model]
            if known:
                values[row, column] = np.mean(known)
    places = [np.mean([_vector(one.figures) for one in same], 0) for same in found.values()]
    landmarks = [np.mean([_of_landmark(one, floor) for one in same]) for same in found.values()]
    return _Results([name for name, _ in found], np.stack(places), values, np.array(landmarks))


def _relative(one: Trained, floor: float) -> float:
    return math.log((one.error + floor + 1e-12) / (best_landmark(one.figures) + floor))


def _of_landmark(one: Trained, floor: float) -> float:
    constant = one.figures["constant_error"] + floor
    return math.log((best_landmark(one.figures) + floor) / constant)


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


def _scale(places: Array) -> Array:
    deviation = np.std(places, 0)
    return np.where(deviation > 1e-9, deviation, 1.0)


def _by_distance(place: Array, results: _Results, scale: Array) -> list[tuple[float, str]]:
    """The sets with their distances from a place, nearest first."""
    found: dict[str, float] = {}
    distances = np.sqrt(np.square((results.places - place) / scale).mean(1))
    for name, distance in zip(results.data, distances.tolist(), strict=True):
        found[name] = min(distance, found.get(name, math.inf))
    return sorted((distance, name) for name, distance in found.items())


def _predicted(place: Array, results: _Results, column: int, scale: Array) -> float:
    """A model's value at a place."""
    shared, means = _effects(results.values)
    known = ~np.isnan(results.values[:, column])
    rest = (results.values[:, column] - shared - means[column])[known]
    common, residuals = _regression(place, results.places, shared, _RIDGE, scale)
    nearest = [name for _, name in _by_distance(place, results, scale)[:NEAREST]]
    distances = np.sqrt(np.square((results.places - place) / scale).mean(1))
    weights = np.where([one in nearest for one in results.data], 1 / (0.5 + distances) ** 2, 0)
    # Half of what the neighbours show: they are few.
    beside = 0.5 * float(weights @ residuals / weights.sum())
    own, _ = _regression(place, results.places[known], rest, _RIDGE_OF_MODEL, scale)
    return common + beside + float(means[column]) + own


def _effects(values: Array) -> tuple[Array, Array]:
    """What models share on each set, and each model's mean beyond that; least squares."""
    means = np.zeros(values.shape[1])
    for _ in range(30):
        shared = np.nanmean(values - means, 1)
        means = np.nanmean(values - shared[:, None], 0)
    return shared, means


def _regression(
    place: Array, places: Array, values: Array, ridge: float, scale: Array
) -> tuple[float, Array]:
    """The ridge regression's value at a place, and its residuals."""
    mean, level = places.mean(0), float(values.mean())
    known = (places - mean) / scale
    weights = np.linalg.solve(
        known.T @ known + ridge * np.eye(known.shape[1]), known.T @ (values - level)
    )
    # Beyond the range of the benchmark the regression stays at its edge.
    inside = np.clip(place, places.min(0), places.max(0))
    value = level + float((inside - mean) / scale @ weights)
    return value, values - level - known @ weights
