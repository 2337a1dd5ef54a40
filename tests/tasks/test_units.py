"""Quantities in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.units import amount, coarse, counted, metric, plain, seconds, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (960.4, "960"),
        (12345.6, "12,346"),
        (2.0, "2"),
        (2.5, "2.5"),
        (9.996, "10"),
        (0.00123456, "0.00123"),
        (0.0, "0"),
        (-1500.0, "-1,500"),
    ],
)
def test_a_number_has_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert plain(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1.0000"),
        (0.98765, "0.9877"),
        (-0.25, "-0.2500"),
        (147.318, "147.32"),
        (1234.56, "1,234.6"),
        (23249.7, "23,250"),
        (0.000823, "0.0008"),
        (0.0000123, "0.0000123"),
        (0.0, "0.0000"),
        (float("nan"), "nan"),
    ],
)
def test_a_metric_has_four_decimals_if_it_is_small_and_none_if_it_is_large(
    value: float, text: str
) -> None:
    assert metric(value) == text


@given(st.floats(1e-12, 1e18), st.integers(2, 6))
def test_any_number_is_close_to_its_text(value: float, digits: int) -> None:
    text = plain(value, digits)
    assert set(text) <= set("0123456789.,")
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.51 * 10 ** (1 - digits))


@given(st.floats(1e-9, 1e15))
def test_no_quantity_is_written_with_an_exponent(value: float) -> None:
    for text in (seconds(value), amount(value, "J"), size(value)):
        assert "e" not in text.replace("TiB", "")


def test_a_count_has_its_noun_in_singular_or_plural() -> None:
    assert [counted(n, "candidate") for n in (0, 1, 2, 1_200)] == [
        "0 candidates",
        "1 candidate",
        "2 candidates",
        "1,200 candidates",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (20.6, "20.6 s"),
        (147.0, "2 min"),
        (5400.0, "1.5 h"),
        (86400.0, "24 h"),
        (200_000.0, "2 days"),
    ],
)
def test_a_time_in_a_list_has_one_unit(value: float | None, text: str) -> None:
    assert coarse(value) == text
