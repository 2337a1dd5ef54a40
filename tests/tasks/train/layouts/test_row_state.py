"""Rows of sharded layers go to the ranks that need them, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from group_changes import ThreadRanks
from hypothesis import given
from hypothesis import strategies as st
from layout_ranks import with_layout
from training_case import request

from trainwright.tasks.train.layouts import row_state
from trainwright.tasks.train.layouts.row_state import senders_of

TOTAL = 12
RANGES = st.tuples(st.integers(0, TOTAL), st.integers(0, TOTAL)).map(sorted)


@given(st.lists(RANGES, min_size=1, max_size=5))
def test_each_row_comes_once_from_a_rank_that_has_it(held: Sequence[Sequence[int]]) -> None:
    there = {row for begin, end in held for row in range(begin, end)}
    found = senders_of(held, TOTAL)
    if there != set(range(TOTAL)):
        assert found is None
        return
    assert found is not None
    assert [row for one in found for row in range(one.begin, one.end)] == list(range(TOTAL))
    for one in found:
        begin, end = held[one.rank]
        assert begin <= one.begin < one.end <= end


def test_moves_and_checkpoints_take_pieces_and_each_rank_keeps_its_rows_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_state, "PIECE_BYTES", 4000)  # of rows of 1728 bytes
    asked = request(tmp_path, [30, 20, 10], precision="fp64", optimizer={"name": "adamw"}, epochs=1)
    asked = with_layout(asked, {"out": "rows"}, {"out": [5, 2, 3]})
    ranks = ThreadRanks(asked, tmp_path)
    ranks.group(0, 1)
    ranks.steps(3)
    before = ranks.state()
    sizes: list[int] = []
    for one in ranks.all:
        sum_ = one.peers.sum_

        def counted(tensor: torch.Tensor, name: str, sum_=sum_) -> torch.Tensor:  # type: ignore[no-untyped-def]
            if name.startswith("rows ") and tensor.dtype == torch.int32:
                sizes.append(tensor.nbytes)
            return sum_(tensor, name)

        one.peers.sum_ = counted  # type: ignore[method-assign]
    ranks.group(0, 1, 2)
    held = ranks.each(lambda one: len(one.rank.model.out.weight))
    moments = ranks.each(lambda one: one.rank.optimizer.state[one.rank.model.out.weight]["exp_avg"])
    assert held == [len(one) for one in moments] == [5, 2, 3]
    after = ranks.state()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert len(sizes) > 10
    assert max(sizes) <= 4000
    ranks.each(lambda one: one.out())
