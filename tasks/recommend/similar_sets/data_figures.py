"""Figures of a data set by which it is compared with those of the benchmark.

They are simple counts, and how far three methods get: a ridge regression, the ten nearest rows and,
on tables, boosted trees ("landmarks": B. Pfahringer et al., Meta-learning by landmarking, 2000).
All but the trees are computed on at most `MOST_ROWS` rows of the training part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np  # noqa: TID253 - loaded only to recommend

from trainwright.tasks.data.row_file import RowFile
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.spec.metric_names import Metric

Array = np.ndarray[Any, Any]
Stored = Array | RowFile
DataFigures = Mapping[str, float]
MOST_ROWS = 2_000
_MOST_FEATURES = 512
_MOST_CLASSES = 100
_NEIGHBOURS = 10
_RIDGE = 0.01
_TESTED = 0.3
"""share of the sampled rows on which the landmarks are tested"""
FIGURES = (
    "rows",
    "inputs",
    "categories",
    "vocabulary",
    "missing",
    "skew",
    "classes",
    "balance",
    "constant_error",
    "linear_error",
    "neighbour_error",
    "trees_error",
)
"""The figures by name.

rows, inputs, vocabulary, classes   decimal logarithms of counts: training rows, values of a row,
                                    values of the largest category, classes (0: none)
categories, missing                 shares of the columns, and of the values
skew                                mean over the columns of log(1 + |skewness|)
balance                             entropy of the classes by that of equal ones
constant_error                      error of the best constant prediction
linear_error, neighbour_error       of the landmarks, relative to it
trees_error                         of boosted trees, relative to it; that of the better landmark
                                    if there are none
"""


def metric_of(task: str) -> Metric | None:
    """The metric of a task's predictions; None if its models are not compared."""
    if task.endswith("classification"):
        return "accuracy"
    others: dict[str, Metric] = {"tabular-regression": "rmse", "forecasting": "mae"}
    return others.get(task)


def figures_of(
    schema: DataSchema,
    inputs: Mapping[str, Array],
    targets: Array,
    seed: int = 0,
    trees: float | None = None,
) -> dict[str, float]:
    """The figures of a data set from rows of its training part, as a model gets them.

    `trees`: the error of boosted trees on its validation rows, in the metric's unit.
    """
    chosen = np.random.default_rng(seed).permutation(len(targets))[:MOST_ROWS]
    kept = {name: array[chosen] for name, array in inputs.items()}
    features = _features(schema, kept)
    wanted = targets[chosen]
    categories = [one for one in schema.columns if one.kind == "category"]
    values = schema.rows * max(1, len(schema.columns))
    found = {
        "rows": math.log10(max(1, schema.train_rows)),
        "inputs": math.log10(max(1, sum(math.prod(one) for one in schema.inputs.values()))),
        "categories": len(categories) / max(1, len(schema.columns)),
        "vocabulary": math.log10(max([one.vocabulary for one in categories], default=1) or 1),
        "missing": min(1.0, sum(one.missing for one in schema.columns) / max(1, values)),
        "skew": _skew(features),
        "classes": math.log10(len(schema.classes)) if schema.classes else 0.0,
        "balance": _balance(wanted) if schema.classes else 1.0,
    }
    found |= _landmarks(features, wanted, schema.classes is not None)
    better = min(found["linear_error"], found["neighbour_error"], 1.0)
    least = 0.5 / max(1, round(_TESTED * len(features))) if schema.classes else 1e-12
    relative = better if trees is None else max(trees, least) / found["constant_error"]
    return found | {"trees_error": relative}


def sampled(rows: Stored, most: int, seed: int = 0) -> Array:
    """At most this many of some row numbers, spread evenly by chance; in their order."""
    if len(rows) <= most:
        return rows[:]
    places = np.unique(np.random.default_rng(seed).integers(0, len(rows), 2 * most))
    chosen: Array = rows.take(np.sort(np.random.default_rng(seed).permutation(places)[:most]))
    return chosen


def best_landmark(figures: DataFigures) -> float:
    """The error of the best landmark, in the metric's unit; of a constant one, if that is less.

    For classes, errors are shares: 1 - accuracy.
    """
    names = ("linear_error", "neighbour_error", "trees_error")
    least = min(1.0, *(figures[name] for name in names))
    return figures["constant_error"] * least


def _features(schema: DataSchema, inputs: Mapping[str, Array]) -> Array:
    """The rows as at most `_MOST_FEATURES` numbers of mean 0 and deviation 1, without NaN."""
    parts = []
    for name, array in inputs.items():
        if schema.task == "text-classification" and array.dtype.kind in "iu":
            parts.append(_counts(array))
        elif name == "categories":
            parts.append(_indicators(array))
        elif name != "series":
            parts.append(array.reshape(len(array), -1).astype(np.float64))
    wide = np.concatenate(parts, 1)
    wide = wide[:, :: -(-wide.shape[1] // _MOST_FEATURES)]
    missing = ~np.isfinite(wide)
    wide = np.where(missing, 0, wide)
    count = np.maximum(1, (~missing).sum(0))
    mean = wide.sum(0) / count
    centred = np.where(missing, 0, wide - mean)
    deviation = np.sqrt(np.square(centred).sum(0) / count)
    scaled: Array = np.divide(centred, deviation, out=np.zeros_like(centred), where=deviation > 0)
    return scaled


def _counts(tokens: Array) -> Array:
    """log(1 + how often) each of 512 classes of tokens occurs in a row; 0 is no token."""
    counts = np.zeros((len(tokens), _MOST_FEATURES))
    rows, places = tokens.nonzero()
    np.add.at(counts, (rows, tokens[rows, places] % _MOST_FEATURES), 1)
    return np.log1p(counts)


def _indicators(codes: Array) -> Array:
    """1 for each of the most frequent values of each category."""
    each = max(1, _MOST_FEATURES // (2 * max(1, codes.shape[1])))
    parts = []
    for column in codes.T:
        values, counts = np.unique(column, return_counts=True)
        frequent = values[np.argsort(-counts, kind="stable")][:each]
        parts.append((column[:, None] == frequent).astype(np.float64))
    return np.concatenate(parts, 1)


def _skew(features: Array) -> float:
    return float(np.log1p(np.abs((features**3).mean(0))).mean())


def _balance(targets: Array) -> float:
    shares = np.unique(targets, return_counts=True)[1] / len(targets)
    if len(shares) < 2:
        return 0.0
    return float(-(shares * np.log(shares)).sum() / math.log(len(shares)))


def _landmarks(features: Array, targets: Array, classes: bool) -> dict[str, float]:
    """The error of a constant, and relative to it those of the linear model and of neighbours."""
    held_out = max(1, round(_TESTED * len(features)))
    known, asked = features[held_out:], features[:held_out]
    if classes:
        values, codes = np.unique(targets, return_inverse=True)
        wanted = np.eye(len(values))[codes][:, :_MOST_CLASSES]
    else:
        wanted = targets.reshape(len(targets), -1).astype(np.float64)
    given, right = wanted[held_out:], wanted[:held_out]
    if not len(known):
        return {"constant_error": 1.0, "linear_error": 1.0, "neighbour_error": 1.0}
    mean = given.mean(0)
    constant = np.broadcast_to(mean, right.shape)
    weights = np.linalg.solve(
        known.T @ known + _RIDGE * len(known) * np.eye(known.shape[1]), known.T @ (given - mean)
    )
    linear = asked @ weights + mean
    squared = np.square(asked).sum(1)[:, None] - 2 * asked @ known.T + np.square(known).sum(1)
    nearest = np.argsort(squared, 1)[:, :_NEIGHBOURS]
    neighbours = given[nearest].mean(1)
    errors = [_error(one, right, classes) for one in (constant, linear, neighbours)]
    least = 0.5 / held_out if classes else 1e-12
    first = max(errors[0], least)
    return {
        "constant_error": first,
        "linear_error": max(errors[1], least) / first,
        "neighbour_error": max(errors[2], least) / first,
    }


def _error(predicted: Array, right: Array, classes: bool) -> float:
    """The share of wrong classes, or the error of numbers: RMSE of one, MAE of several."""
    if classes:
        return float((predicted.argmax(1) != right.argmax(1)).mean())
    if right.shape[1] > 1:
        return float(np.abs(predicted - right).mean())
    return float(np.sqrt(np.square(predicted - right).mean()))
