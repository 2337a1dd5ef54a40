"""The choice that costs least is found."""

from __future__ import annotations

import numpy as np
from scipy import optimize

from trainwright.estimator.memory.solver import solved


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
