"""Predictions from similar data sets, on benchmarks with a known law."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.recommend.similar_sets.benchmark_table import (
    COLUMNS,
    Trained,
    benchmark,
    read_rows,
)
from trainwright.tasks.recommend.similar_sets.data_figures import FIGURES, best_landmark
from trainwright.tasks.recommend.similar_sets.metric_prediction import LEAST_SETS, predict_metric

TASK = "tabular-classification"
MODEL = ("linear", "small")


def figures(seed: int) -> dict[str, float]:
    """Figures of a made-up data set."""
    draw = np.random.default_rng(seed)
    found = {name: float(draw.uniform(0, 3)) for name in FIGURES}
    return found | {
        "constant_error": float(draw.uniform(0.3, 0.6)),
        "linear_error": float(draw.uniform(0.3, 0.9)),
        "neighbour_error": float(draw.uniform(0.3, 0.9)),
        "trees_error": float(draw.uniform(0.3, 0.9)),
    }


def trained(seed: int, factor: float = 0.8, noise: float = 0.0) -> Trained:
    """A training whose error is `factor` of the better landmark's, but for noise."""
    draw = np.random.default_rng(seed + 1000)
    of_set = figures(seed)
    error = best_landmark(of_set) * factor * float(np.exp(noise * draw.standard_normal()))
    return Trained(f"s{seed}", TASK, of_set, *MODEL, 1.0, 0, 1 - error, error, factor, 1.0)


def test_a_constant_relation_to_the_landmark_is_found() -> None:
    table = [trained(seed) for seed in range(12)]
    found = predict_metric(figures(99), TASK, MODEL, table)
    assert found is not None
    assert found.error.median == pytest.approx(best_landmark(figures(99)) * 0.8, rel=0.02)
    assert found.error.high - found.error.low < 0.05 * found.error.median
    assert len(found.neighbours) == 3
    assert found.sets == 12


@given(st.integers(0, 10**6), st.floats(0, 1))
def test_a_prediction_is_within_its_interval_which_is_one_of_shares(
    seed: int, noise: float
) -> None:
    table = [trained(seed + place, noise=noise) for place in range(8)]
    found = predict_metric(figures(seed + 99), TASK, MODEL, table)
    assert found is not None
    error = found.error
    assert 0 <= error.low <= error.median <= error.high <= 1
    assert error.high <= max(error.median, figures(seed + 99)["constant_error"])


def test_noisier_benchmarks_give_wider_intervals() -> None:
    widths = []
    for noise in (0.05, 0.4):
        table = [trained(seed, noise=noise) for seed in range(20)]
        found = predict_metric(figures(99), TASK, MODEL, table)
        assert found is not None
        widths.append(found.error.high / found.error.low)
    assert widths[1] > 1.5 * widths[0]


def test_intervals_follow_how_much_errors_of_that_size_vary() -> None:
    table, widths = [], []
    for seed in range(40):
        sure = trained(seed)
        of_constant = sure.error / sure.figures["constant_error"]
        noisy = trained(seed, noise=0.5 if of_constant < 0.5 else 0.05)
        table.append(noisy)
    for landmark in (0.3, 0.9):
        asked = figures(99) | dict.fromkeys(
            ("linear_error", "neighbour_error", "trees_error"), landmark
        )
        found = predict_metric(asked, TASK, MODEL, table)
        assert found is not None
        widths.append(found.error.median / found.error.low)
    assert widths[0] > 1.2 * widths[1]


def test_the_intervals_hold_about_four_fifths_of_new_sets() -> None:
    table = [trained(seed, noise=0.3) for seed in range(30)]
    held = []
    for seed in range(500, 580):
        found = predict_metric(figures(seed), TASK, MODEL, table)
        assert found is not None
        held.append(found.error.low <= trained(seed, noise=0.3).error <= found.error.high)
    assert 0.65 <= np.mean(held) <= 0.95


def test_data_unlike_all_sets_is_called_so_and_gets_a_wider_interval() -> None:
    table = [trained(seed, noise=0.3) for seed in range(12)]
    near, far = figures(99), figures(99) | {"rows": 30.0, "inputs": 25.0, "vocabulary": 30.0}
    usual, found = (predict_metric(one, TASK, MODEL, table) for one in (near, far))
    assert usual is not None
    assert found is not None
    assert found.far
    assert not usual.far
    assert found.error.high / found.error.median > usual.error.high / usual.error.median


def test_with_few_sets_or_for_another_model_there_is_no_prediction() -> None:
    table = [trained(seed) for seed in range(LEAST_SETS - 1)]
    assert predict_metric(figures(99), TASK, MODEL, table) is None
    table = [trained(seed) for seed in range(12)]
    assert predict_metric(figures(99), TASK, ("linear", "large"), table) is None
    assert predict_metric(figures(99), "forecasting", MODEL, table) is None


def test_several_seeds_of_a_set_count_as_one() -> None:
    table = [trained(seed) for seed in range(12)]
    again = [replace(one, seed=1) for one in table]
    assert predict_metric(figures(99), TASK, MODEL, table + again) == predict_metric(
        figures(99), TASK, MODEL, table
    )


def test_the_shipped_benchmark_is_read_and_its_errors_agree() -> None:
    rows = benchmark()
    assert rows
    for one in rows:
        right = 1 - one.metric if one.task.endswith("classification") else one.metric
        assert one.error == pytest.approx(right, rel=1e-4, abs=1e-5)
        assert one.relative_error == pytest.approx(one.error / best_landmark(one.figures), rel=1e-3)


def test_a_row_of_a_file_is_what_was_measured() -> None:
    values = dict.fromkeys(COLUMNS, "1") | {"set": "a", "task": TASK, "template": "linear"}
    values |= {"size": "small", "fraction": "0.25", "metric": "0.9", "error": "0.1"}
    lines = [",".join(COLUMNS), ",".join(values[name] for name in COLUMNS)]
    (row,) = read_rows(lines)
    assert (row.data, row.model, row.fraction, row.error) == ("a", MODEL, 0.25, 0.1)
