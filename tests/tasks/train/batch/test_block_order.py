"""The order of very many rows: each once, in blocks of neighbours, mixed within windows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.train.batch.block_order import MOST_BLOCK_ROWS, WINDOW_BYTES, BlockOrder
from trainwright.tasks.train.batch.sampling import MOST_PERMUTED, epoch_order

ROW_BYTES = st.sampled_from([1, 200, 4000, 70_000, WINDOW_BYTES // 8])


@given(
    rows=st.integers(1, 4000),
    row_bytes=ROW_BYTES,
    seed=st.integers(0, 2**31 - 1),
    begin=st.integers(0, 4000),
)
def test_an_epoch_has_every_row_once_and_any_part_of_it_is_the_same(
    rows: int, row_bytes: int, seed: int, begin: int
) -> None:
    numbers = np.arange(rows) * 3
    order = BlockOrder(numbers, seed, 1, row_bytes)
    whole = order[:]
    assert sorted(whole.tolist()) == numbers.tolist()
    assert np.array_equal(order[begin : begin + 50], whole[begin : begin + 50])
    for number in range(order.windows):
        window = order.window(number)
        end = window.begin + len(window.rows)
        assert np.array_equal(window.rows[window.order], whole[window.begin : end])
        assert order.window_of(window.begin) == order.window_of(end - 1) == number


def test_each_epoch_and_seed_has_its_own_order() -> None:
    orders = [BlockOrder(np.arange(3000), *one, 500)[:] for one in ((0, 0), (0, 1), (1, 0))]
    assert len({order.tobytes() for order in orders}) == 3
    following = BlockOrder(np.arange(3000), 0, 0, 500).following()
    assert np.array_equal(following[:], orders[1])


def test_a_batch_has_rows_from_everywhere() -> None:
    order = BlockOrder(np.arange(1 << 21), 0, 0, 120)
    batch = np.sort(order[5000:9096])
    # Uniform: a sixteenth of the rows has 256 ± 16 of 4,096; blocks of 128 rows add little.
    counts = np.bincount(batch >> 17, minlength=16)
    assert counts.min() > 170
    assert counts.max() < 350
    assert np.mean(np.diff(batch) == 1) < 3 * 4096 / (WINDOW_BYTES / 120)


def test_only_many_rows_are_in_blocks() -> None:
    assert isinstance(epoch_order(np.arange(100), 0, 0), np.ndarray)
    many = epoch_order(np.arange(MOST_PERMUTED + 1, dtype=np.int32), 0, 0, 100)
    assert isinstance(many, BlockOrder)
    window = np.sort(many.window(0).rows)
    assert np.mean(np.diff(window) == 1) > 1 - 2 / MOST_BLOCK_ROWS
