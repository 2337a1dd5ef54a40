"""The batch grows if that pays, within its bounds, and the learning rate follows the rule."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.train.batch.adaptive_batch import (
    LEAST_GAIN,
    MOST_CHANGES,
    MOST_OF_MEDIAN,
    WARM_UP_STEPS,
    BatchGrowth,
    efficiency,
    goodput,
    largest_batch,
    mean_step_time_s,
    rate_factor,
    restored,
    rule_for,
)

BATCHES = st.integers(1, 4096)
NOISE = st.floats(0.1, 1e6)


def settled(
    fixed_s: float, per_sample_s: float, noise: float, *, base: int = 32, most: int = 4096
) -> list[int]:
    """The batch after each of 60 windows on a machine with T(B) = a + s·B."""
    growth, batches = BatchGrowth(base, most, "sqrt"), []
    for window in range(60):
        found = growth.observe(fixed_s + per_sample_s * growth.batch, noise)
        if found is not None:
            growth.change(found[0], 20 * window, noise)
        batches.append(growth.batch)
    return batches


@given(
    fixed=st.floats(0, 1.0),
    per_sample=st.floats(1e-5, 1e-2),
    noise=NOISE,
    most=st.integers(32, 5000),
)
def test_the_batch_stays_within_its_bounds_grows_at_most_twofold_and_settles(
    fixed: float, per_sample: float, noise: float, most: int
) -> None:
    batches = settled(fixed, per_sample, noise, most=most)
    assert all(32 <= batch <= most for batch in batches)
    assert all(after <= 2 * before for before, after in itertools.pairwise(batches))
    assert len(set(batches[-10:])) == 1
    assert sum(one != other for one, other in itertools.pairwise(batches)) <= MOST_CHANGES


@given(fixed=st.floats(0, 0.5), per_sample=st.floats(1e-4, 1e-2), noise=NOISE)
def test_no_batch_up_to_twice_the_settled_one_is_much_better(
    fixed: float, per_sample: float, noise: float
) -> None:
    batch = settled(fixed, per_sample, noise)[-1]

    def worth(size: int) -> float:
        return goodput(size, fixed + per_sample * size, 32, noise)

    assert worth(batch) * (1 + LEAST_GAIN) >= worth(32) * 0.999
    assert all(worth(size) <= worth(batch) * 1.06 for size in range(batch, min(4096, 2 * batch)))


def test_without_fixed_cost_per_step_it_tries_a_larger_batch_once_and_goes_back() -> None:
    assert settled(0.0, 1e-3, 100.0)[-1] == 32
    assert max(settled(0.0, 1e-3, 100.0)) == 64


@pytest.mark.parametrize(("loses", "after"), [(0.04, 64), (0.06, 32)])
def test_it_goes_back_if_growing_has_lost_at_least_the_least_gain(loses: float, after: int) -> None:
    growth = BatchGrowth(32, 64, "sqrt")
    assert growth.observe(0.1, math.inf) is not None
    growth.change(64, 20, math.inf)
    found = growth.observe(0.2 * (1 + loses), math.inf)
    assert (found[0] if found is not None else growth.batch) == after


def test_mean_step_time_counts_occasional_waits_and_caps_a_stall() -> None:
    assert mean_step_time_s([1.0] * 18 + [2.0] * 2) == pytest.approx(1.1)
    assert mean_step_time_s([1.0] * 19 + [100.0]) == pytest.approx((19 + MOST_OF_MEDIAN) / 20)


def test_the_batch_never_grows_if_the_gradient_has_little_noise() -> None:
    assert set(settled(0.5, 1e-5, 1.0)) == {32}


def test_the_batch_does_not_change_before_the_noise_scale_is_known() -> None:
    growth = BatchGrowth(32, 4096, "sqrt")
    assert [growth.observe(0.1, None) for _ in range(5)] == [None] * 5


def test_a_change_names_both_batches_and_the_reason() -> None:
    growth = BatchGrowth(32, 4096, "sqrt")
    found = growth.observe(0.1, 500.0)
    assert found is not None
    assert found[0] == 64
    assert found[1].startswith(
        "global batch from 32 to 64: noise scale 500 samples, goodput now 320 samples/s, "
    )


@given(batch=BATCHES, base=BATCHES, noise=NOISE)
def test_efficiency_is_one_at_the_base_and_falls_with_the_batch(
    batch: int, base: int, noise: float
) -> None:
    assert efficiency(base, base, noise) == pytest.approx(1)
    assert efficiency(batch + 1, base, noise) < efficiency(batch, base, noise)
    assert efficiency(batch, base, math.inf) == 1


@given(base=st.integers(1, 500), times=st.integers(1, 20), noise=NOISE)
def test_adascale_lies_between_one_and_linear_and_follows_its_definition(
    base: int, times: int, noise: float
) -> None:
    batch = base * times
    gain = rate_factor("adascale", batch, base, noise)
    assert 1 - 1e-9 <= gain <= times + 1e-9
    variance, square = noise / base, 1.0  # σ² = tr Σ / B0 and μ² = |G|², in units of |G|²
    assert gain == pytest.approx((variance + square) / (variance / times + square))


def test_each_rule_scales_the_learning_rate_by_its_formula() -> None:
    assert rate_factor("constant", 128, 32, 100.0) == 1
    assert rate_factor("linear", 128, 32, 100.0) == 4
    assert rate_factor("sqrt", 128, 32, 100.0) == 2
    assert rate_factor("adascale", 128, 32, None) == 1
    assert rate_factor("adascale", 128, 32, math.inf) == 4


@pytest.mark.parametrize(
    ("rule", "optimizer", "expected"),
    [
        ("auto", "adamw", "sqrt"),
        ("auto", "adam", "sqrt"),
        ("auto", "momentum", "adascale"),
        ("auto", "sgd", "adascale"),
        ("linear", "adamw", "linear"),
    ],
)
def test_the_job_chooses_the_rule_and_auto_depends_on_the_optimizer(
    rule: str, optimizer: str, expected: str
) -> None:
    assert rule_for(rule, optimizer) == expected  # type: ignore[arg-type]


def test_linear_warms_up_from_the_previous_rate_and_the_other_rules_do_not() -> None:
    linear, root = BatchGrowth(32, 4096, "linear"), BatchGrowth(32, 4096, "sqrt")
    for growth in (linear, root):
        growth.change(64, 100, 50.0)
    factors = [linear.factor(step, 50.0) for step in range(100, 100 + WARM_UP_STEPS + 5)]
    assert 1 < factors[0] < 1.1
    assert factors == sorted(factors)
    assert factors[WARM_UP_STEPS - 1 :] == [2.0] * 6
    assert root.factor(100, 50.0) == math.sqrt(2)


def test_a_second_change_during_warm_up_starts_from_the_current_rate() -> None:
    growth = BatchGrowth(32, 4096, "linear")
    growth.change(64, 100, None)
    before = growth.factor(119, None)
    growth.change(128, 120, None)
    assert before < growth.factor(120, None) < before + 0.1


@given(noise=NOISE, windows=st.integers(0, 12))
def test_a_checkpoint_restores_the_growth_exactly(noise: float, windows: int) -> None:
    growth = BatchGrowth(32, 1000, "linear")
    for window in range(windows):
        found = growth.observe(0.1 + 1e-4 * growth.batch, noise)
        if found is not None:
            growth.change(found[0], 20 * window, noise)
    again = restored(json.loads(json.dumps(growth.document())))
    assert again == growth
    assert again.factor(999, noise) == growth.factor(999, noise)


def test_memory_limits_count_in_sum_if_the_split_is_free_and_in_proportion_if_fixed() -> None:
    assert largest_batch([40, 20], [None, None], 500, follows_speed=True) == 500
    assert largest_batch([40, 20], [80, 50], 500, follows_speed=True) == 130
    assert largest_batch([40, 20], [80, 50], 500, follows_speed=False) == 120
    assert largest_batch([40, 20], [80, None], 100, follows_speed=False) == 100
