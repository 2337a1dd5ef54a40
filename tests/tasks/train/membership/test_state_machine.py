"""The membership state machine's decisions, case by case (`test_orders_of_events`: any order)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from simulated_ranks import SimulatedRanks, policy

from trainwright.estimator.curves import Affine
from trainwright.tasks.errors import (
    BadInput,
    Interrupted,
    Preempted,
    RunHeld,
    TrainingFailed,
    TrainwrightError,
)
from trainwright.tasks.train.membership import event, instruction
from trainwright.tasks.train.membership.state_machine import SPARE_AFTER_S, Membership
from trainwright.tasks.train.membership.transitions import SAVE_GRACE_S, STOP_GRACE_S
from trainwright.tasks.train.membership.watchdog import ABORT_S, LOADING_S, STORE_S
from trainwright.tasks.train.worker_group import WorkerGroup


def training(count: int = 3, *, steps: int = 3, committed: int = 0, **rules: Any) -> SimulatedRanks:
    """Ranks that have joined their first group and finished some steps."""
    ranks = SimulatedRanks(policy(count, **rules), checkpoint_step=committed)
    ranks.tick()
    go_on(ranks, ranks.joined)
    for _ in range(steps):
        ranks.make_step()
    ranks.seen.clear()
    return ranks


def go_on(ranks: SimulatedRanks, until: Callable[[], bool], *, train: bool = False) -> None:
    """Let all processes act, also `train`, until a condition holds."""
    for _ in range(20):
        if until():
            return
        ranks.act()
        if train:
            ranks.train()
        ranks.tick()
    raise AssertionError(f"not in 20 rounds: {ranks.seen}")


def kill(ranks: SimulatedRanks, number: int, **how: Any) -> None:
    ranks.die(ranks.processes[number], **how)


def leave(ranks: SimulatedRanks, number: int, **why: Any) -> None:
    ranks.leave(ranks.processes[number], **why)
    ranks.deliver(ranks.processes[number])


def groups(ranks: SimulatedRanks) -> list[WorkerGroup]:
    return [one.group for one in ranks.seen if isinstance(one, instruction.FormGroup)]


def notices(ranks: SimulatedRanks) -> list[str]:
    return [one.message for one in ranks.seen if isinstance(one, instruction.Notice)]


def kills(ranks: SimulatedRanks) -> dict[int, str]:
    return {one.number: one.reason for one in ranks.seen if isinstance(one, instruction.Kill)}


def error(ranks: SimulatedRanks) -> TrainwrightError:
    assert isinstance(ranks.end, instruction.GiveUp)
    return ranks.end.error


# -- ranks that are lost and come back -------------------------------------------------------------


def test_the_first_group_waits_for_all_to_load() -> None:
    ranks = SimulatedRanks(policy(2))
    ranks.tick()
    assert ranks.seen == [instruction.StartProcess(0), instruction.StartProcess(1)]
    ranks.load(ranks.processes[0])
    ranks.deliver(ranks.processes[0])
    assert groups(ranks) == []
    ranks.load(ranks.processes[1])
    ranks.deliver(ranks.processes[1])
    [first] = groups(ranks)
    assert (first.members, first.reason, first.broken) == ([0, 1], "begins with 2 of 2", False)


def test_when_a_rank_is_killed_the_others_regroup_at_once_and_it_comes_back() -> None:
    ranks = training(3)
    kill(ranks, 1)
    assert ranks.seen == [instruction.AbortGroup((0, 2), 1), instruction.StartProcess(1)]
    leave(ranks, 0, sum_error="reset")
    assert groups(ranks) == []
    leave(ranks, 2, sum_error="reset")
    [smaller] = groups(ranks)
    assert (smaller.generation, smaller.members, smaller.broken) == (2, [0, 2], True)
    assert smaller.reason == "rank 1 (h1/cpu) was killed by SIGKILL; continues with 2 of 3"
    go_on(ranks, lambda: instruction.AskToLeave((0, 2), 2) in ranks.seen)
    go_on(ranks, lambda: len(groups(ranks)) == 2, train=True)
    larger = groups(ranks)[1]
    assert (larger.members, larger.broken) == ([0, 1, 2], False)
    assert larger.reason == "rank 1 (h1/cpu) is back; continues with 3 of 3"


def test_ranks_may_be_lost_and_come_back_repeatedly() -> None:
    ranks = training(3)
    for number in (1, 2, 0):
        kill(ranks, number)
        others = sorted({0, 1, 2} - {number})
        go_on(ranks, lambda: groups(ranks)[-1:] != [], train=True)
        go_on(ranks, lambda: groups(ranks)[-1].members == [0, 1, 2], train=True)
        go_on(ranks, ranks.joined)
        assert [group.members for group in groups(ranks)] == [others, [0, 1, 2]]
        ranks.seen.clear()


def test_a_returning_rank_does_not_join_a_group_that_is_about_to_end() -> None:
    ranks = training(2, steps=38)
    kill(ranks, 1)
    leave(ranks, 0, sum_error="reset")
    ranks.join(ranks.processes[0])
    ranks.train()
    ranks.train()
    ranks.deliver(ranks.processes[0], 3)  # joined, the split, done
    ranks.load(ranks.processes[1])
    ranks.deliver(ranks.processes[1])
    assert not any(isinstance(one, instruction.AskToLeave) for one in ranks.seen)
    ranks.play_fairly()
    assert isinstance(ranks.end, instruction.Finish)


def test_ranks_that_have_left_do_not_wait_for_one_that_has_not() -> None:
    ranks = training(3)
    kill(ranks, 2)
    go_on(ranks, lambda: instruction.AskToLeave((0, 1), 2) in ranks.seen)
    leave(ranks, 0)
    ranks.processes[1].hang = "computes"
    ranks.tick(ABORT_S - 0.1)
    assert instruction.AbortGroup((1,), 2) not in ranks.seen
    ranks.tick(0.2)
    assert instruction.AbortGroup((1,), 2) in ranks.seen


def test_a_device_is_not_restarted_beyond_its_limit() -> None:
    ranks = training(2, restarts=2)
    for _ in range(3):
        kill(ranks, 1)
    starts = [one for one in ranks.seen if one == instruction.StartProcess(1)]
    assert len(starts) == 2
    ranks.play_fairly()
    assert isinstance(ranks.end, instruction.Finish)


def test_a_checkpoint_resets_its_members_restarts() -> None:
    ranks = training(2, restarts=1)
    kill(ranks, 1)
    go_on(ranks, lambda: len(groups(ranks)) == 2, train=True)
    go_on(ranks, ranks.joined)
    ranks.store_checkpoint()
    kill(ranks, 1)
    assert ranks.seen[-1] == instruction.StartProcess(1)


def test_if_all_are_lost_they_start_from_the_newest_checkpoint() -> None:
    ranks = training(2, steps=7)
    ranks.store_checkpoint()
    ranks.make_step()
    kill(ranks, 0)
    kill(ranks, 1)
    for number in (0, 1):
        ranks.load(ranks.processes[number])
        ranks.deliver(ranks.processes[number])
    assert ranks.restore_asked
    assert groups(ranks) == []
    ranks.restore()
    [group] = groups(ranks)
    assert (group.checkpoint, group.committed) == ("folder", 7)


def test_the_training_ends_when_all_ranks_are_done_and_one_that_dies_before_is_replaced() -> None:
    ranks = training(2, steps=40)
    ranks.deliver(ranks.processes[0])
    ranks.processes[1].outbox.clear()
    kill(ranks, 1)
    [group] = groups(ranks)
    assert group.members == [0]
    ranks.play_fairly()
    assert isinstance(ranks.end, instruction.Finish)


def test_a_group_contains_the_stored_step() -> None:
    ranks = training(2, steps=7)
    ranks.store_checkpoint()
    kill(ranks, 1)
    leave(ranks, 0, sum_error="reset")
    assert groups(ranks)[0].committed == 7


def test_after_a_rollback_the_older_checkpoint_counts() -> None:
    ranks = training(2, steps=7)
    ranks.store_checkpoint()
    ranks.tell(event.RolledBack(ranks.now, 5))
    kill(ranks, 1)
    leave(ranks, 0, sum_error="reset")
    assert groups(ranks)[0].committed == 5


# -- the spare process -----------------------------------------------------------------------------


def test_a_long_training_starts_a_spare_process_which_replaces_a_lost_rank() -> None:
    ranks = training(2)
    ranks.tick(SPARE_AFTER_S / 2)
    assert ranks.seen == []
    ranks.tick(SPARE_AFTER_S)
    assert ranks.seen == [instruction.StartSpare()]
    ranks.spare = "loaded"
    ranks.tell(event.SpareLoaded(ranks.now))
    kill(ranks, 1)
    assert instruction.AssignSpare(1) in ranks.seen
    assert instruction.StartSpare() not in ranks.seen[1:]  # the lost rank's replacement loads first
    go_on(ranks, lambda: ranks.seen.count(instruction.StartSpare()) == 2)


def test_a_loading_spare_process_does_not_delay_a_replacement() -> None:
    ranks = training(2)
    ranks.tick(2 * SPARE_AFTER_S)
    kill(ranks, 1)
    assert instruction.StartProcess(1) in ranks.seen


@pytest.mark.parametrize("rules", [{"restarts": 0}, {"local": False}, {"searches": True}])
def test_no_useless_spare_process_is_started(rules: dict[str, Any]) -> None:
    ranks = training(2, steps=0, **rules)
    ranks.tick(10 * SPARE_AFTER_S)
    assert ranks.seen == []


def test_a_dead_spare_process_is_restarted_a_limited_number_of_times() -> None:
    ranks = training(2)
    for _ in range(30):
        ranks.tick(2 * SPARE_AFTER_S)
        if ranks.spare != "none":
            ranks.spare = "none"
            ranks.tell(event.SpareEnded(ranks.now))
    assert ranks.seen.count(instruction.StartSpare()) == 10


# -- too few ---------------------------------------------------------------------------------------


def test_with_a_minimum_of_all_the_others_wait_for_the_replacement_and_say_so_once() -> None:
    ranks = training(2, min_count=2)
    kill(ranks, 0)
    leave(ranks, 1, sum_error="reset")
    for _ in range(5):
        ranks.tick(1.0)
    waits = "1 of 2 devices left, and devices.min_count is 2: training waits up to 60 s for others"
    assert notices(ranks) == [waits]
    go_on(ranks, lambda: bool(groups(ranks)))
    [group] = groups(ranks)
    assert group.members == [0, 1]
    assert group.reason.startswith("rank 0 (h0/cpu) was killed by SIGKILL; rank 0 (h0/cpu) is back")


def test_too_few_ranks_for_too_long_save_a_checkpoint_and_fail_clearly() -> None:
    ranks = training(2, min_count=2, steps=7)
    kill(ranks, 0)
    leave(ranks, 1, sum_error="reset")
    ranks.tick(61.0)
    [last] = groups(ranks)
    assert (last.members, last.end) == ([1], True)
    ranks.play_fairly()
    assert str(error(ranks)) == (
        "1 of 2 devices left, and devices.min_count is 2 and none came back in 61 s "
        "(rank 0 (h0/cpu) was killed by SIGKILL; its log is its.log); "
        "the checkpoint of step 7 is kept: run it again to continue from there"
    )
    assert error(ranks).details["step"] == 7


def test_each_shortage_has_the_full_patience() -> None:
    ranks = training(2, min_count=2)
    for _ in range(2):
        kill(ranks, 0)
        leave(ranks, 1, sum_error="reset")
        ranks.tick(50.0)
        assert ranks.end is None
        ranks.load(ranks.processes[0])
        ranks.deliver(ranks.processes[0])
        go_on(ranks, ranks.joined)
    assert [group.members for group in groups(ranks)] == [[0, 1]] * 2


def test_a_training_that_is_ending_waits_for_no_rank() -> None:
    ranks = training(2, min_count=2, local=False, restarts=1)
    for _ in range(2):
        kill(ranks, 0)
    leave(ranks, 1, sum_error="reset")
    go_on(ranks, ranks.joined)
    assert [group.end for group in groups(ranks)] == [True]
    ranks.unreachable = {1}
    ranks.tell(event.HostsLost(ranks.now, frozenset({1})))
    kill(ranks, 1)
    assert str(error(ranks)).startswith("none of 2 devices is left (rank 1")


def test_if_no_replacement_is_possible_too_few_ranks_fail_at_once() -> None:
    ranks = training(2, min_count=2, restarts=0)
    kill(ranks, 0)
    leave(ranks, 1, sum_error="reset")
    assert [group.end for group in groups(ranks)] == [True]
    assert notices(ranks) == []


def test_if_no_rank_has_the_state_too_few_ranks_fail_without_another_checkpoint() -> None:
    ranks = training(1, restarts=0, committed=5)
    kill(ranks, 0)
    assert str(error(ranks)).startswith("none of 1 devices is left (rank 0 (h0/cpu) was killed by")
    assert str(error(ranks)).endswith("; the last checkpoint is kept")


def test_a_training_that_is_ending_continues_if_enough_ranks_return() -> None:
    ranks = training(2, min_count=2, restarts=1)
    kill(ranks, 0)
    leave(ranks, 1, sum_error="reset")
    ranks.tick(61.0)  # the replacement is still loading
    assert [group.end for group in groups(ranks)] == [True]
    ranks.load(ranks.processes[0])
    ranks.deliver(ranks.processes[0])
    leave(ranks, 1, sum_error="reset")  # the last group fails, too
    ranks.play_fairly()
    assert [group.end for group in groups(ranks)] == [True, False]
    assert isinstance(ranks.end, instruction.Finish)


# -- hosts -----------------------------------------------------------------------------------------


def test_a_lost_hosts_rank_restarts_when_the_host_is_back() -> None:
    ranks = training(2, local=False)
    ranks.unreachable = {1}
    ranks.tell(event.HostsLost(ranks.now, frozenset({1})))
    kill(ranks, 1, how="is lost: no route")
    leave(ranks, 0, sum_error="reset")
    assert groups(ranks)[0].reason == "rank 1 (h1/cpu) is lost: no route; continues with 1 of 2"
    ranks.tick(100.0)
    assert instruction.StartProcess(1) not in ranks.seen
    ranks.unreachable = set()
    ranks.tell(event.HostsReturned(ranks.now, frozenset({1})))
    assert instruction.StartProcess(1) in ranks.seen


def test_a_required_lost_host_is_waited_for_up_to_the_jobs_limit() -> None:
    ranks = training(1, local=False, wait_for_devices=30.0)
    ranks.unreachable = {0}
    ranks.tell(event.HostsLost(ranks.now, frozenset({0})))
    kill(ranks, 0, how="is lost: no route")
    ranks.tick(29.0)
    assert ranks.end is None
    ranks.tick(2.0)
    message = (
        "none of 1 devices is left and none came back in 31 s (rank 0 (h0/cpu) is lost: no route"
    )
    assert str(error(ranks)).startswith(message)


def taken_back(ranks: SimulatedRanks, number: int) -> None:
    ranks.tell(event.HostsEnding(ranks.now, frozenset({number})), event.Tick(ranks.now))


def test_a_host_that_its_cluster_takes_back_leaves_between_two_steps() -> None:
    ranks = training(3, local=False, restarts=0)
    taken_back(ranks, 1)
    go_on(ranks, lambda: bool(groups(ranks)) and ranks.joined(), train=True)
    assert instruction.GiveBack((1,)) in ranks.seen
    assert [group.members for group in groups(ranks)] == [[0, 2]]
    reason = "rank 1 (h1/cpu) was given back to the cluster; continues with 2 of 3"
    assert groups(ranks)[0].reason == reason
    assert not groups(ranks)[0].broken
    ranks.unreachable = set()
    ranks.tell(event.HostsReturned(ranks.now, frozenset({1})))
    # leaving is no death, so that it may restart
    go_on(ranks, lambda: len(groups(ranks)) == 2, train=True)
    assert groups(ranks)[1].members == [0, 1, 2]


@pytest.mark.parametrize(
    "rules", [{"min_count": 2}, {"whole": False}], ids=["too few left", "state would be lost"]
)
def test_if_the_others_can_not_go_on_all_save_a_checkpoint_and_wait(rules: dict[str, Any]) -> None:
    ranks = training(2, local=False, **rules)
    taken_back(ranks, 1)
    ranks.play_fairly()
    assert [(group.members, group.end) for group in groups(ranks)] == [([0, 1], True)]
    assert isinstance(error(ranks), Preempted)
    assert str(error(ranks)) == (
        "the cluster takes back the host of rank 1 (h1/cpu); the checkpoint of step 4 is kept"
    )


def test_a_host_that_is_taken_back_before_the_first_step_leaves_nothing_to_save() -> None:
    ranks = SimulatedRanks(policy(1, local=False))
    ranks.tick()
    taken_back(ranks, 0)
    assert str(error(ranks)) == "the cluster takes back the host of rank 0 (h0/cpu)"


def test_a_host_of_a_search_is_given_back_at_once() -> None:
    ranks = SimulatedRanks(policy(2, local=False, searches=True))
    ranks.tick()
    go_on(ranks, ranks.joined)
    taken_back(ranks, 1)
    assert instruction.GiveBack((1,)) in ranks.seen


# -- the search of the learning rate ---------------------------------------------------------------


def test_a_search_waits_for_the_replacement_and_restarts_with_all_ranks() -> None:
    ranks = training(2, steps=0, searches=True)
    kill(ranks, 0)
    leave(ranks, 1, sum_error="reset")
    ranks.tick(30.0)
    assert groups(ranks) == []
    ranks.load(ranks.processes[0])
    ranks.deliver(ranks.processes[0])
    [group] = groups(ranks)
    assert (group.members, group.checkpoint) == ([0, 1], None)


def test_a_search_continues_without_a_rank_that_is_not_replaced() -> None:
    ranks = training(3, steps=0, searches=True, restarts=0)
    kill(ranks, 2)
    leave(ranks, 0, sum_error="reset")
    leave(ranks, 1, sum_error="reset")
    assert [group.members for group in groups(ranks)] == [[0, 1]]


def test_a_search_ends_with_the_cause_if_too_few_are_left() -> None:
    ranks = training(2, steps=0, searches=True, restarts=0, min_count=2)
    kill(ranks, 1)
    leave(ranks, 0, sum_error="reset")
    assert str(error(ranks)) == (
        "1 of 2 devices left, and devices.min_count is 2 "
        "(rank 1 (h1/cpu) was killed by SIGKILL; its log is its.log)"
    )


# -- errors ----------------------------------------------------------------------------------------


def fail(ranks: SimulatedRanks, number: int, error: TrainwrightError, **said: Any) -> None:
    one = ranks.processes[number]
    given = {"message": "a cable came loose", "step": one.step, "final": False, **said}
    one.outbox.append(event.RankFailed(ranks.now, number, error, **given))
    ranks.die(one, "exited with 1")


def test_one_error_costs_a_process_and_two_at_the_same_step_the_training() -> None:
    ranks = training(2)
    fail(ranks, 0, TrainingFailed("rank 0: a cable came loose"))
    leave(ranks, 1, sum_error="reset")
    assert groups(ranks)[0].reason.startswith(
        "rank 0 (h0/cpu) failed (a cable came loose); continues"
    )
    go_on(ranks, ranks.joined)
    fail(ranks, 1, TrainingFailed("rank 1: a cable came loose"))
    assert str(error(ranks)) == "rank 1: a cable came loose"


@pytest.mark.parametrize(
    ("searches", "failure", "said"),
    [
        (False, BadInput("the model does not fit"), {}),
        (False, TrainingFailed("the batch can't be split", final=True), {}),
        (False, TrainingFailed("the store is full"), {"final": True}),
        (True, TrainingFailed("rank 0: a cable came loose"), {}),
    ],
)
def test_a_permanent_error_ends_the_training_at_once(
    searches: bool, failure: TrainwrightError, said: dict[str, Any]
) -> None:
    ranks = training(2, steps=0, searches=searches)
    fail(ranks, 0, failure, **said)
    assert error(ranks) is failure


def test_an_error_while_a_rank_loads_ends_the_training() -> None:
    ranks = SimulatedRanks(policy(2))
    ranks.tick()
    fail(ranks, 0, TrainingFailed("rank 0: no module torch"))
    assert str(error(ranks)) == "rank 0: no module torch"


def test_repeatedly_failing_sums_without_a_lost_rank_end_the_training() -> None:
    ranks = training(2, steps=0, wait_for_devices=3.0)
    began = ranks.now
    while ranks.end is None:
        for number in (0, 1):
            if ranks.end is None and ranks.processes[number].status in ("joining", "in"):
                leave(ranks, number, sum_error="no route")
        ranks.tick(0.2)
    assert 3.0 < ranks.now - began < 10.0
    assert "no rank was lost: no route; hosts must" in str(error(ranks))


# -- memory ----------------------------------------------------------------------------------------


def test_a_rank_out_of_memory_gets_a_smaller_batch_and_the_others_take_more() -> None:
    ranks = training(2)
    leave(ranks, 0, shortage=event.MemoryShortage(8, fits=3))
    leave(ranks, 1, sum_error="reset")
    [group] = groups(ranks)
    assert (group.members, group.limits) == ([0, 1], {0: 4})
    assert group.reason == (
        "rank 0 (h0/cpu) ran out of memory with a batch of 8; its batch is now limited to 4; "
        "continues with 2 of 2"
    )


def test_a_layer_whose_joint_work_does_not_fit_is_summed_from_then_on() -> None:
    ranks = training(2)
    for layer in ("fc6", "fc7", "fc6"):
        leave(ranks, 0, shortage=event.MemoryShortage(0, layer=layer))
        leave(ranks, 1, sum_error="reset")
        go_on(ranks, lambda: ranks.healthy())
    first, *later = groups(ranks)
    assert first.summed == ["fc6"]
    assert [one.summed for one in later] == [["fc6", "fc7"]] * 2
    assert (first.members, first.limits) == ([0, 1], {})
    assert first.reason == (
        "rank 0 (h0/cpu) ran out of memory in layer fc6, for which it works on the rows of all "
        "ranks; its gradients are summed from now on; continues with 2 of 2"
    )


def test_layers_that_an_earlier_launch_had_to_sum_are_summed() -> None:
    machine = Membership(policy(1), checkpoint="folder", committed=3, summed=["fc6"])
    machine.handle(event.Tick(0.0))
    formed = machine.handle(event.RankReady(1.0, 0, None))
    [first] = [one.group for one in formed if isinstance(one, instruction.FormGroup)]
    assert (first.summed, first.checkpoint) == (["fc6"], "folder")


def test_joint_work_that_does_not_fit_is_an_error_if_the_job_permits_nothing_else() -> None:
    rules = replace(policy(2), may_sum=False)
    ranks = SimulatedRanks(rules)
    ranks.tick()
    go_on(ranks, lambda: ranks.healthy())
    ranks.tell(event.CheckpointStored(ranks.now, 5))
    ranks.leave(ranks.processes[0], shortage=event.MemoryShortage(0, layer="fc6"))
    ranks.deliver(ranks.processes[0])
    assert str(error(ranks)) == (
        "rank 0 (h0/cpu) ran out of memory in layer fc6, for which it works on the rows of all "
        "ranks, and train.layout permits no other way; use a smaller train.global_batch_size or "
        "leave train.layout to the planner; the checkpoint of step 5 is kept"
    )
    assert error(ranks).details == {"rank": 0, "layer": "fc6"}


def test_the_plans_memory_curve_limits_the_batch() -> None:
    rules = policy(1)
    line = Affine(fixed=100.0, per_sample=10.0)
    device = rules.devices[0].model_copy(update={"memory_bytes": line})
    ranks = SimulatedRanks(type(rules)((device,), 1, rules.faults))
    ranks.tick()
    go_on(ranks, lambda: ranks.healthy())
    ranks.leave(ranks.processes[0], shortage=event.MemoryShortage(8, 0, memory_bytes=131.0))
    ranks.deliver(ranks.processes[0])
    ranks.play_fairly()
    assert "(at most device 0: 3)" in str(error(ranks))


def test_a_rank_killed_for_lack_of_memory_comes_back_with_half_the_batch() -> None:
    ranks = training(2, min_count=2)
    kill(ranks, 0, out_of_memory=True)
    leave(ranks, 1, sum_error="reset")
    go_on(ranks, lambda: bool(groups(ranks)))
    assert groups(ranks)[0].limits == {0: 4}


def test_a_stage_killed_for_lack_of_memory_ends_the_training_with_what_takes_less() -> None:
    ranks = training(2)
    kill(ranks, 1, out_of_memory=True, stage="stage 2 of 2 does not fit; less take: a, b")
    assert str(error(ranks)) == (
        "rank 1 (h1/cpu) was killed by SIGKILL: stage 2 of 2 does not fit; less take: a, b; "
        "its log is its.log"
    )


def test_a_stage_killed_for_another_reason_is_restarted() -> None:
    ranks = training(2)
    kill(ranks, 1, stage="stage 2 of 2 does not fit; less take: a, b")
    leave(ranks, 0, sum_error="reset")
    ranks.play_fairly()
    assert isinstance(ranks.end, instruction.Finish)


def test_a_device_too_small_for_one_sample_is_left_out() -> None:
    ranks = training(2)
    ranks.tell(event.SplitChanged(ranks.now, (15, 1)))
    leave(ranks, 1, shortage=event.MemoryShortage(1))
    leave(ranks, 0, sum_error="reset")
    assert [group.members for group in groups(ranks)] == [[0]]
    assert "rank 1 (h1/cpu) ran out of memory with a batch of 1; not even one sample fits" in (
        groups(ranks)[0].reason
    )
    ranks.play_fairly()
    assert isinstance(ranks.end, instruction.Finish)


def test_a_batch_that_fits_nowhere_fails_with_the_batches_that_fit() -> None:
    ranks = training(2)
    for number in (0, 1):
        leave(ranks, number, shortage=event.MemoryShortage(8, fits=2))
    ranks.play_fairly()
    assert "global batch of 16 does not fit into the memory of 2 of 2" in str(error(ranks))
    assert error(ranks).details["most_batch_sizes"] == {"h0/cpu": 4, "h1/cpu": 4}
    assert str(error(ranks)).endswith("is kept")  # no hint to run it again, which would not help


# -- ranks that hang -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hang", "why"),
    [
        ("silent", "sent no heartbeat for 60 s and was killed"),
        ("computes", "computed for 60 s without finishing a step and was killed"),
        ("idle", "kept the others waiting for 60 s and was killed"),
    ],
)
def test_a_rank_that_hangs_is_killed_with_the_reason_and_replaced(hang: Any, why: str) -> None:
    ranks = training(3)
    ranks.processes[1].hang = hang
    for _ in range(62):
        ranks.tick(1.0)
    assert kills(ranks) == {1: why}
    ranks.play_fairly()
    assert isinstance(ranks.end, instruction.Finish)
    assert [group.members for group in groups(ranks)][:2] == [[0, 2], [0, 1, 2]]


@pytest.mark.parametrize("waits", [None, 75.0])
def test_a_launcher_that_was_stopped_kills_no_rank_for_the_silence_meanwhile(
    waits: float | None,
) -> None:
    ranks = training(2)
    woke = ranks.now + 75
    if waits is not None:  # the others waited for an answer of the launcher
        ranks.tell(event.RankHeartbeat(woke, 0, waits, None, False))
    ranks.tell(event.Tick(woke, awake_since=woke))
    ranks.tell(event.Tick(woke + 50, awake_since=woke))
    assert kills(ranks) == {}
    ranks.tell(event.Tick(woke + 61, awake_since=woke))
    assert set(kills(ranks)) == {0, 1} if waits is None else kills(ranks)


def test_heartbeats_of_the_last_group_do_not_count_in_the_next() -> None:
    ranks = training(2)
    ranks.tell(event.RankHeartbeat(ranks.now, 0, 61.0, None, False))
    kill(ranks, 1)
    leave(ranks, 0, sum_error="reset")
    ranks.tell(event.Tick(ranks.now + 0.1))
    assert kills(ranks) == {}


def test_a_rank_that_does_not_leave_an_aborted_group_is_killed() -> None:
    ranks = training(3)
    ranks.processes[0].hang = "deaf"
    kill(ranks, 1)
    leave(ranks, 2, sum_error="reset")
    for _ in range(30):
        ranks.tick(0.1)
    assert kills(ranks) == {0: "did not leave its aborted group and was killed"}


def test_a_rank_that_reads_a_checkpoint_may_keep_the_others_waiting() -> None:
    ranks = training(2)

    def waits(seconds: float) -> None:
        ranks.now += seconds
        reads = event.RankHeartbeat(ranks.now, 0, None, None, True)
        waits = event.RankHeartbeat(ranks.now, 1, seconds, None, False)
        ranks.tell(reads, waits, event.Tick(ranks.now))

    waits(STORE_S - 1)
    assert kills(ranks) == {}
    waits(STORE_S + 1)
    assert list(kills(ranks)) == [0]


def test_a_loading_process_may_be_silent_for_a_limited_time() -> None:
    ranks = SimulatedRanks(policy(2))
    ranks.tick()
    ranks.processes[0].hang = "silent"
    ranks.tick(LOADING_S - 1)
    assert kills(ranks) == {}
    ranks.tick(2.0)
    assert list(kills(ranks)) == [0]


def test_heartbeats_that_arrive_late_together_kill_no_rank() -> None:
    ranks = training(2)
    ranks.tick(1000.0)  # the launcher was delayed
    assert kills(ranks) == {}


# -- stop, and the lease ---------------------------------------------------------------------------


def stop(ranks: SimulatedRanks) -> None:
    ranks.stop_asked_at = ranks.now
    ranks.tell(event.StopRequested(ranks.now))


def test_a_stop_ends_the_training_after_the_current_step() -> None:
    ranks = training(2)
    stop(ranks)
    assert ranks.seen == [instruction.AskToStop((0, 1))]
    stop(ranks)
    assert len(ranks.seen) == 1
    ranks.play_fairly()
    assert isinstance(ranks.end, instruction.Finish)


@pytest.mark.parametrize(
    ("committed", "message"),
    [
        (0, "stopped before the first step; nothing was changed"),
        (5, "stopped before another step; the checkpoint of step 5 is kept"),
    ],
)
def test_a_stop_before_the_first_group_ends_at_once(committed: int, message: str) -> None:
    ranks = SimulatedRanks(policy(2), checkpoint_step=committed)
    ranks.tick()
    stop(ranks)
    assert isinstance(error(ranks), Interrupted)
    assert str(error(ranks)) == message


def test_a_stop_does_not_wait_for_a_long_step_unless_a_checkpoint_is_being_written() -> None:
    for saving in (False, True):
        ranks = training(2)
        ranks.processes[0].hang = "computes"
        stop(ranks)
        if saving:
            ranks.tell(event.LastCheckpointBegun(ranks.now))
        ranks.tick(STOP_GRACE_S - 0.1 + (SAVE_GRACE_S if saving else 0.0))
        assert ranks.end is None
        ranks.tick(0.2)
        assert isinstance(error(ranks), Interrupted)
        assert "took too long" in str(error(ranks))


def test_a_stop_during_a_replacement_lets_the_others_write_a_checkpoint() -> None:
    ranks = training(2)
    kill(ranks, 1)
    stop(ranks)
    leave(ranks, 0, sum_error="reset")
    [last] = groups(ranks)
    assert (last.members, last.end) == ([0], True)
    assert ranks.seen[-1] == instruction.AskToStop((0,))
    ranks.play_fairly()
    assert isinstance(ranks.end, instruction.Finish)


def test_no_process_starts_after_a_stop() -> None:
    ranks = training(3)
    stop(ranks)
    kill(ranks, 1)
    ranks.play_fairly()
    assert not any(isinstance(one, instruction.StartProcess) for one in ranks.seen)
    assert isinstance(ranks.end, instruction.Finish)


def test_a_stop_while_no_rank_has_the_state_ends_at_once() -> None:
    ranks = training(1)
    kill(ranks, 0)
    stop(ranks)
    assert str(error(ranks)) == (
        "stopped while ranks were being replaced; the last checkpoint is kept"
    )


def test_a_stopped_search_forms_no_further_group() -> None:
    ranks = training(2, steps=0, searches=True)
    stop(ranks)
    kill(ranks, 1)
    assert str(error(ranks)) == "stopped during the learning-rate search"


def test_a_lost_lease_ends_everything_at_once() -> None:
    ranks = training(2)
    ranks.tell(event.LeaseLost(ranks.now))
    assert isinstance(error(ranks), RunHeld)


def test_events_of_ended_processes_and_events_after_the_end_are_ignored() -> None:
    ranks = training(2, restarts=0)
    kill(ranks, 1)
    ranks.seen.clear()
    ranks.tell(event.RankReady(ranks.now, 1, 4), event.RankDone(ranks.now, 1, 4))
    assert ranks.seen == []
    ranks.tell(event.LeaseLost(ranks.now))
    ranks.tell(event.Tick(ranks.now + 1e6), event.LeaseLost(ranks.now))
    assert isinstance(ranks.seen[-1], instruction.GiveUp)
    assert len(ranks.seen) == 1


def test_after_stages_a_smaller_group_waits_for_its_layout() -> None:
    ranks = training(3, staged=True)
    kill(ranks, 1)
    leave(ranks, 0, sum_error="reset")
    leave(ranks, 2, sum_error="reset")
    ranks.tick(10.0)
    assert ranks.seen.count(instruction.PlanLayout((0, 2))) == 1
    assert not groups(ranks)
    ranks.tell(event.LayoutReady(ranks.now, (0,)))  # of another question
    assert not groups(ranks)
    ranks.plan_layout()
    assert [one.members for one in groups(ranks)] == [[0, 2]]
    go_on(ranks, lambda: len(groups(ranks)) == 2, train=True)
    assert groups(ranks)[1].members == [0, 1, 2]  # the plan's layout


def test_devices_that_hold_no_layout_wait_for_the_others() -> None:
    ranks = training(3, staged=True)
    ranks.least_for_layout = 3
    kill(ranks, 1)
    leave(ranks, 0, sum_error="reset")
    leave(ranks, 2, sum_error="reset")
    ranks.plan_layout()
    waits = "2 of 3 devices left, and memory: training waits up to 60 s for others"
    assert notices(ranks) == [waits]
    go_on(ranks, lambda: bool(groups(ranks)))
    assert [one.members for one in groups(ranks)] == [[0, 1, 2]]


@pytest.mark.parametrize("committed", [0, 5])
def test_if_the_others_do_not_come_back_it_is_infeasible_and_can_be_continued(
    committed: int,
) -> None:
    ranks = training(3, staged=True, restarts=0, committed=committed)
    ranks.least_for_layout = 3
    kill(ranks, 1)
    leave(ranks, 0, sum_error="reset")
    leave(ranks, 2, sum_error="reset")
    ranks.plan_layout()
    found = error(ranks)
    assert (found.exit_code, found.details) == (3, {"lacks": 2})
    assert str(found) == (
        "2 of 3 devices left, and memory (rank 1 (h1/cpu) was killed by SIGKILL; its log is "
        f"its.log){'; the checkpoint of step 5 is kept' if committed else ''}: "
        "run it again when the devices are back"
    )
    assert not groups(ranks)


def test_a_better_layout_makes_the_members_form_their_group_again_between_two_steps() -> None:
    ranks = training(3)
    ranks.tell(event.LayoutPlanned(ranks.now, (0, 1, 2), "other cuts"))
    go_on(ranks, lambda: bool(groups(ranks)), train=True)
    [again] = groups(ranks)
    assert (again.members, again.reason) == ([0, 1, 2], "other cuts; continues with 3 of 3")
    assert not again.broken
    assert again.checkpoint is None


def test_a_layout_for_other_members_or_for_a_group_that_ends_changes_nothing() -> None:
    ranks = training(3)
    ranks.tell(event.LayoutPlanned(ranks.now, (0, 1), "other cuts"))
    kill(ranks, 2)
    ranks.deliver(ranks.processes[2])
    ranks.tell(event.LayoutPlanned(ranks.now, (0, 1, 2), "other cuts"))
    assert not [one for one in ranks.seen if isinstance(one, instruction.AskToLeave)]
