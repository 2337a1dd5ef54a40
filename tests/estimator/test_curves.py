"""Curves over the batch size: through their knots, linear between them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from trainwright.estimator.curves import Knots, line_through

_points = st.dictionaries(st.integers(1, 5000), st.floats(0.001, 100), min_size=2, max_size=8)


@given(_points)
def test_a_curve_passes_through_its_knots_and_stays_between_neighbours(
    points: dict[int, float],
) -> None:
    sizes = sorted(points)
    curve = Knots(sizes=tuple(sizes), values=tuple(points[size] for size in sizes))
    for size in sizes:
        assert curve(size) == pytest.approx(points[size])
    for left, right in itertools.pairwise(sizes):
        low, high = sorted((points[left], points[right]))
        assert low * (1 - 1e-9) <= curve((left + right) / 2) <= high * (1 + 1e-9)


@given(_points, st.integers(1, 5000))
def test_before_its_first_knot_a_curve_is_at_least_proportional_to_the_batch(
    points: dict[int, float], size: int
) -> None:
    sizes = sorted(points)
    curve = Knots(sizes=tuple(sizes), values=tuple(points[one] for one in sizes))
    size = min(size, sizes[0])
    assert curve(size) >= curve(sizes[0]) * size / sizes[0] * (1 - 1e-9) > 0


@given(st.floats(0, 10), st.floats(0.001, 10), st.integers(1, 10_000))
def test_a_curve_through_a_line_is_that_line_everywhere(
    fixed: float, slope: float, size: int
) -> None:
    curve = Knots(sizes=(8, 16, 64), values=tuple(fixed + slope * at for at in (8, 16, 64)))
    assert curve(size) == pytest.approx(fixed + slope * size)
    assert curve.bends() == []


def test_a_curve_knows_where_its_slope_changes() -> None:
    assert Knots(sizes=(8, 16, 32, 64), values=(1.0, 1.1, 1.3, 2.6)).bends() == [32]


@given(
    st.lists(
        st.tuples(st.integers(1, 4096), st.floats(1e-5, 1e2)),
        min_size=2,
        max_size=12,
        unique_by=lambda one: one[0],
    )
)
def test_the_line_has_the_least_relative_error_and_no_negative_part(
    points: list[tuple[int, float]],
) -> None:
    sizes, seconds = zip(*sorted(points), strict=True)
    line = line_through(sizes, seconds)
    assert line.fixed >= 0
    assert line.per_sample >= 0
    rows = np.array([[1 / value, size / value] for size, value in zip(sizes, seconds, strict=True)])
    _, least = nnls(rows, np.ones(len(sizes)))
    off = float(np.linalg.norm(rows @ [line.fixed, line.per_sample] - 1))
    assert off == pytest.approx(least, rel=1e-6, abs=1e-6)
