"""Messages between ranks: any shapes, in order, while ranks compute; unlike and lost ranks."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import FileStore

from trainwright.tasks.train.exchange.message_thread import MessageThread
from trainwright.tasks.train.exchange.transfers import Transfers, UnlikeActions


def on_ranks(
    folder: Path, count: int, work: Callable[[Transfers], Any], most_wait_s: float = 20.0
) -> list[Any]:
    """The results of `work` on each rank, which are threads here; an error is a result."""

    def begin(rank: int) -> Transfers:
        store = FileStore(str(folder / "store"), count)
        return Transfers(rank, count, store, "127.0.0.1", 10.0, most_wait_s)

    def done(rank: Transfers) -> Any:
        try:
            return work(rank)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(count) as threads:
        ranks = [one.result() for one in [threads.submit(begin, rank) for rank in range(count)]]
        try:
            return list(threads.map(done, ranks))
        finally:
            for rank in ranks:
                rank.close()


def tensor_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    chance = torch.Generator().manual_seed(rank)
    return torch.randint(0, 2, shape, generator=chance).to(dtype)


def to_all(
    rank: Transfers, name: str, tensors: list[torch.Tensor], step: int = 0, **how: Any
) -> Any:
    others = [one for one in range(rank.size) if one != rank.rank]
    return rank.begin(name, step, dict.fromkeys(others, tensors), others, **how)


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_ranks_gather_tensors_of_any_type_and_length(tmp_path: Path, count: int) -> None:
    def mine(rank: int) -> list[torch.Tensor]:
        rows = [0, 3, 1, 70_000][rank % 4]
        return [tensor_of(rank, (rows, 5), dtype) for dtype in DTYPES] + [torch.tensor(float(rank))]

    def work(rank: Transfers) -> Any:
        return rank.finish(to_all(rank, "rows", mine(rank.rank)))

    for rank, found in enumerate(on_ranks(tmp_path, count, work)):
        assert set(found) == set(range(count)) - {rank}
        for source, tensors in found.items():
            for one, expected in zip(tensors, mine(source), strict=True):
                assert one.dtype == expected.dtype
                assert torch.equal(one, expected)


def test_a_transposed_tensor_arrives_as_it_is(tmp_path: Path) -> None:
    table = torch.arange(12.0).view(3, 4).t()
    found = on_ranks(tmp_path, 2, lambda rank: rank.finish(to_all(rank, "table", [table])))
    assert torch.equal(found[0][1][0], table)


def test_one_element_of_a_column_arrives(tmp_path: Path) -> None:
    column = torch.arange(3.0).view(1, 3)[:, 1]
    assert column.stride() == (3,)
    found = on_ranks(tmp_path, 2, lambda rank: rank.finish(to_all(rank, "column", [column])))
    assert torch.equal(found[0][1][0], column)


def test_started_transfers_arrive_while_others_block_and_keep_their_order(tmp_path: Path) -> None:
    def work(rank: Transfers) -> Any:
        started = [
            to_all(rank, f"early {number}", [torch.full((5,), float(number))], order="started")
            for number in range(3)
        ]
        # Ranks end the blocking ones at different points between the started ones.
        if rank.rank:
            time.sleep(0.05)
        blocking = rank.finish(to_all(rank, "now", [torch.tensor(rank.rank)]))
        early = [rank.finish(one) for one in started]
        return blocking, early

    for rank, (blocking, early) in enumerate(on_ranks(tmp_path, 2, work)):
        assert int(blocking[1 - rank][0]) == 1 - rank
        assert [float(one[1 - rank][0][0]) for one in early] == [0.0, 1.0, 2.0]


def test_a_transfer_goes_on_while_the_receiver_computes(tmp_path: Path) -> None:
    large = torch.ones(4_000_000)  # more than any socket buffer

    def work(rank: Transfers) -> Any:
        if rank.rank == 0:
            rank.begin("large", 0, {1: [large]}, [])
            return float(rank.finish(rank.begin("answer", 0, {}, [1]))[1][0])
        # Rank 0 has sent all of it once this rank's own thread has taken it.
        handle = rank.begin("large", 0, {}, [0])
        until = time.monotonic() + 10
        while not rank._arrived and time.monotonic() < until:
            time.sleep(0.01)
        arrived = len(rank._arrived)
        rank.begin("answer", 0, {0: [rank.finish(handle)[0][0].sum()]}, [])
        return arrived

    assert on_ranks(tmp_path, 2, work) == [4_000_000.0, 1]


@pytest.mark.parametrize(("name", "step"), [("outputs fc2", 7), ("outputs fc1", 8)])
def test_ranks_that_do_different_things_say_so_at_once(
    tmp_path: Path, name: str, step: int
) -> None:
    def work(rank: Transfers) -> Any:
        what = ("outputs fc1", 7) if rank.rank == 0 else (name, step)
        return rank.finish(to_all(rank, what[0], [torch.zeros(2)], step=what[1]))

    found = on_ranks(tmp_path, 2, work)
    assert all(isinstance(one, UnlikeActions) for one in found)
    assert (
        f"rank 0 expects outputs fc1 of step 7 from rank 1, which sent {name} of step {step}"
        in (str(found[0]))
    )


def test_a_lost_rank_ends_the_wait_of_the_others(tmp_path: Path) -> None:
    def work(rank: Transfers) -> Any:
        if rank.rank == 0:
            rank.close()
            return None
        return rank.finish(to_all(rank, "rows", [torch.zeros(2)]))

    found = on_ranks(tmp_path, 2, work)
    assert isinstance(found[1], OSError)
    assert re.search("rank 0: .*(closed its connection|reset by peer|Broken pipe)", str(found[1]))


def test_a_silent_rank_ends_the_wait_after_the_timeout(tmp_path: Path) -> None:
    def work(rank: Transfers) -> Any:
        if rank.rank == 0:
            time.sleep(1.0)
            return None
        return rank.finish(to_all(rank, "rows", [torch.zeros(2)]))

    assert isinstance(on_ranks(tmp_path, 2, work, most_wait_s=0.3)[1], TimeoutError)


def test_a_message_that_does_not_fit_into_memory_ends_the_wait() -> None:
    one, other = socket.socketpair()
    lost: list[str] = []
    gone = threading.Event()

    def lose(_: int, why: str) -> None:
        lost.append(why)
        gone.set()

    thread = MessageThread({1: one}, lambda *_: None, lose)
    header = json.dumps({"bytes": 1 << 60}).encode()
    other.sendall(struct.pack("!I", len(header)) + header)
    assert gone.wait(20)
    thread.close()
    other.close()
    assert lost == ["its message does not fit into memory"]
    assert thread.out_of_memory
