"""How often a plan averages, and what that sends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.allocate.layouts.averages import MOST_INTERVAL, AverageTimes, interval


def test_epochs_and_checkpoints_average_too() -> None:
    times = AverageTimes(epoch_steps=25, checkpoint_steps=50, steps=100, moments=2)
    # Every 10 steps: after 10, 20, 25, 35, 45, 50 and so on; moments after 50 and 100.
    averages, sent = times.in_a_step(10)
    assert averages == pytest.approx(12 / 100)
    assert sent == pytest.approx((12 + 2 * 2) / 100)


@pytest.mark.parametrize(
    ("times", "average_s", "every"),
    [
        # A twentieth of the bytes; checkpoints are rare.
        (AverageTimes(1000, 1000, 100_000, 2), 0.0, 20),
        (AverageTimes(63, 1000, 630, 2), 0.0, 25),
        # An average as long as 10 steps takes a twentieth of the time every 200 steps.
        (AverageTimes(1000, 1000, 100_000, 0), 10.0, 200),
        # As rarely as possible: once an epoch, or the most that is known to learn as well.
        (AverageTimes(12, 1000, 1200, 0), 0.0, 12),
        (AverageTimes(10_000, 10_000, 100_000, 0), 1000.0, MOST_INTERVAL),
        (AverageTimes(1, 50, 10, 0), 0.0, 1),
    ],
)
def test_the_interval_keeps_averages_a_small_part_of_time_and_bytes(
    times: AverageTimes, average_s: float, every: int
) -> None:
    assert interval(times, 1.0, average_s) == every


@given(
    st.integers(1, 3000),
    st.integers(1, 200),
    st.integers(1, 5000),
    st.integers(0, 2),
    st.floats(0, 1e3),
)
def test_the_interval_is_no_longer_than_an_epoch_or_the_bound(
    epoch: int, checkpoint: int, steps: int, moments: int, average_s: float
) -> None:
    every = interval(AverageTimes(epoch, checkpoint, steps, moments), 1.0, average_s)
    assert 1 <= every <= min(epoch, MOST_INTERVAL)
