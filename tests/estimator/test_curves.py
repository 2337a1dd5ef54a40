"""Curves over the batch size: through their knots, straight between."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.estimator.curves import Knots

_points = st.dictionaries(st.integers(1, 5000), st.floats(0.001, 100), min_size=2, max_size=8)


@given(_points)
def test_a_curve_goes_through_its_knots_and_stays_between_neighbours(points: dict[int, float]) -> None:
    sizes = sorted(points)
    curve = Knots(sizes=tuple(sizes), values=tuple(points[size] for size in sizes))
    for size in sizes:
        assert curve(size) == pytest.approx(points[size])
    for left, right in itertools.pairwise(sizes):
        low, high = sorted((points[left], points[right]))
        assert low * (1 - 1e-9) <= curve((left + right) / 2) <= high * (1 + 1e-9)


@given(st.floats(0, 10), st.floats(0.001, 10), st.integers(1, 10_000))
def test_a_curve_through_a_line_is_that_line_everywhere(fixed: float, slope: float, size: int) -> None:
    curve = Knots(sizes=(8, 16, 64), values=tuple(fixed + slope * at for at in (8, 16, 64)))
    assert curve(size) == pytest.approx(fixed + slope * size)
    assert curve.bends() == []


def test_a_curve_says_where_it_bends() -> None:
    assert Knots(sizes=(8, 16, 32, 64), values=(1.0, 1.1, 1.3, 2.6)).bends() == [32]
