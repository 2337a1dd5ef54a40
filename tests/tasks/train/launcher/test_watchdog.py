from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from training_case import request

from trainwright.infra.memory_limit import kernel_oom_kills
from trainwright.tasks.train.channel import LauncherChannel
from trainwright.tasks.train.launcher.rank_process import Worker
from trainwright.tasks.train.launcher.watchdog import WRITING_S, hung, stall_s, stuck

NOW = 1000.0


def member(
    number: int, *, heard_s_ago: float = 0.0, waits_s: float | None = None, **fields: object
) -> Worker:
    """A rank in a world, as the launcher knows it."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    channel = LauncherChannel()
    channel.close()
    worker = Worker(
        number,
        process,
        channel,
        Path("log"),
        state="in",
        heard_at=NOW - heard_s_ago,
        waits_s=waits_s,
    )
    for name, value in fields.items():
        setattr(worker, name, value)
    return worker


def test_who_computes_while_the_others_wait_too_long_hangs() -> None:
    ranks = [member(0, waits_s=61.0), member(1), member(2, waits_s=3.0)]
    assert [(rank.number, why) for rank, why in hung(ranks, NOW, 60.0)] == [
        (1, "let the others wait for 60 s and was killed")
    ]


def test_who_is_silent_hangs_and_those_that_wait_for_it_do_not() -> None:
    ranks = [member(0, waits_s=70.0), member(1, heard_s_ago=65.0)]
    assert [rank.number for rank, _ in hung(ranks, NOW, 60.0)] == [1]


def test_where_all_wait_too_long_one_is_given_up_and_where_some_began_late_none() -> None:
    assert [
        rank.number
        for rank, _ in hung([member(0, waits_s=61.0), member(1, waits_s=62.0)], NOW, 60.0)
    ] == [1]
    assert hung([member(0, waits_s=61.0), member(1, waits_s=5.0)], NOW, 60.0) == []


def test_who_waits_in_a_world_that_a_lost_rank_has_broken_is_not_the_one_that_hangs() -> None:
    assert hung([member(0, waits_s=61.0)], NOW, 60.0, broken=True) == []
    assert [
        rank.number for rank, _ in hung([member(0, heard_s_ago=65.0)], NOW, 60.0, broken=True)
    ] == [0]


def test_who_does_not_come_to_the_end_of_a_step_hangs_whether_others_wait_or_none_does() -> None:
    alone = [member(0, computes_s=61.0)]
    assert [(rank.number, why) for rank, why in hung(alone, NOW, 60.0)] == [
        (0, "computed for 60 s without coming to the end of a step and was killed")
    ]
    assert hung([member(0, computes_s=59.0)], NOW, 60.0) == []
    both = [member(0, waits_s=62.0), member(1, computes_s=62.0)]
    assert [rank.number for rank, _ in hung(both, NOW, 60.0)] == [1]
    silent = [member(0, computes_s=61.0, heard_s_ago=61.0)]
    assert [why for _, why in hung(silent, NOW, 60.0)] == [
        "gave no sign of life for 60 s and was killed"
    ]


def test_how_long_a_rank_may_take_follows_its_batch_by_now(tmp_path: Path) -> None:
    asked = request(
        tmp_path, [240, 8], faults={"stall_timeout": "1s"}
    )  # of 10 ms, at most 20, a step
    assert stall_s(asked, [240, 8]) == 1.0
    assert stall_s(asked, [0, 248]) == pytest.approx(20 * 0.02 * 248 / 8)
    assert stall_s(asked, [120, 0]) == 1.0


def test_a_rank_that_writes_a_checkpoint_has_longer() -> None:
    ranks = [member(0, writing=True), member(1, waits_s=61.0)]
    assert hung(ranks, NOW, 60.0) == []
    assert [
        rank.number for rank, _ in hung([ranks[0], member(1, waits_s=WRITING_S + 1)], NOW, 60.0)
    ] == [0]


def test_only_who_waits_is_stuck_in_a_broken_world() -> None:
    ranks = [
        member(0, waits_s=2.5),
        member(1),
        member(2, waits_s=2.5, done={}),
        member(3, state="joining"),
    ]
    assert [rank.number for rank in stuck(ranks, 3.0)] == [0, 3]
    assert stuck(ranks, 1.0) == []


def test_the_kernels_kill_for_want_of_memory_is_told_from_another(tmp_path: Path) -> None:
    group = Path("/sys/fs/cgroup/memory") / f"trainwright-test-{tmp_path.name}"
    limit = group / "memory.limit_in_bytes"
    try:
        group.mkdir()
        limit.write_text(str(40 << 20))
    except OSError:
        pytest.skip("no right to limit a process's memory by a cgroup")
    try:
        before = kernel_oom_kills()
        join = f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(__import__('os').getpid())); "
        worker = member(0)
        worker.process = subprocess.Popen([sys.executable, "-c", join + "bytearray(400 << 20)"])
        assert worker.process.wait() == -signal.SIGKILL
        kills = kernel_oom_kills() - before
        assert (
            worker.how_it_ended(kills)
            == "was killed by SIGKILL, most likely by the kernel for want of memory"
        )
        assert worker.how_it_ended(0) == "was killed by SIGKILL"
    finally:
        group.rmdir()
