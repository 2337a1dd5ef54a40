"""Sums by torch.distributed: small and large, early and blocking; and sums with a lost rank."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright.tasks.train.exchange import collective
from trainwright.tasks.train.exchange.collective import PeersLost, TorchCollective, take_from_first
from trainwright.tasks.train.exchange.mesh import LABEL, SMALL_BYTES, Mesh
from trainwright.tasks.train.exchange.transfers import UnlikeActions

SIZES = [0, 1, 7, SMALL_BYTES // 8 // 3, SMALL_BYTES // 8 // 3 + 1, 5 * SMALL_BYTES // 8]


def on_ranks(folder: Path, count: int, work: Callable[[TorchCollective], Any]) -> list[Any]:
    """The results of `work` on each of `count` ranks, which are threads here."""
    with ThreadPoolExecutor(count) as threads:
        made = [
            threads.submit(TorchCollective, rank, count, str(folder / "meeting"))
            for rank in range(count)
        ]
        ranks = [one.result() for one in made]
        found = [threads.submit(work, rank) for rank in ranks]
        try:
            return [one.result() for one in found]
        finally:
            for rank in ranks:
                rank.shutdown()


def given(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A rank's own tensor."""
    chance = torch.Generator().manual_seed(1000 * rank + size)
    return torch.randint(-99, 99, (size,), generator=chance).to(dtype)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64])
def test_every_rank_gets_the_sum_of_all_for_any_size(
    tmp_path: Path, count: int, dtype: torch.dtype
) -> None:
    def work(rank: TorchCollective) -> list[torch.Tensor]:
        return [rank.sum_(given(rank.rank, size, dtype), "sum") for size in SIZES]

    for found in on_ranks(tmp_path, count, work):
        for size, one in zip(SIZES, found, strict=True):
            assert torch.equal(one, sum(given(rank, size, dtype) for rank in range(count)))


@pytest.mark.parametrize("piece_bytes", [8, 64, 1 << 26])
def test_take_from_first_copies_tensors_exactly_in_any_number_of_pieces(
    tmp_path: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "PIECE_BYTES", piece_bytes)

    def work(rank: TorchCollective) -> list[torch.Tensor]:
        chance = torch.Generator().manual_seed(rank.rank)
        own = [
            torch.randn(5, 7, generator=chance),
            torch.tensor(rank.rank),
            torch.randn(3, generator=chance).double(),
        ]
        own.append(torch.full((11,), rank.rank, dtype=torch.uint8))
        take_from_first(rank, own, "state", source=1)
        return own

    first, source, last = on_ranks(tmp_path, 3, work)
    assert int(source[1]) == 1
    for found in (first, last):
        assert all(torch.equal(one, other) for one, other in zip(found, source, strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_the_last_digit_of_a_sum_is_the_same_on_every_rank(tmp_path: Path, size: int) -> None:
    def work(rank: TorchCollective) -> torch.Tensor:
        return rank.sum_(
            torch.randn(size, generator=torch.Generator().manual_seed(rank.rank)), "sum"
        )

    first, *others = on_ranks(tmp_path, 4, work)
    assert all(torch.equal(first, other) for other in others)


def test_early_sums_may_start_at_any_point_between_blocking_sums(tmp_path: Path) -> None:
    def work(rank: TorchCollective) -> list[torch.Tensor]:
        early = [given(rank.rank, size, torch.float64) for size in SIZES]
        handles, blocking = [], []
        for at in range(len(SIZES)):
            if rank.rank != 1:
                handles.append(rank.start_sum(early[at], "early"))
            blocking.append(rank.sum_(torch.full((2, 3), float(rank.rank)), "blocking"))
        if rank.rank == 1:
            handles = [rank.start_sum(one, "early") for one in early]
        for handle in handles:
            rank.finish(handle)
        return [*early, *blocking]

    expected = [
        *(sum(given(rank, size, torch.float64) for rank in range(3)) for size in SIZES),
        *([torch.full((2, 3), 3.0)] * len(SIZES)),
    ]
    for found in on_ranks(tmp_path, 3, work):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_any_number_of_small_sums_may_be_finished_in_any_order(tmp_path: Path) -> None:
    sizes = [SMALL_BYTES // 8 // 3 // 2] * 5  # two of them fit into the kernel's buffers

    def work(rank: TorchCollective) -> list[torch.Tensor]:
        tensors = [given(rank.rank, size, torch.float64) + at for at, size in enumerate(sizes)]
        handles = [rank.start_sum(one, "early") for one in tensors]
        for handle in reversed(handles):
            rank.finish(handle)
        return tensors

    for found in on_ranks(tmp_path, 3, work):
        for at, one in enumerate(found):
            assert torch.equal(
                one, sum(given(rank, sizes[at], torch.float64) + at for rank in range(3))
            )


def test_connections_of_other_clients_are_rejected_at_the_rendezvous() -> None:
    from torch.distributed import HashStore

    strangers = []

    class StrangersStore(HashStore):  # type: ignore[misc]
        """A store that makes other clients connect to each rank's port first."""

        def set(self, key: str, value: str) -> None:
            for text in (b"", b"GET / HTTP/1.0\r\nHost: here\r\n\r\n", secrets.token_bytes(20)):
                stranger = socket.create_connection(("127.0.0.1", int(value.split(" ")[1])))
                stranger.sendall(text)
                strangers.append(stranger)
            super().set(key, value)

    store = StrangersStore()
    with ThreadPoolExecutor(3) as threads:
        made = [threads.submit(Mesh, rank, 3, store, "127.0.0.1", 8.0, 60.0) for rank in range(3)]
        meshes = [one.result() for one in made]
        tensors = [given(rank, 9, torch.float64) for rank in range(3)]
        list(
            threads.map(
                lambda mesh, tensor: mesh.finish(mesh.begin(tensor, "sum")), meshes, tensors
            )
        )
    for one in [*strangers, *meshes]:
        one.close()
    assert all(
        torch.equal(one, sum(given(rank, 9, torch.float64) for rank in range(3))) for one in tensors
    )


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("parts", [1, 7])
def test_all_permitted_sums_fit_into_the_kernels_buffers_before_anyone_reads(
    ranks: int, parts: int
) -> None:
    from torch.distributed import HashStore

    store = HashStore()
    with ThreadPoolExecutor(ranks) as threads:
        made = [
            threads.submit(Mesh, rank, ranks, store, "127.0.0.1", 60.0, 60.0)
            for rank in range(ranks)
        ]
        meshes = [one.result() for one in made]
        count = (SMALL_BYTES // ranks // parts - LABEL.size) // 8
        begun: list[list[Any]] = [[] for _ in meshes]
        # In one thread: if sending had to wait for a reader, it would wait for ever.
        for rank, mesh in enumerate(meshes):
            while mesh.takes(tensor := given(rank, count, torch.float64)):
                begun[rank].append(mesh.begin(tensor, "sum"))
        list(threads.map(lambda mesh, own: [mesh.finish(one) for one in own], meshes, begun))
    for mesh in meshes:
        mesh.close()
    assert {len(own) for own in begun} == {parts}
    expected = sum(given(rank, count, torch.float64) for rank in range(ranks))
    assert all(torch.equal(one.tensor, expected) for own in begun for one in own)


def test_waiting_for_a_rank_that_never_connects_times_out() -> None:
    from torch.distributed import HashStore

    with pytest.raises(OSError, match="timed out"):
        Mesh(0, 2, HashStore(), "127.0.0.1", 0.2, 1.0)


@pytest.mark.parametrize("size", [3, 5 * SMALL_BYTES])
def test_a_sum_with_a_rank_that_is_gone_raises_peers_lost(tmp_path: Path, size: int) -> None:
    def work(rank: TorchCollective) -> str:
        if rank.rank == 1:
            rank.shutdown()
            return "gone"
        try:
            rank.sum_(torch.ones(size), "sum")
        except PeersLost as error:
            return str(error)
        return "a sum"

    first, second = on_ranks(tmp_path, 2, work)
    assert second == "gone"
    assert "torch.distributed" in first


@pytest.mark.parametrize("size", [3, 5 * SMALL_BYTES])
@pytest.mark.parametrize("other", ["name", "size", "type"])
def test_ranks_that_sum_different_things_raise_at_once(
    tmp_path: Path, size: int, other: str
) -> None:
    def work(rank: TorchCollective) -> str:
        last = rank.rank == 1
        dtype = torch.float64 if last and other == "type" else torch.float32
        tensor = torch.ones(size + (last and other == "size"), dtype=dtype)
        with pytest.raises(UnlikeActions) as error:
            rank.sum_(tensor, "mean" if last and other == "name" else "sum")
        return str(error.value)

    first, _ = on_ranks(tmp_path, 2, work)
    assert f"rank 0 sums {size} float32 of sum, and rank 1 sums " in first
