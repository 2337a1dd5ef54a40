"""Which rates are tried after the ramp, and which one is chosen."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.runs.artefacts.learning_rate_search import (
    LearningRateSearch,
    LearningRateTrial,
)
from trainwright.tasks.search_lr.learning_rate import choose, ladder, with_trials
from trainwright.tasks.search_lr.plot import plot
from trainwright.tasks.train.worker.lr_curve import runaway_rate
from trainwright.tasks.train.worker.lr_trials import (
    FIRST,
    MOST,
    best_of,
    next_trial,
    score,
    settle,
    trial_steps,
)


def tried(edge: float, loss: object) -> dict[float, float]:
    """All trials of a search, with `loss(rate)` as the result of each."""
    scores: dict[float, float] = {}
    while (rate := next_trial(edge, scores)) is not None:
        scores[rate] = loss(rate)  # type: ignore[operator]
    return scores


@given(edge=st.floats(1e-4, 10), place=st.floats(-1, 5), width=st.floats(0.3, 3))
def test_the_chosen_rate_is_near_the_best_rate_in_the_trials_range(
    edge: float, place: float, width: float
) -> None:
    best = edge / 3**place

    def loss(rate: float) -> float:
        return (math.log(rate / best) / width) ** 2

    scores = tried(edge, loss)
    assert FIRST <= len(scores) <= MOST
    found = settle(scores)
    assert found is not None
    value, (low, high) = found
    assert low <= value <= high
    if 0.5 <= place <= 4:
        assert value == pytest.approx(best, rel=1e-6)


@given(
    st.dictionaries(
        st.floats(1e-6, 10), st.one_of(st.floats(-1e6, 1e6), st.just(math.inf)), max_size=6
    )
)
def test_the_chosen_rate_is_within_the_range_of_the_trials(scores: dict[float, float]) -> None:
    found = settle(scores)
    if found is None:
        assert all(math.isinf(one) for one in scores.values())
        return
    value, (low, high) = found
    assert min(scores) <= low <= best_of(scores) <= high <= max(scores)
    assert low * (1 - 1e-9) <= value <= high * (1 + 1e-9)


def test_a_diverging_rate_is_never_chosen() -> None:
    found = settle({0.1: 1.0, 0.3: 0.5, 0.9: math.inf})
    assert found == (0.3, (0.1, 0.9))
    assert settle({0.1: math.inf}) is None
    assert settle({}) is None


def test_a_trial_that_ended_early_or_diverged_has_no_score() -> None:
    assert score([1.0] * 19, 20) == math.inf
    assert score([1.0] * 19 + [math.nan], 20) == math.inf
    assert score([9.0] * 15 + [1.0] * 5, 20) == 1.0


@given(st.integers(1, 10**7))
def test_the_length_of_a_trial_is_a_share_of_the_training_within_bounds(steps: int) -> None:
    assert 20 <= trial_steps(steps) <= 300


def falling() -> LearningRateSearch:
    rates = ladder(1e-5, 1.0, 90)
    return choose(
        [(rate, 2.0 - min(1.8, 20 * rate) + max(0.0, 9 * (rate - 0.3)), None) for rate in rates]
    )


def test_the_trials_decide_and_the_reason_and_the_plot_show_them() -> None:
    trials = [
        LearningRateTrial(learning_rate=rate, loss=loss, steps=50)
        for rate, loss in ((0.1, 0.9), (0.03, 0.4), (0.01, 0.6))
    ]
    search = with_trials(falling(), trials)
    assert search.interval == (0.01, 0.1)
    assert 0.01 < search.learning_rate < 0.03  # a third above is worse than a third below
    assert "of 3 trainings of 50 steps" in search.reason
    assert "0.03 reached the lowest loss (0.4)" in search.reason
    assert LearningRateSearch.model_validate_json(search.model_dump_json()) == search
    assert "trials" in plot(search)


def test_if_the_best_trial_has_the_highest_rate_it_is_chosen() -> None:
    trials = [
        LearningRateTrial(learning_rate=rate, loss=loss, steps=50)
        for rate, loss in ((0.1, 0.6), (0.3, 0.5), (0.9, 0.4), (2.7, math.inf))
    ]
    search = with_trials(falling(), trials)
    assert search.learning_rate == 0.9
    assert "rates from 0.1 to 2.7 (the ramp's loss diverged at" in search.reason
    assert search.reason.endswith("0.9 reached the lowest loss (0.4)")


def test_if_all_trials_diverge_the_ramps_rate_is_chosen() -> None:
    ramp = falling()
    ran_away = [LearningRateTrial(learning_rate=0.1, loss=math.inf, steps=3)]
    for trials in ([], ran_away):
        search = with_trials(ramp, trials)
        assert (search.learning_rate, search.reason) == (ramp.learning_rate, ramp.reason)
    assert (
        LearningRateSearch.model_validate_json(with_trials(ramp, ran_away).model_dump_json())
        .trials[0]
        .loss
        == math.inf
    )


def test_the_runaway_rate_is_the_first_lasting_rise_of_the_loss_or_its_end() -> None:
    rates = ladder(1e-4, 1.0, 81)
    climbing = [(rate, 1.0 if rate < 0.1 else 50.0 * rate, None) for rate in rates]
    assert 0.1 <= (runaway_rate(climbing) or 0) <= 0.2
    broken = [(rate, 1.0 if rate < 0.1 else math.nan, None) for rate in rates]
    assert runaway_rate(broken) == pytest.approx(0.1, rel=0.2)
    assert runaway_rate([(rate, 1.0 - rate / 2, None) for rate in rates]) == 1.0
    assert runaway_rate([(0.1, math.nan, None)]) is None
