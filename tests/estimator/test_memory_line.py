"""A rank's memory as a line: its parts are of this world, and add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.estimator.curves import Affine, DeviceCurve, Knots


@given(
    need=st.floats(0, 1e12),
    knots=st.lists(st.floats(0, 1e12), min_size=4, max_size=4),
    batch=st.integers(1, 4096),
    micro_batches=st.integers(1, 64),
)
def test_no_part_of_a_ranks_memory_is_below_zero_and_they_add_up_to_the_whole(
    need: float, knots: list[float], batch: int, micro_batches: int
) -> None:
    curve = DeviceCurve(
        device_type="nvidia-t4",
        mode="datasheet",
        coverage=1.0,
        step_time_s=Affine(fixed=1.0, per_sample=1.0),
        low_factor=0.5,
        high_factor=2.0,
        peak_memory_bytes=Affine(fixed=0.0, per_sample=1.0),
        memory_knots=Knots(sizes=(1, 8, 64, 512), values=tuple(sorted(knots))),
        memory_safe_factor=1.2,
        energy_source="datasheet",
    )
    line = curve.memory_line(batch, need, micro_batches)
    assert line.per_sample >= 0
    assert line.fixed >= 0
    assert line(batch) == pytest.approx(need)
