"""A group that is aborted while it forms: its members leave at once, and can form another."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from trainwright.tasks.train.exchange import peers as peers_module
from trainwright.tasks.train.exchange.collective import PeersLost
from trainwright.tasks.train.exchange.peers import Peers
from trainwright.tasks.train.worker_group import WorkerGroup


def group(folder: Path, generation: int, members: list[int]) -> WorkerGroup:
    return WorkerGroup(
        generation=generation,
        members=members,
        rendezvous=str(folder / f"sums-{generation}"),
        transfers=str(folder / f"transfers-{generation}"),
    )


@pytest.mark.parametrize("lost_before", ["sums", "transfers"])
def test_a_rank_leaves_a_group_that_is_aborted_while_it_forms(
    tmp_path: Path, lost_before: str
) -> None:
    first, second, aborted = Peers("torch"), Peers("torch"), threading.Event()
    with ThreadPoolExecutor(2) as threads:
        if lost_before == "transfers":  # the other rank meets for sums, and no further
            only_sums = group(tmp_path, 1, [0, 1]).model_copy(update={"transfers": ""})
            threads.submit(second.join, only_sums, 1)
        waiting = threads.submit(first.join, group(tmp_path, 1, [0, 1]), 0, aborted.is_set)
        assert not waiting.done()
        aborted.set()
        with pytest.raises(PeersLost, match="the group was aborted while it formed"):
            waiting.result(peers_module.MEET_S / 2)
        for one in (first, second):
            one.leave()
        again = group(tmp_path, 2, [0, 1])
        for joined in [
            threads.submit(one.join, again, at) for at, one in enumerate((first, second))
        ]:
            joined.result(60)
        sums = [
            threads.submit(one.sum_, torch.tensor([1.0 + at]), "sum")
            for at, one in enumerate((first, second))
        ]
        assert [float(one.result(60)) for one in sums] == [3.0, 3.0]
        for left in [threads.submit(one.leave) for one in (first, second)]:
            left.result(60)


def test_a_late_connection_of_an_aborted_group_is_closed(tmp_path: Path) -> None:
    first, second = Peers("torch"), Peers("torch")
    with pytest.raises(PeersLost, match="aborted"):
        first.join(group(tmp_path, 1, [0, 1]), 0, lambda: True)
    first.leave()
    # The other member comes after that: it meets the thread that was left behind.

    def join_and_sum() -> None:
        second.join(group(tmp_path, 1, [0, 1]).model_copy(update={"transfers": ""}), 1)
        second.sum_(torch.ones(1), "sum")

    with pytest.raises(PeersLost):
        join_and_sum()
    second.leave()
