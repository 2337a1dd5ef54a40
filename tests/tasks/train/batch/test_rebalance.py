from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.tasks.train.batch.rebalance import (
    LEAST_GAIN,
    MOST_CHANGES,
    Rebalancer,
    expected_largest,
)


def settle(
    split: list[int], fixed: list[float], per_sample: list[float], noise: float, seed: int
) -> tuple[list[int], int]:
    """The split after 30 windows on devices of t = a + s·b with noise, and how often it changed."""
    balance, source = Rebalancer(list(split)), random.Random(seed)
    for _ in range(30):
        balance.observe(
            [
                (a + s * b) * source.uniform(1 - noise, 1 + noise)
                for a, s, b in zip(fixed, per_sample, balance.split, strict=True)
            ]
        )
    return balance.split, balance.changes


def test_an_even_split_over_devices_with_speeds_2_to_1_becomes_2_to_1() -> None:
    split, _ = settle([60, 60], [0.0, 0.0], [1e-3, 2e-3], 0.0, 0)
    assert split == [80, 40]


@given(
    slowness=st.lists(st.floats(1, 8), min_size=2, max_size=5),
    fixed=st.floats(0, 20e-3),
    seed=st.integers(0, 1000),
)
def test_the_split_settles_with_all_samples_and_at_least_one_per_rank(
    slowness: list[float], fixed: float, seed: int
) -> None:
    start = [30] * len(slowness)
    split, changes = settle(
        start, [fixed * one for one in slowness], [1e-3 * one for one in slowness], 0.02, seed
    )
    assert sum(split) == sum(start)
    assert min(split) >= 1
    assert changes <= MOST_CHANGES


@settings(deadline=None)
@given(
    before=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4),
    fixed=st.floats(0, 3e-3),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_the_split_follows_changed_speeds_within_three_changes(
    before: list[float], fixed: float, seed: int, data: st.DataObject
) -> None:
    after = data.draw(
        st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=len(before), max_size=len(before))
    )
    source, balance = random.Random(seed), Rebalancer([round(480 * speed) for speed in before])

    def times(speeds: list[float]) -> list[float]:
        return [
            fixed + 1e-4 * batch / speed for batch, speed in zip(balance.split, speeds, strict=True)
        ]

    for _ in range(20):
        balance.observe([time * source.gauss(1, 0.01) for time in times(before)])
    earlier = balance.changes
    for _ in range(12):
        balance.observe([time * source.gauss(1, 0.01) for time in times(after)])
    assert balance.changes - earlier <= 3
    ideal_s = fixed + 1e-4 * sum(balance.split) / sum(after)
    assert ideal_s / max(times(after)) >= 0.93


@given(seed=st.integers(0, 1000))
def test_noise_changes_a_good_split_rarely_and_only_slightly(seed: int) -> None:
    split, changes = settle([80, 40], [0.0, 0.0], [1e-3, 2e-3], 0.04, seed)
    assert 0.08 / max(split[0] * 1e-3, split[1] * 2e-3) >= 0.97
    assert changes <= 3


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_noise_changes_a_good_split_in_at_most_5_percent_of_trainings(ranks: int) -> None:
    """Windows have a standard deviation of 4 %: medians of 20 steps with 14 % each."""
    moved, speeds = 0, [1 + number % 3 for number in range(ranks)]
    for seed in range(100):
        source, balance = random.Random(seed), Rebalancer([30 * speed for speed in speeds])
        for _ in range(20):
            took = [
                1e-3 * share / speed for share, speed in zip(balance.split, speeds, strict=True)
            ]
            balance.observe([one * source.gauss(1, 0.04) for one in took])
        moved += balance.changes > 0
    assert moved <= 5


@given(seed=st.integers(0, 1000))
def test_many_windows_reveal_an_imbalance_as_small_as_the_noise_of_one(seed: int) -> None:
    source, balance = random.Random(seed), Rebalancer([160, 80])

    def times() -> list[float]:
        return [
            batch * per_sample
            for batch, per_sample in zip(balance.split, (1e-3, 2.16e-3), strict=True)
        ]

    for _ in range(30):
        balance.observe([time * source.uniform(0.96, 1.04) for time in times()])
    assert 240 / (1 / 1e-3 + 1 / 2.16e-3) / max(times()) >= 0.975
    assert balance.changes <= 2


@given(seed=st.integers(0, 1000))
def test_the_second_change_accounts_for_a_fixed_cost_per_step(seed: int) -> None:
    """Until a second batch size is measured, all time seems proportional to the batch."""
    source, balance = random.Random(seed), Rebalancer([192, 96])

    def times(speeds: list[float]) -> list[float]:
        return [
            5e-3 + 1e-3 * batch / speed for batch, speed in zip(balance.split, speeds, strict=True)
        ]

    for speeds in ([2.0, 1.0], [1.0, 2.0]):
        for _ in range(8):
            balance.observe([time * source.gauss(1, 0.002) for time in times(speeds)])
    assert (5e-3 + 96e-3) / max(times([1.0, 2.0])) >= 0.985
    assert balance.changes <= 3


def test_without_measured_times_a_batch_is_resized_in_the_current_proportions() -> None:
    balance = Rebalancer([40, 20])
    assert balance.observe([0.0, 0.1]) is None  # 0.0: the rank has not timed a step yet
    assert balance.resized(120) == [80, 40]
    balance.observe([0.08, 0.08])
    assert balance.resized(60) == [40, 20]
    assert balance.observe([0.0, 0.1]) is None
    assert balance.resized(120) == [80, 40]


@given(seed=st.integers(0, 1000))
def test_noise_that_all_ranks_share_hides_no_imbalance(seed: int) -> None:
    source, balance = random.Random(seed), Rebalancer([129, 77, 34])

    def times() -> list[float]:
        return [
            batch / speed for batch, speed in zip(balance.split, (584.0, 268.0, 116.0), strict=True)
        ]

    for _ in range(8):
        busy = source.uniform(1.0, 1.08)
        balance.observe([time * busy * source.gauss(1, 0.01) for time in times()])
    assert sum(balance.split) / (584 + 268 + 116) / max(times()) >= 0.95


@given(st.lists(st.floats(1e-4, 10.0), min_size=2, max_size=6), st.floats(0.001, 0.2))
def test_the_expected_largest_lies_between_the_largest_and_its_upper_bound(
    times: list[float], error: float
) -> None:
    found = expected_largest(times, error)
    assert found >= max(times) * (1 - 1e-3 * error)
    assert found <= max(times) * (
        1 + error * math.sqrt(2 * math.log(len(times)) + 1)
    )  # Boucheron et al. 2013, 2.5
    assert expected_largest(times, 0.0) == max(times)


@given(st.floats(1e-4, 10.0), st.floats(0.001, 0.2))
def test_the_expected_larger_of_two_equal_times_follows_the_closed_formula(
    time: float, error: float
) -> None:
    assert math.isclose(
        expected_largest([time, time], error), time * (1 + error / math.sqrt(math.pi)), rel_tol=1e-4
    )


def test_an_imbalance_pays_once_it_exceeds_the_noise() -> None:
    """At 5 % of noise, one window can't show that these ranks differ; eight can."""
    uneven, level = [1.04, 1.0], [1.02, 1.02]
    gains = [
        expected_largest(uneven, error) / expected_largest(level, error) - 1
        for error in (0.05, 0.05 / math.sqrt(8), 0)
    ]
    assert gains == sorted(gains)
    assert gains[0] < LEAST_GAIN / 2
    assert math.isclose(gains[-1], 1.04 / 1.02 - 1)


def test_a_planned_pace_is_kept() -> None:
    # The plan leaves the second device idle for half of each step: both are equally fast.
    balance = Rebalancer([40, 20], pace=[1.0, 0.5])
    for _ in range(4):
        assert balance.observe([0.4, 0.2]) is None
    # The first device becomes half as fast: it gets fewer samples, and twice the other's time.
    found = [balance.observe([0.8, 0.2]) for _ in range(4)]
    better = next(one for one in found if one is not None)
    assert "at the pace of the plan" in better[1]
    first, second = better[0]
    assert abs(first * 0.02 - 2 * second * 0.01) <= 0.03
