"""Errors, their summary and the noise floor."""

from __future__ import annotations

import json
import math
import re
import statistics

import pytest
from accuracy import (
    HEADER,
    coverage,
    errors,
    noise_floor,
    percent,
    quantile,
    row,
    summarise,
    table,
)
from hypothesis import given
from hypothesis import strategies as st

SECONDS = st.floats(1e-6, 1e3)


def test_the_summary_of_known_errors() -> None:
    found = summarise([1.1, 1.8, 1.0, 0.5], [1.0, 2.0, 1.0, 1.0])
    assert found.count == 4
    assert found.median == pytest.approx(0.1)
    assert found.bias == pytest.approx(-0.05)
    assert found.worst == pytest.approx(-0.5)
    assert found.p90 == pytest.approx(0.1 + 0.7 * 0.4)
    assert (found.coverage, found.width, found.noise_median, found.noise_p90) == (
        None,
        None,
        None,
        None,
    )


@given(st.lists(SECONDS, min_size=1, max_size=30), st.floats(0.1, 10))
def test_a_constant_factor_gives_equal_errors_and_that_bias(
    measured: list[float], factor: float
) -> None:
    found = summarise([factor * one for one in measured], measured)
    for value in (found.bias, found.worst):
        assert value == pytest.approx(factor - 1, abs=1e-9)
    assert found.median == pytest.approx(abs(factor - 1), abs=1e-9)


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=30), st.randoms())
def test_the_order_of_cases_does_not_matter(pairs: list[tuple[float, float]], draw: object) -> None:
    shuffled = sorted(pairs, key=lambda _: draw.random())  # type: ignore[attr-defined]
    one, two = (summarise([a for a, _ in each], [b for _, b in each]) for each in (pairs, shuffled))
    assert (one.median, one.p90, one.bias, abs(one.worst)) == (
        two.median,
        two.p90,
        two.bias,
        abs(two.worst),
    )
    assert one.median <= one.p90 <= abs(one.worst) or math.isclose(one.median, abs(one.worst))


@given(st.lists(SECONDS, min_size=2, max_size=40))
def test_quantiles_equal_the_standard_librarys(values: list[float]) -> None:
    assert quantile(values, 0.5) == pytest.approx(statistics.median(values))
    assert quantile(values, 0.9) == pytest.approx(
        statistics.quantiles(values, n=10, method="inclusive")[-1]
    )
    assert (quantile(values, 0.0), quantile(values, 1.0)) == (min(values), max(values))


def test_the_noise_floor_is_the_difference_between_the_halves() -> None:
    assert noise_floor([1.0, 1.0, 1.2, 1.0, 1.5, 1.25]) == pytest.approx(1 - 1.0 / 1.25)
    assert noise_floor([2.0, 99.0, 1.0]) == pytest.approx(1.0)


@given(st.floats(1e-6, 1e3), st.integers(2, 12))
def test_a_machine_without_noise_has_no_noise_floor(seconds: float, rounds: int) -> None:
    assert noise_floor([seconds] * rounds) == 0


def test_one_round_has_no_noise_floor() -> None:
    with pytest.raises(ValueError, match="at least two"):
        noise_floor([1.0])


def test_an_interval_includes_its_ends() -> None:
    assert coverage([(1.0, 2.0), (1.0, 2.0), (1.0, 2.0), (1.0, 2.0)], [1.0, 2.0, 0.99, 2.01]) == 0.5


def test_noise_and_intervals_are_summarised_with_the_errors() -> None:
    found = summarise([1.0, 2.0], [1.0, 2.0], noise=[0.1, 0.3], intervals=[(0.5, 1.5), (3.0, 4.0)])
    assert (found.coverage, found.noise_median) == (0.5, pytest.approx(0.2))
    assert found.width == pytest.approx((3 + 4 / 3) / 2)
    assert found.noise_p90 == pytest.approx(0.28)


@pytest.mark.parametrize(
    ("predicted", "measured"), [([], []), ([1.0], [1.0, 2.0]), ([1.0, 2.0], [1.0])]
)
def test_no_measurements_are_refused(predicted: list[float], measured: list[float]) -> None:
    with pytest.raises(ValueError):
        summarise(predicted, measured)


def test_errors_are_signed() -> None:
    assert errors([2.0, 0.5], [1.0, 1.0]) == [1.0, -0.5]


def test_a_document_is_json() -> None:
    assert json.loads(json.dumps(summarise([1.0], [2.0]).document()))["median"] == 0.5


def test_a_table_aligns_its_columns() -> None:
    lines = table(
        [HEADER, row("ours", summarise([1.1], [1.0], intervals=[(1.0, 1.2)]))]
    ).splitlines()
    assert lines[0].split()[0] == "method"
    assert re.split(r"\s{2,}", lines[2]) == [
        "ours",
        "1",
        "10.0 %",
        "10.0 %",
        "+10.0 %",
        "+10.0 %",
        "100.0 %",
        "1.20",
    ]
    assert lines[0].rindex("p90") + 3 == lines[2].index("%", lines[2].index("%") + 1) + 1


def test_a_missing_percentage_is_a_dash() -> None:
    assert (percent(None), percent(0.1234), percent(0.1, signed=True)) == ("-", "12.3 %", "+10.0 %")
