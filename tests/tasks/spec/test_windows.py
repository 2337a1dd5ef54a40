"""The daily window in which a host is available."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trainwright.tasks.spec.windows import next_change, seconds_left


@pytest.mark.parametrize(
    ("window", "clock", "left"),
    [
        ("18:00-08:00", "17:59", 0.0),
        ("18:00-08:00", "18:00", 14 * 3600.0),
        ("18:00-08:00", "07:00", 3600.0),
        ("09:00-17:00", "16:30", 1800.0),
        ("09:00-17:00", "17:00", 0.0),
    ],
)
def test_a_daily_window_gives_the_time_left_until_it_ends(
    window: str, clock: str, left: float
) -> None:
    now = datetime.fromisoformat(f"2026-01-05T{clock}:00+00:00")
    assert seconds_left(window, now) == left
    assert seconds_left(window, now.astimezone(timezone(timedelta(hours=5)))) == left
    assert seconds_left(None, now) == math.inf


@given(
    st.times().map(lambda time: f"{time:%H:%M}"),
    st.times().map(lambda time: f"{time:%H:%M}"),
    st.datetimes(datetime(2026, 1, 1), datetime(2027, 1, 1), timezones=st.just(UTC)),
)
def test_a_window_does_not_change_before_its_next_change(
    begin: str, end: str, when: datetime
) -> None:
    assume(begin != end)
    window, now = f"{begin}-{end}", when.replace(microsecond=0)
    change = next_change(window, now)
    assert timedelta() < change - now <= timedelta(days=1)
    is_open = seconds_left(window, now) > 0
    assert (seconds_left(window, change - timedelta(seconds=1)) > 0) == is_open
    assert (seconds_left(window, change) > 0) != is_open
    assert f"{change:%H:%M:%S}" == f"{end if is_open else begin}:00"
