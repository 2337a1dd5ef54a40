"""Operations among any ranks, with parts of any sizes; ranks that do different things."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.train.exchange.collective import PeersLost
from trainwright.tasks.train.exchange.group_exchange import Exchange
from trainwright.tasks.train.exchange.member_sums import WHOLE_BYTES
from trainwright.tasks.train.exchange.peers import Peers
from trainwright.tasks.train.exchange.transfers import MessageOrder, UnlikeActions
from trainwright.tasks.train.worker_group import WorkerGroup

ORDERS: list[MessageOrder] = ["blocking", "started", "pairs"]
LARGE = WHOLE_BYTES // 8 + 3
"""float64 numbers of a sum in pieces"""


@pytest.fixture(autouse=True)
def _interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def on_ranks(count: int, work: Callable[[Exchange], Any], *, on_devices: bool = False) -> list[Any]:
    """The results of `work` on each rank, which are threads here; an error is a result."""
    folder = Path(tempfile.mkdtemp())
    group = WorkerGroup(
        generation=1,
        members=list(range(count)),
        rendezvous=str(folder / "sums"),
        transfers=str(folder / "transfers"),
        on_devices=on_devices,
    )
    ranks = [Peers("torch", 20.0) for _ in range(count)]

    def done(number: int) -> Any:
        try:
            ranks[number].join(group, number)
            return work(ranks[number])
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(count) as threads:
        try:
            return list(threads.map(done, range(count)))
        finally:
            for rank in ranks:
                rank.shutdown()
            shutil.rmtree(folder)


def tensor_of(rank: int, *shape: int, other: int = 0) -> torch.Tensor:
    """A rank's own tensor, for another rank."""
    chance = torch.Generator().manual_seed(100 * rank + other)
    return torch.randn(*shape, generator=chance, dtype=torch.float64)


class Operation(NamedTuple):
    """One operation of some ranks; `sizes` has rows by rank."""

    kind: str
    group: tuple[int, ...]
    sizes: tuple[int, ...]
    order: MessageOrder


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, list[Operation]]:
    """The number of ranks, and what they do, in an order that all keep."""
    count = draw(st.integers(1, 4))
    found = []
    for _ in range(draw(st.integers(1, 6))):
        group = tuple(sorted(draw(st.sets(st.integers(0, count - 1), min_size=1))))
        kind = draw(st.sampled_from(["sum", "gather", "exchange", "scatter-sum", "pair"]))
        rows = st.sampled_from([0, 1, 5, LARGE]) if kind == "sum" else st.integers(0, 6)
        sizes = tuple(draw(st.lists(rows, min_size=count, max_size=count)))
        order = draw(st.sampled_from(ORDERS[:2])) if kind != "pair" else "pairs"
        found.append(Operation(kind, group, sizes, order))
    return count, found


def begun(rank: Exchange, number: int, one: Operation) -> Callable[[], Any]:
    """Start an operation; a function with its result."""
    name, order = f"operation {number}", one.order
    own, group = rank.rank, one.group
    if one.kind == "sum":
        tensor = tensor_of(own, one.sizes[0])
        summed = rank.start_sum(tensor, name, group, order=order)
        return lambda: (rank.finish(summed), tensor)[1]
    if one.kind == "pair":
        # The first of the group sends to the last.
        if own == group[0] != group[-1]:
            sent = rank.start_send([tensor_of(own, one.sizes[own])], group[-1], name)
            return lambda: rank.finish(sent)
        if own == group[-1] != group[0]:
            came = rank.start_receive(group[0], name)
            return lambda: rank.finish(came)[0]
        return lambda: None
    if one.kind == "gather":
        tensors = [tensor_of(own, one.sizes[own], 2), torch.tensor(own)]
        gathered = rank.start_gather(tensors, name, group, order=order)
        return lambda: rank.finish(gathered)
    parts = [
        tensor_of(own, *((one.sizes[to], 2) if one.kind == "scatter-sum" else (own, to)), other=to)
        for to in group
    ]
    start: Any = rank.start_exchange if one.kind == "exchange" else rank.start_scatter_sum
    handle = start(parts, name, group, order=order)
    return lambda: rank.finish(handle)


def expected(rank: int, one: Operation) -> Any:
    if one.kind == "sum":
        # In pieces or whole, numbers are added in the order of ranks.
        total = torch.zeros(one.sizes[0], dtype=torch.float64)
        for member in one.group:
            total += tensor_of(member, one.sizes[0])
        return total
    if one.kind == "pair":
        is_last = rank == one.group[-1] != one.group[0]
        return tensor_of(one.group[0], one.sizes[one.group[0]]) if is_last else None
    if one.kind == "gather":
        return [[tensor_of(m, one.sizes[m], 2), torch.tensor(m)] for m in one.group]
    if one.kind == "exchange":
        return [tensor_of(m, m, rank, other=rank) for m in one.group]
    total = torch.zeros(one.sizes[rank], 2, dtype=torch.float64)
    for member in one.group:
        total += tensor_of(member, one.sizes[rank], 2, other=rank)
    return total


def same(one: Any, other: Any) -> bool:
    """Whether nested lists of tensors are equal bit by bit."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    return one is other


@settings(deadline=None, max_examples=40)
@given(programs(), st.integers(0, 1000))
def test_any_operations_of_any_groups_finished_in_any_order(
    program: tuple[int, list[Operation]], seed: int
) -> None:
    count, operations = program

    def work(rank: Exchange) -> list[Any]:
        mine = {number: one for number, one in enumerate(operations) if rank.rank in one.group}
        # Ranks keep the order among operations of one kind of order only.
        chance = random.Random(seed + rank.rank)
        open_ones: dict[int, Callable[[], Any]] = {}
        found: dict[int, Any] = {}
        queues = [
            [number for number, one in mine.items() if one.order == order] for order in ORDERS
        ]
        while any(queues):
            number = chance.choice([one for one in queues if one]).pop(0)
            open_ones[number] = begun(rank, number, mine[number])
        for number in chance.sample(list(open_ones), len(open_ones)):
            found[number] = open_ones[number]()
        return [found.get(number) for number in range(len(operations))]

    for rank, found in enumerate(on_ranks(count, work)):
        assert isinstance(found, list), found
        for one, came in zip(operations, found, strict=True):
            if rank in one.group:
                assert same(expected(rank, one), came), one


@pytest.mark.parametrize("group", [None, (0, 2)])
@pytest.mark.parametrize("size", [5, LARGE, 40 * LARGE])
def test_blocking_operations_in_float32_agree_to_the_last_digit(
    group: tuple[int, ...] | None, size: int
) -> None:
    def work(rank: Exchange) -> Any:
        if group is not None and rank.rank not in group:
            return None
        sums = [rank.sum_(tensor_of(rank.rank, size).float(), "sum", group) for _ in range(2)]
        part = [tensor_of(rank.rank, 3).float()] * (3 if group is None else 2)
        return sums, rank.scatter_sum(part, "part", group), rank.gather(part[:1], "all", group)

    first, *others = [one for one in on_ranks(3, work) if one is not None]
    assert all(same(first[0], other[0]) and same(first[2], other[2]) for other in others)
    assert torch.equal(first[0][0], first[0][1])


def test_neighbours_exchange_messages_with_several_under_way() -> None:
    def work(rank: Exchange) -> Any:
        if rank.rank == 0:
            sent = [rank.start_send([tensor_of(0, 3, other=n)], 1, f"part {n}") for n in range(4)]
            came = [rank.start_receive(1, f"gradient {n}") for n in range(4)]
            found = [rank.finish(one)[0] for one in reversed(came)]
            for one in sent:
                rank.finish(one)
            return found[::-1]
        for number in range(4):
            (rows,) = rank.receive(0, f"part {number}")
            rank.send([2 * rows], 0, f"gradient {number}")
        return None

    found = on_ranks(2, work)
    assert same(found[0], [2 * tensor_of(0, 3, other=number) for number in range(4)])


OTHER: dict[str, Callable[[Exchange], Any]] = {
    "another name": lambda rank: rank.gather([torch.zeros(2)], "rest"),
    "another operation": lambda rank: rank.sum_(torch.zeros(2), "rows"),
    "a large sum": lambda rank: rank.sum_(torch.zeros(4 * LARGE), "rows"),
    "another type": lambda rank: rank.gather([torch.zeros(2, dtype=torch.int64)], "rows"),
    "more tensors": lambda rank: rank.gather([torch.zeros(2), torch.zeros(2)], "rows"),
    "another width": lambda rank: rank.gather([torch.zeros(2, 3)], "rows"),
    "another group": lambda rank: rank.gather([torch.zeros(2)], "rows", (0, 1)),
}


@pytest.mark.parametrize("what", OTHER)
def test_ranks_that_do_different_things_raise_at_once(what: str) -> None:
    def work(rank: Exchange) -> Any:
        if rank.rank == 2:
            return None
        return OTHER[what](rank) if rank.rank == 1 else rank.gather([torch.zeros(2)], "rows")

    found = on_ranks(3 if what == "another group" else 2, work)
    assert isinstance(found[0], UnlikeActions)
    assert isinstance(found[1], UnlikeActions)


@pytest.mark.parametrize("size", [3, LARGE, 4 * LARGE])
@pytest.mark.parametrize("group", [None, (0, 1)])
def test_sums_of_unlike_sizes_raise_at_once(group: tuple[int, ...] | None, size: int) -> None:
    def work(rank: Exchange) -> Any:
        if group is None or rank.rank in group:
            return rank.sum_(torch.zeros(size + rank.rank, dtype=torch.float64), "rows", group)
        return None

    found = on_ranks(3, work)
    assert all(isinstance(one, UnlikeActions) for one in found[:2])


def test_another_step_is_not_this_one() -> None:
    def work(rank: Exchange) -> Any:
        rank.step = 7 + rank.rank
        return rank.gather([torch.zeros(2)], "rows")

    found = on_ranks(2, work)
    assert "rank 0 expects gather rows of step 7 from rank 1, which sent gather rows of step 8" in (
        str(found[0])
    )


def test_a_lost_rank_ends_every_operation_of_the_others() -> None:
    def work(rank: Exchange) -> Any:
        if rank.rank == 2:
            rank.shutdown()
            return None
        started = [
            rank.start_gather([torch.zeros(2)], "rows"),
            rank.start_sum(torch.zeros(4 * LARGE), "sum", (0, 1, 2)),
            rank.start_scatter_sum([torch.zeros(2)] * 3, "parts"),
            rank.start_receive(2, "message"),
        ]
        errors = []
        for one in started:
            with pytest.raises(PeersLost) as error:
                rank.finish(one)  # type: ignore[arg-type]
            errors.append(error)
        return len(errors)

    assert on_ranks(3, work)[:2] == [4, 4]


@pytest.mark.parametrize("group", [(), (1,), (1, 0), (0, 0), (0, 2)])
def test_a_group_is_ascending_and_has_the_rank(group: tuple[int, ...]) -> None:
    found = on_ranks(2, lambda rank: rank.rank or rank.gather([torch.zeros(1)], "rows", group))
    assert isinstance(found[0], ValueError)
    assert f"group: got {list(group)} on rank 0 of 2" in str(found[0])


def test_ranks_that_would_sum_on_gpus_sum_in_host_memory_what_is_there() -> None:
    def work(rank: Exchange) -> torch.Tensor:
        return rank.sum_(tensor_of(rank.rank, LARGE), "sum")

    found = on_ranks(2, work, on_devices=True)
    assert all(torch.equal(one, tensor_of(0, LARGE) + tensor_of(1, LARGE)) for one in found)


def test_a_rank_alone_gets_back_what_it_gives() -> None:
    alone, rows = Peers("torch"), tensor_of(0, 2, 3)
    assert torch.equal(alone.sum_(rows.clone(), "sum"), rows)
    assert same(alone.gather([rows], "rows"), [[rows]])
    assert same(alone.exchange([rows], "rows"), [rows])
    assert torch.equal(alone.scatter_sum([rows], "rows"), rows)
    with pytest.raises(ValueError, match="no connections"):
        alone.send([rows], 1, "rows")


def test_types_that_can_not_be_summed_are_refused() -> None:
    with pytest.raises(TrainingFailed, match="ranks can't sum bool"):
        Peers("torch").start_sum(torch.zeros(2, dtype=torch.bool), "sum")
