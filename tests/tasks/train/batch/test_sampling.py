from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.train.batch.sampling import (
    epoch_order,
    own_places,
    samples_after,
    shares,
    split_among,
    steps_left,
    steps_per_epoch,
)

SPLITS = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(sum)


@given(
    rows=st.integers(1, 400),
    split=SPLITS,
    seed=st.integers(0, 2**31 - 1),
    epoch=st.integers(0, 1000),
)
def test_an_epoch_takes_every_row_exactly_once_for_any_split(
    rows: int, split: list[int], seed: int, epoch: int
) -> None:
    order = epoch_order(np.arange(rows) * 3, seed, epoch)
    taken = []
    for step in range(steps_per_epoch(rows, sum(split))):
        for rank in range(len(split)):
            places, total = own_places(rows, step * sum(split), split, rank)
            assert total == min(sum(split), rows - step * sum(split))
            taken += order[slice(*places)].tolist()
    assert sorted(taken) == [3 * row for row in range(rows)]


@given(rows=st.integers(1, 300), splits=st.lists(SPLITS, min_size=1, max_size=8))
def test_an_epoch_takes_every_row_exactly_once_if_split_and_batch_change_within_it(
    rows: int, splits: list[list[int]]
) -> None:
    order, taken, begin = epoch_order(np.arange(rows), 0, 0), [], 0
    for split in itertools.cycle(splits):
        for rank in range(len(split)):
            places, total = own_places(rows, begin, split, rank)
            taken += order[slice(*places)].tolist()
        begin += total
        if begin == rows:
            break
    assert taken == order.tolist()


@given(
    rows=st.integers(1, 200),
    batch=st.integers(1, 90),
    epochs=st.integers(1, 5),
    step=st.integers(0, 2000),
)
def test_samples_and_steps_agree_for_a_constant_batch(
    rows: int, batch: int, epochs: int, step: int
) -> None:
    batch = min(batch, rows)
    whole = epochs * steps_per_epoch(rows, batch)
    step = min(step, whole)
    samples = samples_after(step, rows, batch)
    assert step + steps_left(samples, rows, epochs, batch) == whole
    assert (samples == rows * epochs) == (step == whole)


@given(count=st.integers(0, 500), split=SPLITS)
def test_shares_are_in_proportion_to_within_one_sample(count: int, split: list[int]) -> None:
    found = shares(count, split)
    assert sum(found) == count
    assert all(
        abs(part - count * share / sum(split)) < 1 for part, share in zip(found, split, strict=True)
    )


@given(seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 100))
def test_the_order_of_an_epoch_depends_on_seed_and_epoch_alone(seed: int, epoch: int) -> None:
    rows = np.arange(64)
    assert epoch_order(rows, seed, epoch).tolist() == epoch_order(rows, seed, epoch).tolist()
    assert epoch_order(rows, seed, epoch).tolist() != epoch_order(rows, seed, epoch + 1).tolist()


WEIGHTS = st.lists(st.integers(1, 50), min_size=1, max_size=6)


@given(weights=WEIGHTS, total=st.integers(1, 500), data=st.data())
def test_the_members_share_the_whole_batch_within_their_limits_or_get_none(
    weights: list[int], total: int, data: st.DataObject
) -> None:
    members = sorted(data.draw(st.sets(st.integers(0, len(weights) - 1), min_size=1)))
    limits = data.draw(st.dictionaries(st.sampled_from(members), st.integers(0, 300)))
    split = split_among(total, members, weights, limits)
    held = [limits.get(number, total) for number in members]
    if sum(min(limit, total) for limit in held) < total:
        assert split is None
    else:
        assert split is not None
        assert sum(split) == total
        assert all(split[number] <= limit for number, limit in zip(members, held, strict=True))
        assert all(split[number] == 0 for number in set(range(len(weights))) - set(members))


@given(weights=WEIGHTS, factor=st.integers(1, 9))
def test_without_limits_the_split_follows_the_weights(weights: list[int], factor: int) -> None:
    total = sum(weights) * factor
    split = split_among(total, range(len(weights)), weights)
    assert split is not None
    assert all(
        abs(size - weight * factor) <= len(weights)
        for size, weight in zip(split, weights, strict=True)
    )
