"""Power and energy of a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.estimator.curves import Interval
from trainwright.estimator.errors import BadInput
from trainwright.estimator.predict.energy import (
    PowerDraw,
    datasheet_power,
    step_energy,
)


def test_unknown_device_types_are_refused() -> None:
    with pytest.raises(BadInput, match="device type: got 'tpu'; allowed: amd-mi300x"):
        datasheet_power("tpu")


def test_datasheet_power_is_in_proportion_to_the_cores_and_labelled() -> None:
    one, four = datasheet_power("cpu"), datasheet_power("cpu", 4)
    assert (four.idle_w, four.load_w) == (4 * one.idle_w, 4 * one.load_w)
    assert datasheet_power("nvidia-t4").load_w == 70
    assert one.energy_source == "datasheet"
    assert one.spread > 0


TIMES = st.lists(st.floats(0, 1e4), min_size=3, max_size=3).map(sorted)


@given(
    times=TIMES,
    idle=st.floats(0, 1e3),
    load=st.floats(0, 1e3),
    spread=st.floats(0, 3),
    wait=st.floats(0, 1e3),
)
def test_energy_is_time_times_power_and_its_interval_includes_both_errors(
    times: list[float], idle: float, load: float, spread: float, wait: float
) -> None:
    low, median, high = times
    time = Interval(median=median, low=low, high=high)
    exact = step_energy(time, PowerDraw(idle_w=idle, load_w=load, source="nvml"))
    assert (exact.low, exact.median, exact.high) == pytest.approx(
        (load * low, load * median, load * high)
    )
    vague = step_energy(
        time, PowerDraw(idle_w=idle, load_w=load, source="datasheet", spread=spread), wait_s=wait
    )
    assert vague.median == pytest.approx(exact.median + idle * wait)
    assert vague.low * (1 + spread) == pytest.approx(exact.low + idle * wait)
    assert vague.high == pytest.approx((exact.high + idle * wait) * (1 + spread))


def test_a_negative_wait_is_refused() -> None:
    with pytest.raises(ValueError, match="0 s or more"):
        step_energy(Interval(median=1, low=1, high=1), datasheet_power("cpu"), wait_s=-1)
