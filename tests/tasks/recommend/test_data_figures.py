"""Figures of data sets whose properties are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trainwright.tasks.recommend.similar_sets.data_figures import (
    FIGURES,
    best_landmark,
    figures_of,
    sampled,
)
from trainwright.tasks.runs.artefacts.data_schema import Column, DataSchema

DRAW = np.random.default_rng(0)


def schema(columns: list[Column], classes: int, rows: int = 1000) -> DataSchema:
    return DataSchema(
        task="tabular-classification" if classes else "tabular-regression",
        rows=rows,
        train_rows=rows,
        validation_rows=0,
        inputs={"inputs": (len(columns),)},
        input_dtypes={"inputs": "float32"},
        target="label",
        target_dtype="int64" if classes else "float32",
        classes=[str(one) for one in range(classes)] or None,
        sha256="",
        columns=columns,
    )


def numbers(count: int, missing: int = 0) -> list[Column]:
    return [Column(name=f"n{one}", kind="number", missing=missing) for one in range(count)]


def test_a_linear_target_is_easy_for_the_linear_landmark() -> None:
    inputs = DRAW.normal(size=(1000, 5)).astype(np.float32)
    found = figures_of(schema(numbers(5), 0), {"inputs": inputs}, inputs @ np.ones(5))
    assert found["linear_error"] < 0.05
    assert found["neighbour_error"] > 0.2
    assert found["constant_error"] == pytest.approx(math.sqrt(5), rel=0.2)
    assert set(found) == set(FIGURES)


def test_near_rows_of_the_same_class_are_easy_for_the_nearest_neighbours() -> None:
    inputs = DRAW.uniform(-1, 1, size=(1500, 2)).astype(np.float32)
    classes = ((inputs > 0).sum(1) == 1).astype(np.int64)  # exclusive or
    found = figures_of(schema(numbers(2), 2), {"inputs": inputs}, classes)
    assert found["neighbour_error"] < 0.4
    assert found["linear_error"] > 0.8
    assert found["balance"] > 0.99
    assert best_landmark(found) < 0.2


def test_noise_is_no_better_than_a_constant_and_never_counts_as_worse() -> None:
    inputs = DRAW.normal(size=(600, 3)).astype(np.float32)
    targets = DRAW.normal(size=600).astype(np.float32)
    found = figures_of(schema(numbers(3), 0), {"inputs": inputs}, targets)
    assert best_landmark(found) <= found["constant_error"]


def test_missing_values_categories_and_constant_columns_give_finite_figures() -> None:
    holes = DRAW.normal(size=(500, 3)).astype(np.float32)
    holes[::3, 0] = np.nan
    holes[:, 1] = 7
    codes = DRAW.integers(0, 40, size=(500, 1))
    columns = [*numbers(3, missing=56), Column(name="c", kind="category", vocabulary=40)]
    found = figures_of(
        schema(columns, 3, 500), {"numbers": holes, "categories": codes}, codes[:, 0] % 3
    )
    assert all(math.isfinite(value) for value in found.values())
    assert found["categories"] == 0.25
    assert found["vocabulary"] == pytest.approx(math.log10(40))
    assert found["missing"] == pytest.approx(168 / 2000)
    assert found["neighbour_error"] < 0.5


def test_one_class_in_the_sample_and_two_rows_are_no_failure() -> None:
    inputs = np.zeros((2, 1), np.float32)
    found = figures_of(schema(numbers(1), 2, 2), {"inputs": inputs}, np.zeros(2, np.int64))
    assert all(math.isfinite(value) for value in found.values())


def test_texts_are_compared_by_their_tokens() -> None:
    classes = DRAW.integers(0, 2, size=400)
    tokens = DRAW.integers(100, 200, size=(400, 8))
    tokens[:, 0] = classes + 1
    text = schema([Column(name="t", kind="text")], 2, 400).model_copy(
        update={"task": "text-classification"}
    )
    found = figures_of(text, {"inputs": tokens}, classes)
    assert found["linear_error"] < 0.6


def test_a_forecast_of_several_steps_is_scored_by_its_mean_error() -> None:
    start = DRAW.uniform(0, 10, size=(500, 1))
    history = (start + np.arange(6)).astype(np.float32)
    future = (start + np.arange(6, 9)).astype(np.float32)
    series = schema([], 0, 500).model_copy(
        update={"task": "forecasting", "inputs": {"history": (6,)}}
    )
    assert figures_of(series, {"history": history}, future)["linear_error"] < 0.1


def test_a_sample_is_of_distinct_rows_in_their_order() -> None:
    rows = np.arange(10, 100_000, 3)
    found = sampled(rows, 500)
    assert len(found) == 500
    assert np.all(np.diff(found) > 0)
    assert np.isin(found, rows).all()
    assert sampled(rows[:20], 500) is not None
    assert len(sampled(rows[:20], 500)) == 20
