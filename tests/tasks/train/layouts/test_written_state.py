"""What each rank writes of a checkpoint that all ranks write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from group_changes import ThreadRank, ThreadRanks
from layout_ranks import whole_state
from test_resumed_layouts import asked_for

from trainwright.tasks.train.checkpoint.files import MODEL, OPTIMIZER


def trained(folder: Path, layout: str, count: int) -> ThreadRanks:
    ranks = ThreadRanks(asked_for(folder, layout, count), folder)
    ranks.group(*range(count))
    ranks.steps(2)
    return ranks


def test_a_stage_writes_only_tensors_that_it_holds_and_sends_none(tmp_path: Path) -> None:
    ranks = trained(tmp_path, "pipelines", 4)

    def written(one: ThreadRank) -> tuple[Any, set[str], list[str]]:
        sums, peers = list[str](), one.peers
        plain = peers.sum_

        def noted(tensor: torch.Tensor, name: str, group: Any = None) -> torch.Tensor:
            sums.append(name)
            return plain(tensor, name, group)

        peers.sum_ = noted  # type: ignore[method-assign]
        part = one.rank.written_state(range(4))
        held = {name for name, _, cut in one.rank._layout.parameters() if cut.rows_held}
        return part, held, sums

    found = ranks.each(written)
    for part, held, sums in found:
        stored = {name for name in part.get(MODEL, {}) if "num_batches" not in name}
        assert stored <= held
        assert not [name for name in sums if name.startswith("rows ")]
    model, optimizer = ranks.each(lambda one: whole_state(one.rank))[0]
    for file, whole in ((MODEL, model), (OPTIMIZER, optimizer)):
        names = [name for part, _, _ in found for name in part.get(file, {})]
        assert sorted(names) == sorted(whole)
        for part, _, _ in found:
            for name, one in part.get(file, {}).items():
                assert torch.equal(one, whole[name]), name
    assert all(MODEL in part for part, _, _ in found)
    ranks.each(lambda one: one.out())


@pytest.mark.parametrize("layout", ["pipelines with rows and factors", "sharded"])
def test_rows_of_several_ranks_are_written_whole_by_one(tmp_path: Path, layout: str) -> None:
    ranks = trained(tmp_path, layout, 3)
    parts = ranks.each(lambda one: one.rank.written_state(range(3)))
    whole = ranks.each(lambda one: whole_state(one.rank))
    for file, expected in ((MODEL, whole[0][0]), (OPTIMIZER, whole[0][1])):
        names = [name for part in parts for name in part.get(file, {})]
        assert sorted(names) == sorted(expected)
        for part in parts:
            for name, one in part.get(file, {}).items():
                assert torch.equal(one, expected[name]), name
    assert ranks.each(lambda one: one.rank.state_bytes())[0] == sum(
        one.nbytes for tensors in whole[0] for one in tensors.values()
    )
    ranks.each(lambda one: one.out())
