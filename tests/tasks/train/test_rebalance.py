from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.train.rebalance import MOST_CHANGES, Rebalancer


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


def test_an_even_split_over_devices_of_2_to_1_becomes_2_to_1() -> None:
    split, _ = settle([60, 60], [0.0, 0.0], [1e-3, 2e-3], 0.0, 0)
    assert split == [80, 40]


@given(
    slowness=st.lists(st.floats(1, 8), min_size=2, max_size=5),
    fixed=st.floats(0, 20e-3),
    seed=st.integers(0, 1000),
)
def test_the_split_settles_with_every_rank_at_work_and_all_samples_taken(
    slowness: list[float], fixed: float, seed: int
) -> None:
    start = [30] * len(slowness)
    split, changes = settle(start, [fixed * one for one in slowness], [1e-3 * one for one in slowness], 0.02, seed)
    assert sum(split) == sum(start)
    assert min(split) >= 1
    assert changes <= MOST_CHANGES


@given(seed=st.integers(0, 1000))
def test_noise_on_a_good_split_moves_nothing(seed: int) -> None:
    assert settle([80, 40], [0.0, 0.0], [1e-3, 2e-3], 0.04, seed) == ([80, 40], 0)
