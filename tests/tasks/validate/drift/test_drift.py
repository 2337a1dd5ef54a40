"""Laws of profiles and effect sizes, and what drift finds and does not find in random data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from drift_tables import SHARES, drifted, plain, profiled, replaced, table
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.runs.artefacts.data_profile import ColumnProfile, DataProfile
from trainwright.tasks.validate.drift.compare_profiles import compare, drift_line
from trainwright.tasks.validate.drift.effect_sizes import (
    common_counts,
    count_statistics,
    mean_shift,
)
from trainwright.tasks.validate.drift.profile import MOST_BINS, profile

NUMBERS = st.lists(st.floats(allow_nan=True, allow_infinity=True) | st.none(), max_size=60)
TEXTS = st.lists(st.sampled_from(["a", "b", "c", "ü", ""]) | st.none(), max_size=60)


def profile_of(values: list[Any], kind: pa.DataType, size: int) -> ColumnProfile:
    batches = pa.table({"x": pa.array(values, kind)}).to_batches(max_chunksize=size)
    found = profile(batches, "label", classes=False).columns
    return found.get("x", ColumnProfile(rows=0, nulls=0))


@given(NUMBERS, st.integers(1, 60))
def test_the_bins_of_numbers_do_not_depend_on_the_batches(values: list[Any], size: int) -> None:
    one, parts = profile_of(values, pa.float64(), 1000), profile_of(values, pa.float64(), size)
    assert (one.rows, one.nulls) == (parts.rows, parts.nulls) == (len(values), one.nulls)
    if one.numbers is None or parts.numbers is None:
        assert one == parts
        return
    assert one.numbers.counts == parts.numbers.counts
    assert (one.numbers.shift, one.numbers.keys) == (parts.numbers.shift, parts.numbers.keys)
    assert sum(one.numbers.counts) == one.present
    if np.isfinite(one.numbers.deviation) and np.isfinite(parts.numbers.deviation):
        scale = max(abs(v) for v in values if v is not None and np.isfinite(v))
        assert parts.numbers.mean == pytest.approx(one.numbers.mean, abs=1e-9 * scale)
        assert parts.numbers.deviation == pytest.approx(one.numbers.deviation, abs=1e-7 * scale)


@given(TEXTS, st.integers(1, 60))
def test_the_counts_of_categories_do_not_depend_on_the_batches(
    values: list[Any], size: int
) -> None:
    assert profile_of(values, pa.string(), 1000) == profile_of(values, pa.string(), size)


@pytest.mark.parametrize("size", [100, 7_000, 30_000])
def test_many_numbers_have_at_most_512_bins_that_do_not_depend_on_the_batches(size: int) -> None:
    values = np.random.default_rng(0).normal(5, 2, 30_000)
    whole = profile_of(list(values), pa.float64(), 30_000).numbers
    parts = profile_of(list(values), pa.float64(), size).numbers
    assert whole is not None
    assert parts is not None
    assert MOST_BINS / 4 < len(whole.keys) <= MOST_BINS
    assert (whole.shift, whole.keys, whole.counts) == (parts.shift, parts.keys, parts.counts)
    assert parts.mean == pytest.approx(values.mean())
    assert parts.deviation == pytest.approx(values.std())


def test_more_than_1000_values_keep_the_most_frequent_and_count_the_rest() -> None:
    values = ["often"] * 50 + [f"{number:05}" for number in range(2_000)]
    found = profile_of(values, pa.string(), 300).categories
    assert found is not None
    assert (len(found.counts), found.counts["often"], found.rest) == (1_000, 50, 1_001)


def statistics(one: ColumnProfile, two: ColumnProfile) -> dict[Any, float]:
    counts = common_counts(one, two)
    assert counts is not None
    found = count_statistics(*counts, ordered=one.numbers is not None)
    values: dict[Any, float] = {name: float(value) for name, value in found.items()}
    if one.numbers is not None and two.numbers is not None:
        values["mean_shift"] = mean_shift(one.numbers, two.numbers)
    return values


FINITE = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=80)


@given(FINITE, FINITE)
def test_statistics_of_numbers_are_symmetric_and_zero_for_equal_columns(
    first: list[float], second: list[float]
) -> None:
    one, two = (profile_of(values, pa.float64(), 1000) for values in (first, second))
    assert statistics(one, two) == pytest.approx(statistics(two, one))
    assert set(statistics(one, one).values()) == {0.0}
    assert 0 <= statistics(one, two)["js_distance"] <= 1
    assert 0 <= statistics(one, two)["cdf_gap"] <= 1 + 1e-12


CATEGORIES = st.lists(st.sampled_from("abcde"), min_size=1, max_size=80)


@given(CATEGORIES, CATEGORIES)
def test_statistics_of_categories_are_symmetric_and_zero_for_equal_columns(
    first: list[str], second: list[str]
) -> None:
    one, two = (profile_of(values, pa.string(), 1000) for values in (first, second))
    assert statistics(one, two) == pytest.approx(statistics(two, one))
    assert set(statistics(one, one).values()) == {0.0}
    assert 0 <= statistics(one, two)["js_distance"] <= 1


def test_a_gap_is_that_of_kolmogorov_and_smirnov() -> None:
    one, two = (profile_of(values, pa.float64(), 9) for values in ([1, 2, 3, 4], [3, 4, 5, 6]))
    assert statistics(one, two)["cdf_gap"] == 0.5


def test_a_profile_is_the_same_after_json_and_does_not_drift_from_itself() -> None:
    found = profiled(table(np.random.default_rng(0), 3_000))
    again = DataProfile.model_validate_json(found.model_dump_json())
    assert again == found
    assert {value for one in compare(again, found) for value in one.values.values()} == {0.0}


@pytest.mark.parametrize(("rows", "count"), [(100, 100), (1_000, 100), (20_000, 30)])
def test_at_most_one_in_a_hundred_random_halves_drifts(rows: int, count: int) -> None:
    random = np.random.default_rng(rows)
    alarms = 0
    for _ in range(count):
        given, order = table(random, rows), random.permutation(rows)
        halves = (given.take(order[: rows // 2]), given.take(order[rows // 2 :]))
        alarms += bool(drifted(plain(halves[0]), profiled(halves[1])))
    assert alarms <= 0.01 * count


def test_a_first_row_with_another_value_in_few_rows_is_no_drift() -> None:
    for rows in (50, 100, 500):
        reference = profiled(pa.table({"flag": [False] * rows, "label": [0] * rows}))
        later = plain(pa.table({"flag": [False] * (rows - 1) + [True], "label": [0] * rows}))
        assert drifted(later, reference) == {}


def test_small_differences_in_ten_thousand_rows_are_found() -> None:
    rows = 10_000
    for seed in range(5):
        random = np.random.default_rng(seed)
        reference, later = profiled(table(random, rows)), table(random, rows)
        for name in ("normal", "skewed", "far"):
            values = later.column(name).to_numpy()
            later = replaced(later, name, values + 0.1 * values.std())
        holes = later.column("holes").to_numpy(zero_copy_only=False).copy()
        holes[random.random(rows) < 0.02 / 0.97] = np.nan
        colours = later.column("colour").to_numpy(zero_copy_only=False).copy()
        colours[random.choice(rows, rows // 100, replace=False)] = "new"
        doubled = SHARES + np.array([0, 0.02, 0, 0, 0, 0, -0.02])
        later = replaced(replaced(later, "holes", holes), "colour", colours)
        later = replaced(later, "label", random.choice(7, rows, p=doubled))
        found = drifted(plain(later), reference)
        assert set(found) == {"normal", "skewed", "far", "holes", "colour", "label"}
        assert found["colour"].new == ["new"]
        assert "; new: new" in drift_line(found["colour"])


def test_a_column_of_another_kind_has_drifted_and_one_of_unique_texts_has_not() -> None:
    rows = [str(number) for number in range(300)]
    first = pa.table({"id": rows, "x": list(range(300)), "label": [0, 1] * 150})
    second = replaced(replaced(first, "id", [f"n{row}" for row in rows]), "x", rows)
    found = drifted(profiled(second), profiled(first))
    assert {name: one.statistic for name, one in found.items()} == {"x": "kind"}
