"""The normal distribution's quantile, by its own laws; the empirical one is tested beside the accuracy that it sums up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.estimator.quantiles import NINETY, normal_quantile, quantile


@given(st.floats(1e-6, 1 - 1e-6))
def test_so_much_of_a_normal_distribution_lies_below(share: float) -> None:
    assert 0.5 * math.erfc(-normal_quantile(share) / math.sqrt(2)) == pytest.approx(share)


def test_nine_tenths_lie_between_the_ends_of_a_ninety_percent_interval() -> None:
    assert math.erf(NINETY / math.sqrt(2)) == pytest.approx(0.9)


def test_of_no_values_there_is_no_quantile() -> None:
    with pytest.raises(ValueError, match="at least one"):
        quantile([], 0.5)
