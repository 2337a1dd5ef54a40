"""Gradient-boosted trees on a table, as a reference that the candidates are compared with.

LightGBM if it is installed (extra `recommend`), else scikit-learn's histogram gradient boosting.
They are trained on a sample of the training rows and tested on validation rows.
"""

from __future__ import annotations

import importlib.util
import math
import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np  # noqa: TID253 - loaded only to recommend
from threadpoolctl import threadpool_limits

from trainwright.tasks.data.dataset import Dataset
from trainwright.tasks.recommend.similar_sets.data_figures import sampled
from trainwright.tasks.runs.artefacts.recommendation import BoostedTrees

Array = np.ndarray[Any, Any]
_MOST_ROWS = 20_000
_MOST_CLASSES = 30
_MOST_CATEGORY = 255
"""Values that scikit-learn can tell apart in a category; one with more counts as a number."""
_RATE, _SEED = 0.05, 0
_ROUNDS, _PATIENCE = 1_000, 20
_STOPPED_ROWS = 1_000
"""From so many rows on, training stops when a tenth of them, held out for it, gets no better."""
_ROUNDS_OF_FEW = 300
"""without early stopping"""
_MOST_TREES = 2_000
"""A round has one tree for each class."""


def boosted_trees(data: Dataset) -> BoostedTrees | None:
    """What they reach on a table; None for other data, or for very many classes."""
    schema = data.schema
    if not schema.task.startswith("tabular") or len(schema.classes or ()) > _MOST_CLASSES:
        return None
    if set(data.inputs) - {"inputs", "numbers", "categories"}:
        return None
    started = time.perf_counter()
    train = sampled(data.split.train, _MOST_ROWS)
    known, right = _table(data, train)
    asked, wanted = _table(data, sampled(data.split.validation, _MOST_ROWS))
    classes = schema.classes is not None
    if classes and len(np.unique(right)) < 2:
        return None
    categories = [
        place
        for place, column in enumerate(_order(data))
        if column is not None and column <= _MOST_CATEGORY
    ]
    rounds = _ROUNDS if len(train) >= _STOPPED_ROWS else _ROUNDS_OF_FEW
    rounds = min(rounds, _MOST_TREES // max(1, len(schema.classes or ())))
    with threadpool_limits(1):
        library, model = _fitted(known, right, classes, categories, rounds)
        predicted = model.predict(asked)
    metric = (
        float((predicted == wanted).mean())
        if classes
        else math.sqrt(float(np.square(predicted - wanted).mean()))
    )
    return BoostedTrees(
        library=library,
        metric=metric,
        rows=len(train),
        train_rows=schema.train_rows,
        duration_s=time.perf_counter() - started,
    )


def _fitted(
    known: Array, right: Array, classes: bool, categories: list[int], rounds: int
) -> tuple[str, Any]:
    """The library, and its model after at most so many rounds.

    `categories`: the places of columns whose numbers have no order.
    """
    stopped = len(right) >= _STOPPED_ROWS
    if importlib.util.find_spec("lightgbm") is not None:
        import lightgbm

        kind = lightgbm.LGBMClassifier if classes else lightgbm.LGBMRegressor
        boosted = kind(
            n_estimators=rounds, learning_rate=_RATE, n_jobs=1, verbose=-1, random_state=_SEED
        )
        held = np.random.default_rng(_SEED).permutation(len(right)) % 10 == 0
        # LightGBM refuses to be tested on a class that it is not trained on.
        held &= np.isin(right, right[~held]) if classes else True
        options: dict[str, Any] = {"categorical_feature": categories or "auto"}
        if stopped:
            options["eval_set"] = [(known[held], right[held])]
            options["callbacks"] = [lightgbm.early_stopping(_PATIENCE, verbose=False)]
            known, right = known[~held], right[~held]
        with warnings.catch_warnings():  # 4.5 knows only this name of the held-out rows
            warnings.filterwarnings("ignore", "The argument 'eval_set' is deprecated")
            return "LightGBM", boosted.fit(known, right, **options)
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    if classes:  # it can't hold out a part of a class with one row
        stopped = stopped and int(np.unique(right, return_counts=True)[1].min()) > 1
    made = HistGradientBoostingClassifier if classes else HistGradientBoostingRegressor
    model = made(
        max_iter=rounds,
        learning_rate=_RATE,
        categorical_features=categories or None,
        early_stopping=stopped,
        n_iter_no_change=_PATIENCE,
        random_state=_SEED,
    )
    return "scikit-learn", model.fit(known, right)


def _order(data: Dataset) -> list[int | None]:
    """The columns of `_table`: the vocabulary of each category, None for a number."""
    numbers = [None for one in data.schema.columns if one.kind != "category"]
    if not data.schema.columns:
        numbers = [None] * sum(math.prod(shape) for shape in data.schema.inputs.values())
    codes = [one.vocabulary for one in data.schema.columns if one.kind == "category"]
    return [*numbers, *codes]


def _table(data: Dataset, rows: Array) -> tuple[Array, Array]:
    """The rows as one array of numbers, the category codes last, and their targets."""
    arrays, targets = data.batch(rows)
    return np.concatenate(list(_columns(arrays).values()), 1), targets


def _columns(arrays: Mapping[str, Array]) -> dict[str, Array]:
    order = sorted(arrays, key=lambda name: name == "categories")
    return {name: arrays[name].reshape(len(arrays[name]), -1).astype(np.float64) for name in order}
