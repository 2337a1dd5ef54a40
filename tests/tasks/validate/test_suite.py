"""The bounds of an inferred suite: how far they are from what was seen."""

from __future__ import annotations

import pytest

from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.validate.column_summary import ColumnSummary
from trainwright.tasks.validate.suite import infer_suite


def bounds(low: float, high: float, mean: float, deviation: float) -> list[tuple[float, float]]:
    """Of the values and of the mean of a column."""
    column = ColumnSummary("age", "number", 0.0, 100, low, high, mean, deviation)
    suite = infer_suite([column], None, 100, DataSpec(uri="a.csv"), table=True)
    found = {one["type"]: one["kwargs"] for one in suite if one["kwargs"].get("column") == "age"}
    kinds = ("expect_column_values_to_be_between", "expect_column_mean_to_be_between")
    return [(found[kind]["min_value"], found[kind]["max_value"]) for kind in kinds]


@pytest.mark.parametrize(
    ("low", "high", "mean", "deviation", "values", "means"),
    [
        (2, 40, 20, 10, (0, 78), (14.34, 25.66)),
        (0, 80, 1, 8, (0, 160), (0, 5.53)),
        (-80, -18, -50, 10, (-142, 0), (-55.66, -44.34)),
        (-80, 0, -1, 8, (-160, 0), (-5.53, 0)),
        (-1, 3, 0, 1, (-5, 7), (-0.566, 0.566)),
        (0, 0, 0, 0, (0, 1), (0, 1)),
        (100, 104, 102, 1, (96, 108), (101.434, 102.566)),
    ],
)
def test_a_bound_is_not_wider_than_zero_if_no_value_is_on_its_other_side(
    low: float,
    high: float,
    mean: float,
    deviation: float,
    values: tuple[float, float],
    means: tuple[float, float],
) -> None:
    found = bounds(low, high, mean, deviation)
    assert found == [pytest.approx(values, abs=0.01), pytest.approx(means, abs=0.01)]
    assert low < 0 or min(found[0][0], found[1][0]) >= 0
    assert high > 0 or low == 0 or max(found[0][1], found[1][1]) <= 0
