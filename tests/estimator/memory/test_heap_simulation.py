"""A step simulated on the model of the heap: lifetimes, and the order of events."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from trainwright.estimator.curves import Affine
from trainwright.estimator.lifetimes import Lifetimes
from trainwright.estimator.memory.heap_simulation import MOST_BLOCKS, high_water_bytes

_MIB = 2**20
_PLANS = st.lists(st.tuples(st.integers(1, 64 * _MIB), st.integers(0, 30)), max_size=60)


def _codes(plan: list[tuple[int, int]], begin: int = 0) -> tuple[int, ...]:
    """Blocks of different sizes; each is freed after a number of later ones, or at the end."""
    codes: list[int] = []
    ends: dict[int, list[int]] = {}
    for number, (_, lasts) in enumerate(plan):
        codes += [-1 - begin - one for one in ends.pop(number, [])]
        codes.append(number)
        ends.setdefault(min(len(plan), number + 1 + lasts), []).append(number)
    return (*codes, *(-1 - begin - one for late in ends.values() for one in late))


def _fixed(sizes: list[int]) -> tuple[Affine, ...]:
    return tuple(Affine(fixed=size, per_sample=0.0) for size in sizes)


def _most_live(lifetimes: Lifetimes) -> float:
    live: dict[int, float] = {}
    most = 0.0
    for number, code, sign in zip(*(one.tolist() for one in lifetimes.events()), strict=True):
        if sign > 0:
            live[number] = lifetimes.sizes[code](1)
        elif sign < 0:
            del live[number]
        most = max(most, sum(live.values()))
    return most


@given(_PLANS.filter(bool), _PLANS, st.integers(0, 3))
def test_live_bytes_are_resident(
    start: list[tuple[int, int]], step: list[tuple[int, int]], seed: int
) -> None:
    sizes = _fixed([size for size, _ in start + step])
    moved = tuple(code + len(start) if code >= 0 else code for code in _codes(step, len(start)))
    graph = (len(_codes(start)), len(_codes(start)) + len(step), len(_codes(start)) + len(moved))
    lifetimes = Lifetimes(sizes=sizes, start=_codes(start), step=moved, graphs=((0, 1, 1), graph))
    spare = _MIB  # what fits into holes that were there before
    (most,) = high_water_bytes(lifetimes, 1, [], [seed])
    assert most >= _most_live(lifetimes) - spare


def test_simulations_differ_only_by_their_seed() -> None:
    plan = [(size * 50_000, size % 7) for size in range(1, 60)]
    lifetimes = Lifetimes(
        sizes=_fixed([size for size, _ in plan]),
        start=(),
        step=_codes(plan),
        graphs=((0, 40, 100),),
    )
    played = high_water_bytes(lifetimes, 1, [], [0, 1, 2, 0])
    assert played[0] == played[3]
    assert len(set(played)) > 1


def test_autograds_objects_prevent_holes_from_merging() -> None:
    """Growing blocks, each freed after the next is made: a merged hole would fit the one after."""
    plan = [(40_000 + 4_000 * number, 1) for number in range(100)]
    forward_only = Lifetimes(sizes=_fixed([size for size, _ in plan]), start=(), step=_codes(plan))
    graph = forward_only.model_copy(update={"graphs": ((0, 200, 200),)})
    plain, kept = (
        statistics.median(high_water_bytes(one, 1, [], range(8))) for one in (forward_only, graph)
    )
    assert kept > 1.5 * plain


@pytest.mark.parametrize("size", [65_536, 40 * _MIB], ids=["on the heap", "mapped"])
def test_objects_that_the_first_step_leaves_are_resident(size: int) -> None:
    start = tuple([0] * 50)
    lifetimes = Lifetimes(sizes=_fixed([size]), start=start, step=())
    (without,), (beside,) = (
        high_water_bytes(lifetimes, 1, [], [0], lasting) for lasting in (0.0, 8.0 * _MIB)
    )
    assert 6 * _MIB < beside - without < 9 * _MIB  # a part finds holes that were there before


@pytest.mark.parametrize("start", [(0,), (0, 0)], ids=["all ends", "one stays"])
def test_storages_from_before_the_first_step_are_freed_once(start: tuple[int, ...]) -> None:
    lifetimes = Lifetimes(
        sizes=_fixed([_MIB]), start=start, step=(-1,)
    )  # like a cache that the second pass empties
    (most,) = high_water_bytes(lifetimes, 1, [], [0])
    assert len(start) * _MIB <= most < (len(start) + 1) * _MIB


def test_events_name_each_storage_and_the_code_that_made_it() -> None:
    lifetimes = Lifetimes(
        sizes=(Affine(fixed=0.0, per_sample=10.0), Affine(fixed=7.0, per_sample=0.0)),
        start=(0, 1),  # a parameter and its gradient
        step=(
            -2,
            2,
            1,
            0,
            -4,
        ),  # the gradient ends; a workspace; a gradient; an activation, which ends
    )
    events = list(zip(*(one.tolist() for one in lifetimes.events()), strict=True))
    assert events == [
        (0, 0, 1),
        (1, 1, 1),
        (1, 1, -1),
        (-1, 2, 0),
        (2, 1, 1),
        (3, 0, 1),
        (3, 0, -1),
    ]
    assert lifetimes.successors() == {1: 2}


def test_the_next_step_frees_what_a_step_leaves() -> None:
    """A parameter and its gradient; each step frees the gradient and makes another.

    Blocks of this size are mapped, so that no holes of the heap add to them.
    """
    size = 64 * _MIB
    lifetimes = Lifetimes(sizes=_fixed([size]), start=(0, 0), step=(-2, 0))
    assert lifetimes.successors() == {1: 2}
    (most,) = high_water_bytes(lifetimes, 1, [], [0])
    assert 2 * size <= most < 2.1 * size


@given(_PLANS)
def test_small_blocks_count_with_their_size(plan: list[tuple[int, int]]) -> None:
    sizes = [size % 200 + 1 for size, _ in plan]
    lifetimes = Lifetimes(sizes=_fixed(sizes), start=(), step=_codes(plan))
    assert high_water_bytes(lifetimes, 1, [], [0]) == [_most_live(lifetimes)]


@pytest.mark.parametrize("live", [1, 3 * MOST_BLOCKS])
def test_more_equal_blocks_than_are_simulated_all_count(live: int) -> None:
    """Like those of a loop over time steps; each is freed at once, or all at the end."""
    count = 3 * MOST_BLOCKS
    each = [code for number in range(count) for code in (0, -1 - number)]
    lifetimes = Lifetimes(
        sizes=_fixed([_MIB]),
        start=(),
        step=tuple(each) if live == 1 else (*[0] * count, *(-1 - one for one in range(count))),
    )
    (held,) = high_water_bytes(lifetimes, 1, [], [0])
    assert live * _MIB <= held < 1.1 * live * _MIB + 8 * _MIB


def test_the_largest_of_many_blocks_are_simulated() -> None:
    plan = [(4096 + number, 0) for number in range(3 * MOST_BLOCKS)] + [(8 * _MIB, 0)]
    lifetimes = Lifetimes(sizes=_fixed([size for size, _ in plan]), start=(), step=_codes(plan))
    (most,) = high_water_bytes(lifetimes, 1, [], [0])
    assert 8 * _MIB <= most < 18 * _MIB


@pytest.mark.parametrize(
    ("start", "step"),
    [((0,), (-2,)), ((0,), (-1, -1)), ((1,), ()), ((), (-1, 0))],
    ids=["never made", "ended twice", "a start of workspaces", "made later"],
)
def test_lifetimes_of_missing_storages_are_refused(
    start: tuple[int, ...], step: tuple[int, ...]
) -> None:
    with pytest.raises(ValidationError, match="lifetimes: "):
        Lifetimes(sizes=(Affine(fixed=8.0, per_sample=0.0),), start=start, step=step)
