"""How alike two models decide: equal classes, or numbers in standard deviations of the targets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trainwright.tasks.export.row_differences import compared, output_sizes, row_errors

TARGETS = np.array([0.0, 20.0], np.float32)  # their standard deviation is 10


def test_numbers_differ_in_standard_deviations_of_the_targets() -> None:
    exact = np.array([[1.0, 100.0], [2.0, 200.0], [3.0, 300.0]], np.float32)
    off = np.array([[0.05, 0.0], [0.0, -2.0], [0.0, 5.0]])
    found = compared(exact, exact + off, TARGETS, 0)
    assert found["agreement"] == pytest.approx(1 / 3)
    assert found["differences"] == pytest.approx({"median": 0.2, "largest": 0.5}, rel=1e-5)


@given(st.floats(1e-3, 1e3), st.floats(-100, 100))
def test_differences_do_not_depend_on_the_unit(factor: float, shift: float) -> None:
    exact, found = np.array([0.0, 5.0, 9.0]), np.array([0.1, 5.0, 8.0])
    one = compared(exact, found, TARGETS, 0)
    other = compared(*(factor * part + shift for part in (exact, found, TARGETS)), 0)
    assert other["differences"] == pytest.approx(one["differences"], rel=1e-3)


def test_classes_agree_if_the_largest_logit_is_the_same() -> None:
    exact = np.array([[1.0, 2.0, 9.0], [3.0, 2.0, 9.0]])  # the last column is no class
    found = np.array([[0.0, 0.1, 9.0], [1.0, 1.5, 9.0]])
    assert compared(exact, found, np.array([0, 1]), 2) == {"agreement": 0.5}


def test_an_output_that_is_no_number_differs_unless_both_are_none() -> None:
    nan = np.array([np.nan, 1.0])
    assert compared(nan, nan, TARGETS, 0)["differences"]["largest"] == 0.0
    assert compared(np.zeros(2), nan, TARGETS, 0)["differences"]["largest"] == np.inf


def test_the_error_of_a_row_is_relative_to_its_largest_output_or_to_their_usual_size() -> None:
    exact = np.array([[3.0, -4.0], [0.0, 0.0], [1.0, 0.0]])
    found = exact + np.array([[0.0, 0.4], [0.1, 0.0], [0.0, -0.2]])
    [size] = output_sizes([exact])
    assert size == pytest.approx(np.sqrt(26 / 6))
    assert row_errors([exact], [found]) == pytest.approx([0.4 / 4, 0.1 / size, 0.2 / size])
    assert row_errors([exact, exact], [exact, found], [1.0, 1.0]) == pytest.approx([0.1, 0.1, 0.2])


def test_a_logit_that_is_infinite_in_both_models_does_not_differ() -> None:
    exact = np.array([[1.0, -np.inf], [2.0, -np.inf], [-np.inf, 4.0]])
    assert row_errors([exact], [exact]).tolist() == [0.0, 0.0, 0.0]
    assert compared(exact, exact, TARGETS, 0)["differences"]["largest"] == 0.0
    found = np.where(np.isfinite(exact), exact, -1e9)
    assert row_errors([exact], [found]).tolist() == [np.inf, np.inf, np.inf]


@given(arrays(np.float32, (3, 2), elements=st.floats(width=32)))
def test_a_model_never_differs_from_itself(exact: np.ndarray) -> None:
    assert row_errors([exact], [exact]).tolist() == [0.0, 0.0, 0.0]
    assert compared(exact, exact, TARGETS, 0)["differences"] == {"median": 0.0, "largest": 0.0}


def test_targets_without_spread_are_replaced_by_the_outputs() -> None:
    exact = np.array([0.0, 2.0])
    found = compared(exact, exact + 0.5, np.ones(2, np.float32), 0)
    assert found["differences"]["largest"] == pytest.approx(0.5)
