from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.train.batches import epoch_order, own_part, shares, steps_per_epoch

SPLITS = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(sum)


@given(rows=st.integers(1, 400), split=SPLITS, seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 1000))
def test_an_epoch_takes_every_row_exactly_once_whatever_the_split(
    rows: int, split: list[int], seed: int, epoch: int
) -> None:
    order = epoch_order(np.arange(rows) * 3, seed, epoch)
    taken = []
    for step in range(steps_per_epoch(rows, sum(split))):
        for rank in range(len(split)):
            part, total = own_part(order, step, split, rank)
            assert total == min(sum(split), rows - step * sum(split))
            taken += part.tolist()
    assert sorted(taken) == [3 * row for row in range(rows)]


@given(rows=st.integers(1, 300), split=SPLITS, data=st.data())
def test_an_epoch_takes_every_row_exactly_once_when_the_split_changes_within_it(
    rows: int, split: list[int], data: st.DataObject
) -> None:
    order, taken = epoch_order(np.arange(rows), 0, 0), []
    for step in range(steps_per_epoch(rows, sum(split))):
        now = data.draw(st.permutations(split))
        for rank in range(len(now)):
            taken += own_part(order, step, now, rank)[0].tolist()
    assert sorted(taken) == list(range(rows))


@given(count=st.integers(0, 500), split=SPLITS)
def test_shares_are_in_proportion_to_within_one_sample(count: int, split: list[int]) -> None:
    found = shares(count, split)
    assert sum(found) == count
    assert all(abs(part - count * share / sum(split)) < 1 for part, share in zip(found, split, strict=True))


@given(seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 100))
def test_the_order_of_an_epoch_depends_on_seed_and_epoch_alone(seed: int, epoch: int) -> None:
    rows = np.arange(64)
    assert epoch_order(rows, seed, epoch).tolist() == epoch_order(rows, seed, epoch).tolist()
    assert epoch_order(rows, seed, epoch).tolist() != epoch_order(rows, seed, epoch + 1).tolist()
