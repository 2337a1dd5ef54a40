"""The model of glibc's heap: what blocks keep resident."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trainwright.estimator.curves import Affine
from trainwright.estimator.heap import Heap
from trainwright.estimator.heap import high_water_bytes as high_water_of_arrays
from trainwright.estimator.structure import Lifetimes

_MIB = 2**20
_PLANS = st.lists(st.tuples(st.integers(1, 64 * _MIB), st.integers(0, 30)), max_size=60)


def _events(plan: list[tuple[int, int]]) -> list[tuple[int, float | None]]:
    """Blocks in their order; each ends once so many more were made."""
    events: list[tuple[int, float | None]] = []
    ends: dict[int, list[int]] = {}
    for number, (size, lasts) in enumerate(plan):
        events += [(one, None) for one in ends.pop(number, [])]
        events.append((number, size))
        ends.setdefault(number + 1 + lasts, []).append(number)
    return events


def high_water_bytes(events: Sequence[tuple[int, float | None]], least: float, behind: int) -> float:
    """Of (number, bytes) where a block is made, (number, None) where it is freed."""
    made = {number: size for number, size in events if size is not None}
    sizes = [-made[number] if size is None else size for number, size in events]
    numbers = np.array([number for number, _ in events], dtype=np.int64)
    return high_water_of_arrays(numbers, np.array(sizes, dtype=np.float64), least, lambda: behind)


def _most_live(events: list[tuple[int, float | None]]) -> float:
    live: dict[int, float] = {}
    most = 0.0
    for number, size in events:
        if size is None:
            del live[number]
        else:
            live[number] = size
            most = max(most, sum(live.values()))
    return most


@given(_PLANS, st.integers(0, 8), st.sampled_from((1024.0, 1e6)))
def test_no_less_is_resident_than_is_alive(plan: list[tuple[int, int]], behind: int, least: float) -> None:
    events = _events(plan)
    assert high_water_bytes(events, least, behind) >= _most_live(events)


@given(st.lists(st.tuples(st.integers(1024, 64 * _MIB), st.booleans()), max_size=60))
def test_chunks_never_overlap(plan: list[tuple[int, bool]]) -> None:
    heap, alive = Heap(), list[tuple[int, int]]()
    for size, ends in plan:
        chunk, cut = heap.allocate(size)
        if chunk[0] >= 0:
            assert chunk[1] >= size
            assert (chunk[0] + 16) % 64 == 0
        alive += [one for one in (chunk, *cut) if one[0] >= 0]
        placed = sorted(alive)
        assert all(place + size <= after for (place, size), (after, _) in itertools.pairwise(placed))
        if ends and alive:
            heap.free(*alive.pop(0))


def test_a_block_that_ends_before_the_next_of_its_size_leaves_its_room_unless_its_ends_are_in_use() -> None:
    turns = [(number, size) for number in range(40) for size in (float(_MIB // 2), None)]
    assert high_water_bytes(turns, 1024.0, 0) < 1.5 * _MIB
    kept = [(0, float(_MIB // 2)), (1, 2000.0), (0, None), (2, float(_MIB // 2)), (2, None)]
    assert high_water_bytes(kept, 1024.0, 1) >= _MIB


def test_large_blocks_are_given_back() -> None:
    turns = [(number, size) for number in range(5) for size in (40.0 * _MIB, None)]
    assert high_water_bytes(turns, 1024.0, 1) < 41 * _MIB


def test_what_a_step_leaves_takes_the_place_of_what_it_found() -> None:
    lifetimes = Lifetimes(
        sizes=(Affine(fixed=0.0, per_sample=10.0), Affine(fixed=7.0, per_sample=0.0)),
        start=(0, 1),  # a parameter and its gradient
        step=(-2, 2, 1, 0, -4),  # the gradient ends; a workspace; a gradient; an activation, which ends
    )
    numbers, sizes = lifetimes.events(3, [5.0], steps=2)
    events = list(zip(numbers.tolist(), sizes.tolist(), strict=True))
    assert events[:2] == [(0, 30.0), (1, 7.0)]
    first, second = events[2:8], events[8:]
    assert first == [(1, -7.0), (-1, 5.0), (-1, -5.0), (2, 7.0), (3, 30.0), (3, -30.0)]
    assert second == [(2, -7.0), (-1, 5.0), (-1, -5.0), (4, 7.0), (5, 30.0), (5, -30.0)]


@given(_PLANS, st.integers(1, 5))
def test_steps_played_on_and_on_end_what_they_make(plan: list[tuple[int, int]], steps: int) -> None:
    codes = tuple(number if size is not None else -1 - number for number, size in _events(plan))
    kept = Lifetimes(sizes=tuple(Affine(fixed=size, per_sample=0.0) for size, _ in plan), start=(), step=codes)
    numbers, sizes = kept.events(1, [], steps)
    made = numbers[sizes > 0].tolist()
    assert len(made) == len(set(made)) == steps * len(plan)


@pytest.mark.parametrize(
    ("start", "step"),
    [((0,), (-2,)), ((0,), (-1, -1)), ((1,), ()), ((), (-1, 0))],
    ids=["never made", "ended twice", "a start of workspaces", "made later"],
)
def test_lifetimes_of_storages_that_are_not_there_are_refused(start: tuple[int, ...], step: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match="lifetimes: "):
        Lifetimes(sizes=(Affine(fixed=8.0, per_sample=0.0),), start=start, step=step)
