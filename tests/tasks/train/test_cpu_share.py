"""The cgroup quota that limits a rank to its share of the CPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.train.cpu_share import PERIOD_US, quota_us


@given(st.floats(0.001, 64))
def test_quota_over_period_equals_the_share_even_for_a_tiny_share(cores: float) -> None:
    quota, period = quota_us(cores)
    assert quota / period == pytest.approx(cores, rel=0.01, abs=1 / PERIOD_US)
    assert quota >= 1000
    assert PERIOD_US <= period <= 1_000_000
