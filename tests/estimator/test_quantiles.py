"""The laws of the normal and the conformal quantile; test_accuracy tests the empirical one."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.estimator.quantiles import NINETY, conformal_quantile, normal_quantile, quantile


@given(st.floats(1e-6, 1 - 1e-6))
def test_the_normal_quantile_has_the_given_share_below_it(share: float) -> None:
    assert 0.5 * math.erfc(-normal_quantile(share) / math.sqrt(2)) == pytest.approx(share)


def test_a_ninety_percent_interval_contains_nine_tenths() -> None:
    assert math.erf(NINETY / math.sqrt(2)) == pytest.approx(0.9)


def test_a_quantile_of_no_values_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        quantile([], 0.5)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=60, unique=True), st.floats(0.01, 0.99))
def test_the_conformal_bound_holds_for_the_stated_share_of_exchangeable_scores(
    scores: list[float], share: float
) -> None:
    """Each score is the new one in turn: the share inside the bound is the probability."""
    others = [scores[:place] + scores[place + 1 :] for place in range(len(scores))]
    inside = sum(
        one <= conformal_quantile(seen, share) for one, seen in zip(scores, others, strict=True)
    )
    assert inside == min(math.ceil(len(scores) * share), len(scores) - 1)


@pytest.mark.parametrize("spread", [0.05, 0.5])
def test_ninety_percent_conformal_intervals_contain_nine_tenths_of_new_draws(spread: float) -> None:
    draw, inside, trials = random.Random(1), 0, 4000
    for _ in range(trials):
        scores = [abs(draw.gauss(0, spread)) for _ in range(40)]
        inside += abs(draw.gauss(0, spread)) <= conformal_quantile(scores, 0.9)
    assert inside / trials == pytest.approx(37 / 41, abs=4 * math.sqrt(0.09 / trials))


def test_too_few_scores_give_the_largest() -> None:
    assert conformal_quantile([3.0, 1.0, 2.0], 0.9) == 3.0


def test_a_conformal_quantile_of_no_scores_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        conformal_quantile([], 0.9)
