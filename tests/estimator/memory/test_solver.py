"""The choice that costs least is found."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize

from trainwright.estimator.memory.solver import greedy, solved


def test_the_cheapest_choice_is_found() -> None:
    bounds = optimize.Bounds(np.zeros(3), np.ones(3))
    enough = optimize.LinearConstraint(np.array([[2.0, 3.0, 4.0]]), 5.0, np.inf)
    found = solved([1.0, 1.0, 3.0], np.ones(3), bounds, [enough], 100)
    assert found is not None
    assert found.round().tolist() == [1, 1, 0]
    assert (
        solved(
            [1.0],
            np.ones(1),
            optimize.Bounds([0.0], [1.0]),
            [optimize.LinearConstraint(np.ones((1, 1)), 2.0, np.inf)],
            100,
        )
        is None
    )


@st.composite
def _programs(draw: st.DrawFn) -> tuple[Any, Any, Any, list[list[int]]]:
    """Costs, rows, limits and exclusive sets of a few variables that mostly lower the rows."""
    count, width = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    number = st.integers(-8, 3).map(float)
    row = st.lists(number, min_size=width, max_size=width)
    rows = draw(st.lists(row, min_size=count, max_size=count))
    limits = draw(st.lists(st.integers(-12, 2).map(float), min_size=count, max_size=count))
    costs = draw(st.lists(st.floats(0.1, 5), min_size=width, max_size=width))
    apart = draw(st.lists(st.lists(st.integers(0, width - 1), min_size=2, max_size=3), max_size=2))
    return np.array(costs), np.array(rows), np.array(limits), apart


@given(_programs())
def test_a_greedy_choice_keeps_all_limits_and_has_nothing_that_is_not_needed(
    program: tuple[Any, Any, Any, list[list[int]]],
) -> None:
    costs, rows, limits, exclusive = program
    chosen = greedy(costs, rows, limits, exclusive)
    if chosen is None:
        return
    assert (rows[:, chosen].sum(axis=1) <= limits + 1e-9).all()
    assert all(len({*chosen} & {*own}) <= 1 for own in exclusive)
    for one in chosen:
        rest = [other for other in chosen if other != one]
        assert (rows[:, rest].sum(axis=1) > limits + 1e-9).any()


@given(st.integers(1, 6), st.data())
def test_of_equal_variables_the_greedy_choice_is_as_cheap_as_the_best(
    needed: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(needed, 8))
    costs = np.array(data.draw(st.permutations([1.0 + one for one in range(count)])))
    chosen = greedy(costs, -np.ones((1, count)), np.array([-float(needed)]), [])
    assert chosen is not None
    assert sorted(costs[chosen]) == [1.0 + one for one in range(needed)]
