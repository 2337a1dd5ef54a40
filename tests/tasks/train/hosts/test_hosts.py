"""Training over ssh on hosts of a lab: same losses as here, losses of hosts, clean-up."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import doors
import pytest
from hosts_case import SLOW, no_python, on_hosts, other_sources, until
from lab import Lab
from training_case import assert_every_sample_once, once, request, rows, scalars, when_checkpoint

from trainwright.infra.background_process import stop as stop_service
from trainwright.infra.s3_server import s3_service, start_s3
from trainwright.tasks.errors import Interrupted, TrainingFailed
from trainwright.tasks.storage.connect import open_store
from trainwright.tasks.train import TrainRequest, train
from trainwright.tasks.train.checkpoint.files import list_states
from trainwright.tasks.train.hosts import reconnect
from trainwright.tasks.train.record.metrics import read_rows


def losses(asked: TrainRequest, rank: int = 0) -> list[float]:
    return [row["loss"] for row in rows(asked, f"steps-rank{rank}")]


def notices(heard: list[dict[str, Any]]) -> list[str]:
    return [event["message"] for event in heard if event["event"] == "notice"]


def test_hosts_reach_the_same_losses_as_this_machine(
    tmp_path: Path, lab: Callable[..., Lab]
) -> None:
    made = lab()
    split: dict[str, Any] = {"backend": "horovod", "model": {"norm": True, "dropout": 0.2}}
    local = request(tmp_path / "local", [60, 40, 20], **split)
    expected = train(local)
    away = on_hosts(tmp_path / "away", made, [60, 40, 20], **split)
    result = train(away)
    assert losses(away) == losses(local)
    assert result.metrics == expected.metrics
    assert [losses(away, rank) for rank in (1, 2)] == [losses(local, rank) for rank in (1, 2)]
    logs = tmp_path / "away" / "run" / "logs"
    assert sorted(path.name for path in logs.glob("rank-*.log")) == [
        "rank-0.log",
        "rank-1.log",
        "rank-2.log",
    ]
    assert scalars(away)["loss/train"] == [
        (n, pytest.approx(loss)) for n, loss in enumerate(losses(away), 1)
    ]
    for host in made.hosts:
        assert until(lambda host=host: host.words() == [])


@pytest.mark.slow
def test_this_machine_trains_with_hosts_over_a_slow_link(
    tmp_path: Path, lab: Callable[..., Lab]
) -> None:
    made = lab(cores=[None], rate="100mbit")
    local = request(tmp_path / "local", [40, 20])
    train(local)
    mixed = on_hosts(tmp_path / "mixed", made, [40, 20], here=1)
    train(mixed)
    assert losses(mixed) == losses(local)


def test_a_killed_launcher_leaves_nothing_on_the_hosts(
    tmp_path: Path, lab: Callable[..., Lab]
) -> None:
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20], SLOW, epochs=100)
    (tmp_path / "request.json").write_text(asked.model_dump_json(by_alias=True))
    code = (
        "import sys; from pathlib import Path; "
        "from trainwright.tasks.train import TrainRequest, train; "
        "train(TrainRequest.model_validate_json(Path(sys.argv[1]).read_text()))"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "request.json")], env=os.environ
    )
    try:
        assert until(lambda: bool(list(tmp_path.glob("run/checkpoints/*/state.json"))))
        assert all(any("train.worker" in line for line in host.words()) for host in made.hosts)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    assert until(lambda: not any(host.words() for host in made.hosts))
    for host in made.hosts:
        left = subprocess.run(
            host.inside("ls", str(made.private / "home" / "nodes")), capture_output=True, check=True
        )
        assert left.stdout == b""


def kill_rank(made: Lab, number: int, signal_number: int = signal.SIGKILL) -> None:
    """Send a signal to the rank with this number, on its host."""
    for pid in [pid for host in made.hosts for pid in host.pids()]:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if (
                b"trainwright.tasks.train.worker.entry" in words
                and words[-2] == str(number).encode()
            ):
                os.kill(pid, signal_number)


def crash(made: Lab, number: int) -> None:
    """Kill all processes and connections of a host; its sshd still accepts new connections."""
    host = made.hosts[number]
    for pid in host.pids():
        if pid != host.sshd.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("backend", "victim", "here"),
    [
        ("torch", 0, 0),
        pytest.param("horovod", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_training_continues_when_a_rank_on_a_host_is_killed_and_it_comes_back(
    backend: str,
    victim: int,
    here: int,
    tmp_path: Path,
    lab: Callable[..., Lab],
    heard: list[dict[str, Any]],
) -> None:
    made = lab(cores=[None] * (2 - here))
    asked = on_hosts(tmp_path, made, [40, 20], SLOW, here=here, epochs=400, backend=backend)
    first = when_checkpoint(tmp_path, 5, lambda: kill_rank(made, victim))
    stop = threading.Event()

    def is_back() -> bool:
        return any(event["event"] == "split" and "is back" in event["reason"] for event in heard)

    second = once(is_back, stop.set)
    with pytest.raises(Interrupted, match=r"stopped after step \d+; its checkpoint is kept"):
        train(asked, stop=stop)
    first.join()
    second.join()
    reasons = [event["reason"] for event in heard if event["event"] == "split"]
    name = asked.plan.devices[victim].id
    assert reasons[0] == f"rank {victim} ({name}) was killed by SIGKILL; continues with 1 of 2"
    assert f"rank {victim} ({name}) is back; continues with 2 of 2" in reasons
    taken: Counter[int] = Counter()
    for row in [row for rank in (0, 1) for row in rows(asked, f"steps-rank{rank}")]:
        taken[row["step"]] += row["batch_size"]
    full = [
        taken[step] for step in range(len(taken)) if (step + 1) % 24
    ]  # the last batch of an epoch has the remaining rows
    assert set(full) == {60}
    assert sorted(taken) == list(range(len(taken)))


@pytest.mark.slow
def test_training_continues_without_a_silent_host(
    tmp_path: Path, lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        reconnect, "TRY_EVERY_S", 0.5
    )  # so that the training ends during an attempt
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20], SLOW, epochs=3)
    watcher = when_checkpoint(tmp_path, 5, lambda: made.cut("h2"))
    result = train(asked)
    watcher.join()
    assert re.search(
        r"rank 1 \(h2/cpu\) is lost: .*host h2.*; continues with 1 of 2",
        result.split_events[0].reason,
    )
    assert result.steps == 72
    assert_every_sample_once(asked, 2, 3)


@pytest.mark.slow
def test_a_stopped_rank_on_a_host_counts_as_lost_after_the_stall_timeout(
    tmp_path: Path, lab: Callable[..., Lab]
) -> None:
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20], SLOW, epochs=1, faults={"stall_timeout": "2s"})
    watcher = when_checkpoint(tmp_path, 5, lambda: kill_rank(made, 1, signal.SIGSTOP))
    result = train(asked)
    watcher.join()
    assert "2 s and was killed; continues with 1 of 2" in result.split_events[0].reason
    assert_every_sample_once(asked, 2, 1)


@pytest.mark.slow
def test_an_unreachable_store_costs_hosts_no_step_and_gets_their_checkpoints_later(
    tmp_path: Path, lab: Callable[..., Lab], home: Path, heard: list[dict[str, Any]]
) -> None:
    made = lab(cores=[None, None])
    start_s3(home)
    asked = on_hosts(
        tmp_path, made, [40, 20], SLOW, epochs=4, checkpoint={"every_steps": 6, "keep_last": 2}
    )
    asked = asked.model_copy(update={"run_uri": "s3://hosts/away"})

    def reached(step: int) -> Callable[[], bool]:
        return lambda: any(event["event"] == "train" and event["step"] >= step for event in heard)

    def break_and_mend() -> None:
        stop_service([s3_service(home)], grace_s=0)
        until(reached(70))
        start_s3(home)

    watcher = once(reached(20), break_and_mend)
    assert train(asked).steps == 96
    watcher.join()
    assert any(
        f"checkpoints are kept in {tmp_path / 'work' / 'spill'}" in one for one in notices(heard)
    )
    assert any("the store is back" in one for one in notices(heard))
    store = open_store("s3://hosts/away", doors.settings())
    assert [state.step for state in list_states(store)] == [90, 96]
    for rank in (0, 1):
        assert [row["step"] for row in read_rows(store, f"steps-rank{rank}")] == list(range(96))


def test_a_stop_during_the_connection_to_hosts_changes_nothing_there(
    tmp_path: Path, lab: Callable[..., Lab]
) -> None:
    made = lab(cores=[None, None])
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted, match="stopped before the first step"):
        train(on_hosts(tmp_path, made, [40, 20]), stop=stop)
    assert until(lambda: [host.words() for host in made.hosts] == [[], []])
    assert not list(tmp_path.glob("run/metrics/*"))


def test_a_lost_host_rejoins_the_training(
    tmp_path: Path,
    lab: Callable[..., Lab],
    heard: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconnect, "TRY_EVERY_S", 0.5)
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20], SLOW, epochs=400)
    first = when_checkpoint(tmp_path, 5, lambda: crash(made, 1))
    stop = threading.Event()
    second = once(
        lambda: any("continues with 2 of 2" in event.get("reason", "") for event in heard), stop.set
    )
    with pytest.raises(Interrupted, match=r"stopped after step \d+; its checkpoint is kept"):
        train(asked, stop=stop)
    first.join()
    second.join()
    reasons = [event["reason"] for event in heard if event["event"] == "split"]
    assert re.fullmatch(
        r"rank 1 \(h2/cpu\) is lost: .*host h2.*; continues with 1 of 2", reasons[0]
    )
    # Horovod may keep the other rank in the broken sum until it is killed too. Then that rank comes
    # back last.
    stuck = "rank 0 (h1/cpu) did not leave a group" in reasons[0]
    assert ("rank 1 (h2/cpu) is back" in reasons[0]) == stuck
    assert reasons[1] == f"rank {'0 (h1' if stuck else '1 (h2'}/cpu) is back; continues with 2 of 2"
    assert f"host h2 ({made.hosts[1].address}) answers again" in notices(heard)
    taken: Counter[int] = Counter()
    for row in [row for rank in (0, 1) for row in rows(asked, f"steps-rank{rank}")]:
        taken[row["step"]] += row["batch_size"]
    assert sorted(taken) == list(range(len(taken)))
    assert {taken[step] for step in range(len(taken)) if (step + 1) % 24} == {60}
    assert until(lambda: [host.words() for host in made.hosts] == [[], []])


def test_a_lost_host_that_can_not_rejoin_gives_one_notice_and_the_training_continues(
    tmp_path: Path,
    lab: Callable[..., Lab],
    heard: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconnect, "TRY_EVERY_S", 0.5)
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20], SLOW, epochs=400)

    def change() -> None:
        other_sources(made, 1, tmp_path)
        crash(made, 1)

    def trained_on() -> bool:
        positions = [
            at for at, event in enumerate(heard) if "reconnecting to" in str(event.get("message"))
        ]
        return (
            bool(positions)
            and sum(event["event"] == "train" for event in heard[positions[0] :]) > 3
        )

    first = when_checkpoint(tmp_path, 5, change)
    stop = threading.Event()
    second = once(trained_on, stop.set)
    with pytest.raises(Interrupted, match=r"stopped after step \d+; its checkpoint is kept"):
        train(asked, stop=stop)
    first.join()
    second.join()
    messages = [message for message in notices(heard) if "reconnecting to" in message]
    assert len(messages) == 1  # despite several attempts
    why = r"trainwright's sources: sha256 \w+… here, \w+… there; allowed: the same on all hosts"
    assert re.fullmatch(
        rf"reconnecting to a lost host every 0.5 s: host h2 \([0-9.]+\): {why}", messages[0]
    )
    splits = [event["batch_sizes"] for event in heard if event["event"] == "split"]
    assert splits == [[60, 0]]
    steps = [row["step"] for row in rows(asked, "steps-rank0")]
    assert steps == list(range(len(steps)))


@pytest.mark.slow
def test_when_all_hosts_are_lost_the_training_waits_for_them(
    tmp_path: Path,
    lab: Callable[..., Lab],
    heard: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconnect, "TRY_EVERY_S", 0.5)
    made = lab(cores=[None, None])
    asked = on_hosts(tmp_path, made, [40, 20], SLOW, epochs=8, checkpoint={"every_steps": 20})
    watcher = when_checkpoint(tmp_path, 20, lambda: [crash(made, number) for number in (0, 1)])
    assert train(asked).steps == 192
    watcher.join()
    assert_every_sample_once(asked, 2, 8)
    assert any("resumes from the checkpoint of step" in message for message in notices(heard))


@pytest.mark.slow
def test_if_no_lost_host_comes_back_in_time_training_fails_with_that_cause(
    tmp_path: Path, lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnect, "TRY_EVERY_S", 0.5)
    made = lab(cores=[None])
    asked = on_hosts(tmp_path, made, [40], SLOW, epochs=400, faults={"wait_for_devices": "3s"})

    def change() -> None:
        no_python(made, 0)
        crash(made, 0)

    watcher = when_checkpoint(tmp_path, 5, change)
    with pytest.raises(
        TrainingFailed,
        match=r"none of 1 devices is left and none came back in \d+ s.*checkpoint is kept",
    ):
        train(asked)
    watcher.join()
