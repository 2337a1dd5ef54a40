from __future__ import annotations

from typing import Any

import pytest
from simulated_ranks import policy

from trainwright.tasks.train.membership.state import RankState
from trainwright.tasks.train.membership.watchdog import (
    STORE_S,
    hung_members,
    stall_timeout_s,
    stuck_members,
)

NOW = 1000.0


def member(number: int, *, heard_s_ago: float = 0.0, **known: Any) -> RankState:
    """A rank in a group."""
    return RankState(number, NOW - heard_s_ago, **{"status": "joined", **known})


def numbers(found: list[tuple[RankState, str]]) -> list[int]:
    return [rank.number for rank, _ in found]


def test_a_rank_that_computes_while_the_others_wait_too_long_hangs() -> None:
    ranks = [member(0, waits_s=61.0), member(1), member(2, waits_s=3.0)]
    [(rank, why)] = hung_members(ranks, NOW, 60.0)
    assert (rank.number, why) == (1, "kept the others waiting for 60 s and was killed")


def test_a_silent_rank_counts_as_hung_and_ranks_that_wait_for_it_do_not() -> None:
    ranks = [member(0, waits_s=70.0), member(1, heard_s_ago=65.0)]
    [(rank, why)] = hung_members(ranks, NOW, 60.0)
    assert (rank.number, why) == (1, "sent no heartbeat for 60 s and was killed")


def test_if_all_wait_too_long_one_is_killed_unless_some_began_late() -> None:
    assert numbers(hung_members([member(0, waits_s=61.0), member(1, waits_s=62.0)], NOW, 60.0)) == [
        1
    ]
    assert hung_members([member(0, waits_s=61.0), member(1, waits_s=5.0)], NOW, 60.0) == []


def test_a_rank_that_does_not_finish_its_step_counts_as_hung_even_if_no_other_waits() -> None:
    [(_, why)] = hung_members([member(0, computes_s=61.0)], NOW, 60.0)
    assert why == "computed for 60 s without finishing a step and was killed"
    assert hung_members([member(0, computes_s=59.0)], NOW, 60.0) == []
    both = [member(0, waits_s=62.0), member(1, computes_s=62.0)]
    assert numbers(hung_members(both, NOW, 60.0)) == [1]
    silent = [member(0, computes_s=61.0, heard_s_ago=61.0)]
    assert [why for _, why in hung_members(silent, NOW, 60.0)] == [
        "sent no heartbeat for 60 s and was killed"
    ]


def test_a_rank_that_writes_a_checkpoint_has_more_time() -> None:
    ranks = [member(0, writing=True), member(1, waits_s=61.0)]
    assert hung_members(ranks, NOW, 60.0) == []
    ranks[1].waits_s = STORE_S + 1
    assert numbers(hung_members(ranks, NOW, 60.0)) == [0]


def test_waiting_or_joining_ranks_must_leave_an_aborted_group_at_once() -> None:
    ranks = [
        member(0, waits_s=2.5),
        member(1),
        member(2, waits_s=2.5, done=True),
        member(3, status="joining"),
    ]
    found = stuck_members(ranks, NOW, 60.0, aborted_s=3.0)
    assert numbers(found) == [0, 3]
    assert {why for _, why in found} == {"did not leave its aborted group and was killed"}
    assert stuck_members(ranks, NOW, 60.0, aborted_s=1.0) == []


def test_a_long_wait_in_an_aborted_group_does_not_count_as_hanging() -> None:
    assert stuck_members([member(0, waits_s=61.0)], NOW, 60.0, aborted_s=1.0) == []
    silent = stuck_members([member(0, heard_s_ago=65.0)], NOW, 60.0, aborted_s=1.0)
    assert [why for _, why in silent] == ["sent no heartbeat for 60 s and was killed"]


def test_an_idle_rank_must_leave_an_aborted_group_in_time() -> None:
    assert stuck_members([member(0)], NOW, 60.0, aborted_s=59.0) == []
    assert numbers(stuck_members([member(0)], NOW, 60.0, aborted_s=61.0)) == [0]
    assert stuck_members([member(0, writing=True)], NOW, 60.0, aborted_s=61.0) == []


def test_a_ranks_time_limit_follows_its_current_batch() -> None:
    devices = policy(2).devices  # planned: 8 samples in 20 ms at most
    assert stall_timeout_s(1.0, devices, [8, 8]) == 1.0
    assert stall_timeout_s(1.0, devices, [0, 240]) == pytest.approx(20 * 0.02 * 240 / 8)
    assert stall_timeout_s(1.0, devices, [16, 0]) == 1.0
