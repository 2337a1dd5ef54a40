"""Time stamps: what is one, which step they have, which seasons, which calendar columns."""

from __future__ import annotations

import re
from datetime import date, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.data.modalities.time_steps import TimeStep, calendar, read_stamps, step_of
from trainwright.tasks.errors import BadInput

DAY = 86_400_000_000
moments = st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1))


def stamps(values: Any, kind: Any = None) -> tuple[list[datetime], list[datetime]]:
    column = pa.chunked_array([pa.array(values, kind)])
    utc, shown = read_stamps(column, "data.time: x: column 't'")
    return utc.view("datetime64[us]").tolist(), shown.view("datetime64[us]").tolist()


def step(values: list[Any]) -> TimeStep:
    utc, shown = read_stamps(pa.chunked_array([pa.array(values)]), "t")
    return step_of(utc, shown, np.zeros(len(utc), np.int64), "data.time: x")


def test_stamps_dates_and_texts_are_the_same_moments() -> None:
    days = [date(2026, 1, 31), date(1969, 12, 31)]
    expected = [datetime(day.year, day.month, day.day) for day in days]
    for kind in (pa.date32(), pa.date64()):
        assert stamps(days, kind) == (expected, expected)
    for kind in (pa.timestamp("s"), pa.timestamp("ns")):
        assert stamps(expected, kind) == (expected, expected)
    for texts in (["2026-01-31", "1969-12-31"], ["2026-01-31T00:00", "1969-12-31 00:00:00"]):
        assert stamps(texts) == (expected, expected)
        assert stamps(texts, pa.large_string()) == (expected, expected)


def test_a_zone_gives_the_moment_and_what_a_clock_shows() -> None:
    summer = datetime(2026, 7, 1, 12)
    utc, shown = stamps([summer], pa.timestamp("us", "Europe/Paris"))
    assert (utc, shown) == ([summer], [summer + timedelta(hours=2)])
    utc, shown = stamps(["2026-07-01T12:00:00+02:00", "2026-07-01T12:00:00Z"])
    assert utc == shown == [summer - timedelta(hours=2), summer]


@pytest.mark.parametrize(
    ("values", "kind", "line"),
    [
        (["2026-01-31", "soon"], None, "holds 'soon' in row 1; allowed: time stamps, such as"),
        (["2026-01-31T00:00Z", "2026-01-31"], None, "holds '2026-01-31' in row 1"),
        (["2026-01-31", "2026-01-31T00:00Z"], None, "holds '2026-01-31T00:00Z' in row 1"),
        (["soon"], None, "holds 'soon' in row 0"),
        ([1.5, 2.5], None, "holds numbers; allowed: time stamps, such as 2026-01-31T12:00"),
        ([date(2026, 1, 1), None], None, "1 of 2 time stamps are missing, the first in row 1"),
        ([1], pa.timestamp("ns"), "is finer than microseconds"),
    ],
)
def test_what_is_no_time_stamp_is_refused(values: Any, kind: Any, line: str) -> None:
    with pytest.raises(BadInput, match=re.escape(line)):
        stamps(values, kind)


@given(moments, st.integers(1, 10**12), st.integers(2, 20))
def test_a_constant_step_is_found(first: datetime, size: int, count: int) -> None:
    begin = np.datetime64(first, "us").astype(np.int64)
    utc = begin + size * np.arange(count)
    assert step_of(utc, utc, np.zeros(count, np.int64), "t") == TimeStep(microseconds=size)


@given(
    st.dates(date(1900, 1, 1), date(2100, 1, 1)),
    st.sampled_from([1, 3, 6, 12]),
    st.booleans(),
    st.integers(4, 30),
)
def test_a_step_of_months_is_found(first: date, months: int, ends: bool, count: int) -> None:
    numbers = np.arange(count) * months + (first.year - 1970) * 12 + first.month - 1
    days = (numbers + ends).astype("datetime64[M]").astype("datetime64[D]")
    days += -1 if ends else min(first.day, 28) - 1
    found = step(days.tolist())
    if len(set(np.diff(days))) > 1:
        assert found == TimeStep(months=months)
    else:
        assert found.microseconds


@pytest.mark.parametrize(
    ("size", "seasons", "shown"),
    [
        (TimeStep(microseconds=DAY // 48), [2, 48, 336], "30 minutes"),
        (TimeStep(microseconds=DAY // 24), [24, 168], "1 hour"),
        (TimeStep(microseconds=DAY), [7, 365], "1 day"),
        (TimeStep(microseconds=7 * DAY), [52], "7 days"),
        (TimeStep(microseconds=1_500_000), [2400, 57600, 403200], "1.5 s"),
        (TimeStep(microseconds=30 * DAY), [], "30 days"),
        (TimeStep(months=1), [12], "1 month"),
        (TimeStep(months=3), [4], "3 months"),
        (TimeStep(months=12), [], "12 months"),
    ],
)
def test_a_step_has_seasons_and_a_name(size: TimeStep, seasons: list[int], shown: str) -> None:
    assert (size.seasons, str(size)) == (seasons, shown)


def test_an_irregular_step_is_refused_with_its_place() -> None:
    hours = [datetime(2026, 3, 29, hour) for hour in (0, 1, 3, 4)]
    line = "most time stamps are 1 hour apart, but 2026-03-29 01:00:00 is followed by 2026-03-29 03"
    with pytest.raises(BadInput, match=line):
        step(hours)
    with pytest.raises(BadInput, match="no series has two time stamps"):
        step(hours[:1])


@given(st.lists(moments, min_size=1, max_size=20))
def test_calendar_columns_equal_the_calendar(given_ones: list[datetime]) -> None:
    shown = np.array(given_ones, dtype="datetime64[us]").view(np.int64)
    expected = [
        [
            (one - datetime(one.year, one.month, one.day)) / timedelta(days=1) - 0.5,
            one.weekday() / 6 - 0.5,
            (one.day - 1) / 30 - 0.5,
            (one.month - 1) / 11 - 0.5,
        ]
        for one in given_ones
    ]
    assert np.allclose(calendar(shown), expected, atol=1e-6)
