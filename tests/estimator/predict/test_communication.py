"""Collectives over a link: the laws of their equations, and the fit to measured all-reduces."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.estimator.curves import Interval
from trainwright.estimator.errors import BadInput
from trainwright.estimator.predict.communication import (
    Link,
    all_gather,
    all_reduce,
    all_reduces,
    broadcast,
    fit_link,
    on_cycle,
    point_to_point,
)

LINKS = st.builds(
    Link,
    bandwidth_bytes_per_s=st.floats(1e6, 1e12),
    latency_s=st.floats(1e-7, 1e-1),
    spread=st.floats(0, 5),
)
BYTES, RANKS = st.floats(0, 1e12), st.integers(1, 1000)
COLLECTIVES = st.sampled_from([all_reduce, all_gather, broadcast])
Collective = Callable[[Link, float, int], Interval]
SIZES = [1 << power for power in range(10, 26)]


@given(link=LINKS, collective=COLLECTIVES, size=BYTES, more=BYTES, ranks=RANKS, others=RANKS)
def test_more_bytes_or_more_ranks_never_take_less(
    link: Link, collective: Collective, size: float, more: float, ranks: int, others: int
) -> None:
    here = collective(link, size, ranks).median
    assert collective(link, size + more, ranks).median >= here
    assert collective(link, size, ranks + others).median >= here * (1 - 1e-12)


@given(link=LINKS, collective=COLLECTIVES, size=BYTES)
def test_a_single_rank_sends_nothing(link: Link, collective: Collective, size: float) -> None:
    assert collective(link, size, 1) == Interval(median=0, low=0, high=0)


@given(link=LINKS, collective=COLLECTIVES, size=BYTES, ranks=RANKS)
def test_the_interval_is_the_spread_on_both_sides(
    link: Link, collective: Collective, size: float, ranks: int
) -> None:
    time = collective(link, size, ranks)
    assert time.low <= time.median <= time.high
    assert time.high == pytest.approx(time.median * (1 + link.spread))
    assert time.low * (1 + link.spread) == pytest.approx(time.median)


@given(link=LINKS, size=BYTES, ranks=RANKS)
def test_an_all_reduce_is_two_all_gathers_and_two_ranks_broadcast_in_one_message(
    link: Link, size: float, ranks: int
) -> None:
    assert all_reduce(link, size, ranks).median == pytest.approx(
        2 * all_gather(link, size, ranks).median
    )
    assert broadcast(link, size, 2) == point_to_point(link, size)


def test_the_equations_give_hand_computed_values() -> None:
    link = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-3, spread=0.0)
    assert point_to_point(link, 1e6).median == pytest.approx(2e-3)
    assert all_reduce(link, 1e6, 4).median == pytest.approx(6 * 1e-3 + 1.5 * 1e-3)
    assert all_gather(link, 1e6, 4).median == pytest.approx(3 * 1e-3 + 0.75 * 1e-3)
    assert [broadcast(link, 1e6, ranks).median for ranks in (2, 4, 5, 8, 9)] == pytest.approx(
        [2e-3, 4e-3, 6e-3, 6e-3, 8e-3]
    )


@pytest.mark.parametrize("collective", [all_reduce, all_gather, broadcast])
def test_negative_sizes_and_no_ranks_are_refused(collective: Collective) -> None:
    link = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-3, spread=0.0)
    for size, ranks in ((-1.0, 2), (1.0, 0)):
        with pytest.raises(ValueError, match="allowed: 0 bytes or more, one rank or more"):
            collective(link, size, ranks)


@given(link=LINKS, size=BYTES, cycle=st.floats(1e-6, 1))
def test_a_library_with_cycles_adds_waiting_agreement_and_polling(
    link: Link, size: float, cycle: float
) -> None:
    time, agreed = point_to_point(link, size), point_to_point(link, 8)
    delayed = on_cycle(time, cycle, agreed, poll_s=cycle)
    assert delayed.low == time.low + agreed.low
    assert delayed.median == pytest.approx(time.median + 1.5 * agreed.median + cycle)
    assert delayed.high == pytest.approx(time.high + 2 * agreed.high + 2 * cycle)
    assert on_cycle(time, 0.0, agreed) == time
    with pytest.raises(ValueError, match="0 s or more"):
        on_cycle(time, -1.0, agreed)


@given(link=LINKS, size=BYTES, pieces=st.integers(1, 50), ranks=st.integers(1, 20))
def test_a_divided_all_reduce_has_each_parts_messages_and_the_bytes_of_the_whole(
    link: Link, size: float, pieces: int, ranks: int
) -> None:
    together = all_reduces(link, size, pieces, ranks).median
    assert together == pytest.approx(
        sum(all_reduce(link, size / pieces, ranks).median for _ in range(pieces))
    )


REAL_LINKS = st.builds(
    Link,
    bandwidth_bytes_per_s=st.floats(1e7, 1e11),
    latency_s=st.floats(1e-6, 1e-2),
    spread=st.just(0.0),
)


def taken(link: Link, ranks: int, rounds: int = 1) -> list[tuple[float, int, float]]:
    return [
        (size, ranks, all_reduce(link, size, ranks).median) for size in SIZES for _ in range(rounds)
    ]


def apart(one: Link, other: Link) -> float:
    """The largest factor between the two predictions for a size, minus one."""
    pairs = [(all_reduce(one, size, 2).median, all_reduce(other, size, 2).median) for size in SIZES]
    return max(max(a / b, b / a) for a, b in pairs) - 1


@settings(deadline=None)
@given(link=REAL_LINKS, ranks=st.integers(2, 16))
def test_a_fit_recovers_the_link_that_made_the_times(link: Link, ranks: int) -> None:
    found = fit_link(taken(link, ranks))
    assert apart(found, link) < 1e-6
    assert found.spread < 1e-6


@settings(deadline=None)
@given(link=REAL_LINKS, slower=st.floats(1.5, 1000), data=st.data())
def test_disturbed_rounds_do_not_move_the_fit_but_widen_its_spread(
    link: Link, slower: float, data: st.DataObject
) -> None:
    samples = taken(link, 2, rounds=5)
    for size in range(len(SIZES)):
        for one in data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=2, unique=True)):
            number, ranks, seconds = samples[5 * size + one]
            samples[5 * size + one] = (number, ranks, seconds * slower)
    found = fit_link(samples)
    assert apart(found, link) < 1e-3
    assert found.spread == pytest.approx(slower - 1, rel=1e-2)


@settings(deadline=None)
@given(
    link=REAL_LINKS,
    noise=st.lists(st.floats(-0.3, 0.3), min_size=len(SIZES) * 4, max_size=len(SIZES) * 4),
)
def test_nine_of_ten_samples_lie_within_the_spread_of_the_fit(
    link: Link, noise: list[float]
) -> None:
    samples = [
        (size, ranks, seconds * math.exp(one))
        for (size, ranks, seconds), one in zip(taken(link, 2, rounds=4), noise, strict=True)
    ]
    found = fit_link(samples)
    intervals = [all_reduce(found, size, ranks) for size, ranks, _ in samples]
    inside = sum(
        one.low * (1 - 1e-9) <= seconds <= one.high * (1 + 1e-9)
        for one, (_, _, seconds) in zip(intervals, samples, strict=True)
    )
    assert inside >= 0.9 * len(samples) - 1
    assert apart(found, link) < 1.0


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [(1024, 2, 1e-3)] * 9,
        [(1024, 1, 1e-3), (2048, 1, 1e-3)],
        [(1024, 2, 1e-3), (2048, 2, 0.0)],
        [(1024, 2, 1e-3), (2048, 2, math.inf)],
    ],
    ids=["none", "one size", "one rank", "no time", "endless"],
)
def test_samples_that_do_not_determine_a_link_are_refused(
    samples: list[tuple[float, int, float]],
) -> None:
    with pytest.raises(BadInput, match="two sizes or more between two ranks or more"):
        fit_link(samples)


def test_times_that_do_not_grow_with_the_bytes_are_all_latency() -> None:
    found = fit_link([(size, 2, 1e-3) for size in SIZES])
    assert found.latency_s == pytest.approx(0.5e-3, rel=1e-3)
    assert all_reduce(found, 1e6, 2).median == pytest.approx(1e-3, rel=1e-3)


def test_predicting_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from trainwright.estimator.predict.communication import Link, all_reduce; "
        "all_reduce(Link(bandwidth_bytes_per_s=1e9, latency_s=1e-4, spread=0.1), 1e6, 4); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'scipy')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
