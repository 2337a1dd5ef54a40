"""Tables of time series: windows, the split by time, seasons, and one line for unusable series."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks import progress
from trainwright.tasks.data.modalities.seasons import chosen_history, season_of
from trainwright.tasks.data.modalities.series import Windows, series_table, windows_of
from trainwright.tasks.errors import BadInput

BEGIN = datetime(2026, 1, 1)
Array = np.ndarray[Any, Any]


def table(lengths: Mapping[str, int], hours: int = 1) -> pa.Table:
    """Series of these lengths, each with values of its own and two covariates."""
    rows = [
        {
            "when": BEGIN + timedelta(hours=hours * number),
            "shop": name,
            "sold": 1000.0 * place + number,
            "price": 0.5 * number,
            "open": number % 2 == 0,
        }
        for place, (name, length) in enumerate(lengths.items())
        for number in range(length)
    ]
    return pa.Table.from_pylist(rows)


def cut(
    rows: pa.Table,
    horizon: int | None = 2,
    history: int | None = 3,
    fraction: float = 0.25,
    series: str | None = "shop",
    time: str = "when",
) -> Windows:
    found = series_table(rows, time=time, target="sold", series=series, uri="x.csv")
    return windows_of(
        found, horizon=horizon, history=history, validation_fraction=fraction, uri="x.csv"
    )


sizes = st.dictionaries(st.sampled_from("abcde"), st.integers(16, 40), min_size=1)


def scalar_windows(
    lengths: Mapping[str, int], history: int, horizon: int, fraction: float
) -> dict[str, set[tuple[str, int]]]:
    """Each part's windows, as the series and the number of the first row in it."""
    begin = math.ceil((1 - fraction) * max(lengths.values()))
    parts: dict[str, set[tuple[str, int]]] = {"training": set(), "validation": set()}
    for name, length in lengths.items():
        for first in range(length - history - horizon + 1):
            if first + history >= begin:
                parts["validation"].add((name, first))
            if first + history + horizon <= begin:
                parts["training"].add((name, first))
    return parts


@given(sizes, st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_windows_equal_slices_of_the_series_whatever_the_order_of_rows(
    lengths: dict[str, int], history: int, horizon: int, seed: int
) -> None:
    rows = table(lengths)
    order = np.random.default_rng(seed).permutation(rows.num_rows)
    expected = scalar_windows(lengths, history, horizon, 0.5)
    windows = cut(rows.take(pa.array(order)), horizon, history, 0.5)
    inputs, targets = batch(windows, np.arange(len(windows.starts)))
    trained = sorted({name for name, _ in expected["training"]})
    assert windows.names == trained
    found = []
    for past, covariates, code, future in zip(
        inputs["history"], inputs["covariates"], inputs["series"], targets, strict=True
    ):
        place, first = divmod(int(past[0]), 1000)
        name = list(lengths)[place]
        steps = np.arange(first, first + history + horizon)
        assert np.array_equal(np.concatenate([past, future]), 1000 * place + steps)
        assert np.array_equal(covariates[:, 4], 0.5 * steps)
        assert np.array_equal(covariates[:, 5], steps % 2 == 0)
        assert code == (trained.index(name) + 1 if name in trained else 0)
        found.append((name, first))
    assert len(found) == len(set(found))
    assert set(found[: windows.train_windows]) == expected["training"]
    assert set(found[windows.train_windows :]) == expected["validation"]


def batch(windows: Windows, numbers: Array) -> tuple[dict[str, Array], Array]:
    inputs = {
        name: one[numbers] if isinstance(one, np.ndarray) else one.take(numbers)
        for name, one in windows.inputs().items()
    }
    return inputs, windows.targets().take(numbers)


def test_windows_have_the_documented_shapes_and_types() -> None:
    windows = cut(table({"a": 40, "b": 30}))
    count = len(windows.starts)
    parts = {**windows.inputs(), "targets": windows.targets()}
    assert {name: (one.shape, str(one.dtype)) for name, one in parts.items()} == {
        "history": ((count, 3), "float32"),
        "covariates": ((count, 5, 6), "float32"),
        "series": ((count,), "int32"),
        "targets": ((count, 2), "float32"),
    }
    inputs, targets = batch(windows, np.array([5, 0, 3, 3]))
    for name, one in {**inputs, "targets": targets}.items():
        assert one.shape == (4, *parts[name].shape[1:])


def test_one_series_needs_no_name_and_no_covariates() -> None:
    windows = cut(table({"a": 40}).select(["when", "sold"]), series=None)
    inputs, _ = batch(windows, np.arange(2))
    assert inputs["covariates"].shape == (2, 5, 4)
    assert "series" not in inputs


def test_no_training_window_reaches_into_the_validation_part() -> None:
    windows = cut(table({"a": 40, "b": 35}), horizon=4, history=5, fraction=0.25)
    _, training = batch(windows, np.arange(windows.train_windows))
    _, validation = batch(windows, np.arange(windows.train_windows, len(windows.starts)))
    assert training.max(initial=0) % 1000 < 30
    assert (validation % 1000).min() == 30


def test_shuffled_rows_are_sorted_and_said_to_be() -> None:
    rows = table({"a": 40, "b": 30})
    said: list[str] = []
    with progress.listening(lambda event: said.append(event["message"])):
        cut(rows)
        assert said == []
        cut(rows.take(list(reversed(range(rows.num_rows)))))
    assert said == ["x.csv: the rows are sorted by shop and when"]


def replaced(rows: pa.Table, name: str, row: int, value: Any) -> pa.Table:
    values = rows.column(name).to_pylist()
    values[row] = value
    return rows.set_column(rows.column_names.index(name), name, pa.array(values))


GOOD = table({"a": 40, "b": 30})


@pytest.mark.parametrize(
    ("rows", "terms", "line"),
    [
        (replaced(GOOD, "when", 7, BEGIN), {}, "rows 0 and 7 both have 2026-01-01 00:00:00 of"),
        (
            replaced(GOOD.select(["when", "sold"]).slice(0, 40), "when", 7, BEGIN),
            {"series": None},
            "rows 0 and 7 both have 2026-01-01 00:00:00; allowed: each time once in a series",
        ),
        (GOOD.select(["when", "sold"]), {"series": None}, "rows 0 and 40 both have 2026-01-01"),
        (GOOD.filter(pa.array([n != 7 for n in range(70)])), {}, "is followed by 2026-01-01 08"),
        (GOOD, {"series": "town"}, "data.series: got 'town'; allowed: a column of x.csv: when, "),
        (GOOD, {"time": "day"}, "data.time: got 'day'; allowed: a column of x.csv: when, shop, "),
        (GOOD, {"time": "price"}, "data.time: x.csv: column 'price' holds numbers; allowed: time"),
        (
            GOOD,
            {"series": "price"},
            "column 'price' holds numbers; allowed: texts or whole numbers",
        ),
        (replaced(GOOD, "shop", 3, None), {}, "column 'shop': 1 of 70 values are missing, the fi"),
        (replaced(GOOD, "sold", 3, None), {}, "column 'sold': 1 of 70 values are missing or inf"),
        (replaced(GOOD, "price", 3, float("inf")), {}, "infinite, the first in row 3; allowed: no"),
        (GOOD, {"series": None, "time": "when"}, "column 'shop' holds texts; allowed for forec"),
        (GOOD, {"history": 29}, "series 'b' has 30 rows; allowed: at least 31, for a history of"),
        (
            GOOD.select(["when", "sold"]).slice(0, 40),
            {"series": None, "history": 39},
            "the series has 40 rows; allowed: at least 41, for a history of 39 steps and a hor",
        ),
        (
            GOOD,
            {"fraction": 0.01},
            "which splits the time at 2026-01-02 15:36:00; no window of 3 + 2",
        ),
        (GOOD, {"fraction": 0.95}, "no window of 3 + 2 steps is left for training; allowed: an"),
        (GOOD, {"horizon": None}, "data.horizon: not given, and the series have no season"),
    ],
)
def test_unusable_series_are_refused_in_one_line(
    rows: pa.Table, terms: dict[str, Any], line: str
) -> None:
    with pytest.raises(BadInput, match=re.escape(line)) as caught:
        cut(rows, **terms)
    assert "\n" not in str(caught.value)


def test_names_that_are_not_utf_8_are_refused() -> None:
    names = pa.array([b"\xff\xfe"] * 40).view(pa.string())
    rows = table({"a": 40}).set_column(1, "shop", names)
    with pytest.raises(BadInput, match=r"data\.series: x\.csv: column 'shop' is not UTF-8 text"):
        cut(rows)


def waves(period: int, count: int, noise: float = 0.1, seed: int = 0) -> Array:
    random = np.random.default_rng(seed)
    shape = random.normal(size=period)
    return np.resize(shape, count) + noise * random.normal(size=count) + 0.01 * np.arange(count)


def test_the_season_is_the_shortest_that_repeats_as_well_as_any() -> None:
    assert season_of([waves(24, 2_000)], [24, 168]) == 24
    assert season_of([waves(168, 2_000)], [24, 168]) == 168
    assert season_of([waves(24, 2_000, seed=seed) * 10**seed for seed in range(5)], [7, 24]) == 24


def test_noise_constants_and_short_series_have_no_season() -> None:
    assert season_of([np.random.default_rng(0).normal(size=2_000)], [24, 168]) is None
    assert season_of([np.ones(2_000)], [24]) is None
    assert season_of([waves(24, 48)], [24]) is None
    assert season_of([], [24]) is None


def test_history_and_horizon_are_whole_seasons_that_fit() -> None:
    assert chosen_history(None, 48, 48, shortest=10_000) == 7 * 48
    assert chosen_history(None, 168, 168, shortest=10_000) == 3 * 168  # at most 512 steps
    assert chosen_history(None, 12, 12, shortest=80) == 2 * 12  # half of the shortest series
    assert chosen_history(None, 5, None, shortest=1_000) == 7 * 5
    assert chosen_history(30, 5, 12, shortest=1_000) == 30


def test_a_history_below_two_seasons_is_refused() -> None:
    with pytest.raises(BadInput, match=r"data\.history: got 23; .* at least two seasons, 24 steps"):
        chosen_history(23, 5, 12, shortest=1_000)


def test_a_table_of_a_daily_season_needs_no_sizes() -> None:
    hours = [BEGIN + timedelta(hours=number) for number in range(1_000)]
    rows = pa.table({"when": hours, "sold": waves(24, 1_000)})
    windows = cut(rows, None, None, 0.2, series=None)
    assert (windows.history, windows.horizon) == (7 * 24, 24)
    assert windows.train_windows == 800 - 8 * 24 + 1
    assert len(windows.starts) - windows.train_windows == 200 - 24 + 1


def test_calendar_columns_follow_the_clock_of_the_zone() -> None:
    hours = [datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=n) for n in range(40)]
    rows = pa.table(
        {"when": pa.array(hours, pa.timestamp("s", "Asia/Tokyo")), "sold": np.arange(40.0)}
    )
    inputs, _ = batch(cut(rows, series=None), np.array([0]))
    assert inputs["covariates"][0, 0, 0] == pytest.approx(9 / 24 - 0.5)


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(BadInput, match=r"data\.uri: x\.csv has no rows; allowed: a table of time"):
        cut(table({"a": 3}).slice(0, 0))
