"""How much slower work is on a slower machine, by kind of work."""

from __future__ import annotations

import pytest

from trainwright.estimator.predict.machine_speed import SENTINEL_CALLS, SENTINEL_FLOPS, Speed

USUAL = Speed(compute_s=1e-4, memory_s=1e-3, calls_s=2e-4)


def _slower(compute: float = 1.0, memory: float = 1.0, calls: float = 1.0) -> Speed:
    return Speed(compute_s=1e-4 * compute, memory_s=1e-3 * memory, calls_s=2e-4 * calls)


def test_arithmetic_and_calls_scale_with_their_own_kernels() -> None:
    flops, calls = 10 * SENTINEL_FLOPS, 10.0 * SENTINEL_CALLS
    assert _slower(compute=2.0).slower(USUAL, 20e-4, flops, 0.0) == pytest.approx(2.0)
    assert _slower(memory=2.0).slower(USUAL, 10e-4, flops, 0.0) == pytest.approx(1.0)
    assert _slower(calls=3.0).slower(USUAL, 60e-4, 0.0, calls) == pytest.approx(3.0)


def test_moving_bytes_scales_with_the_mean_of_all_three_kernels() -> None:
    for kernel in ("compute", "memory", "calls"):
        assert _slower(**{kernel: 8.0}).slower(USUAL, 1.0, 0.0, 0.0) == pytest.approx(2.0)
    assert _slower(1.5, 1.5, 1.5).slower(USUAL, 1e-3, SENTINEL_FLOPS, 20.0) == pytest.approx(1.5)


def test_the_median_is_taken_for_each_kernel() -> None:
    assert Speed.median([USUAL, _slower(compute=3.0), _slower(memory=2.0)]) == USUAL
