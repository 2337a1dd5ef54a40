"""Real ranks that are killed, stopped, or fail while they train: the others go on, and nothing is lost or done twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from training_case import ROWS, assert_every_sample_once, once, request, rows, when_checkpoint

from trainwright.tasks import progress
from trainwright.tasks.artefacts import SplitEvent
from trainwright.tasks.errors import BadInput, TrainingFailed
from trainwright.tasks.train import TrainRequest, ramp, train

SLOW = [{"type": "emulated", "speed": 1.0}, {"type": "emulated", "speed": 0.5}]
"""Devices on which a step of 40 and 20 samples takes 40 ms."""
HOSTILE = """
import os, pathlib, torch

class Net(torch.nn.Module):
    def __init__(self, what, least, mark):
        super().__init__()
        self.what, self.least, self.mark = what, least, pathlib.Path(mark)
        self.out, self.calls = torch.nn.Linear(64, 10), 0

    def forward(self, images):
        scores = self.out(images.flatten(1))
        if self.training:
            self.calls += 1
            if self.what == "memory" and len(images) > self.least:
                raise MemoryError
            if self.calls > 7 and (self.what.endswith("always") or self.is_first()):
                if self.what.startswith("nan"):
                    return scores * float("nan")
                if self.what.startswith("error"):
                    raise RuntimeError("a cable came loose")
        return scores

    def is_first(self):
        try:
            self.mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

def build_model(what, least=0, mark="mark"):
    return Net(what, least, mark)
"""
GLUTTON = """
import os, torch

class Net(torch.nn.Module):
    def __init__(self, least):
        super().__init__()
        self.least, self.out = least, torch.nn.Linear(64, 10)

    def forward(self, images):
        if self.training and len(images) > self.least and os.environ["HOROVOD_RANK"] == "0":
            open("GROUP", "w").write(str(os.getpid()))
            self.held = torch.ones(1 << 28)
        return self.out(images.flatten(1))

def build_model(what, least=0, mark="mark"):
    return Net(least)
"""


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is said about progress while the test runs."""
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(progress, "_listeners", [events.append])
    return events


def pids(heard: list[dict[str, Any]]) -> dict[int, int]:
    """The loaded process of each rank."""
    found = {}
    for event in [event for event in heard if event["event"] == "rank"]:
        found[event["rank"]] = event["pid"] if event["state"] == "loaded" else 0
    return {number: pid for number, pid in found.items() if pid}


def hostile(folder: Path, batches: list[int], what: str, least: int = 0, **train_spec: Any) -> TrainRequest:
    asked = request(folder, batches, model={"what": what, "least": least, "mark": str(folder / "mark")}, **train_spec)
    (folder / "source" / "net.py").write_text(HOSTILE)
    return asked


def with_min_count(asked: TrainRequest, count: int) -> TrainRequest:
    devices = asked.job.devices.model_copy(update={"min_count": count})
    return asked.model_copy(update={"job": asked.job.model_copy(update={"devices": devices})})


@pytest.mark.parametrize(
    ("backend", "ranks", "victim"),
    [
        ("torch", 2, 0),
        ("horovod", 3, 0),
        pytest.param("torch", 3, 1, marks=pytest.mark.slow),
        pytest.param("horovod", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_the_others_go_on_when_a_rank_is_killed_and_it_comes_back(
    tmp_path: Path, heard: list[dict[str, Any]], backend: str, ranks: int, victim: int
) -> None:
    batches = [60 // ranks] * ranks
    spec: dict[str, Any] = {"epochs": 2, "model": {"norm": True, "dropout": 0.1}, "backend": backend}
    asked = request(tmp_path / "a", batches, devices=[{"type": "emulated", "speed": 0.5}] * ranks, **spec)
    watcher = when_checkpoint(tmp_path / "a", 5, lambda: os.kill(pids(heard)[victim], signal.SIGKILL))
    result = train(asked)
    watcher.join()
    lost = result.split_events[0]
    killed = f"rank {victim} (here/{victim}) was killed by SIGKILL; "
    assert lost.reason.startswith(killed)
    if backend == "torch":  # Horovod may keep another in the broken sum, until that one is killed too
        assert lost.reason.startswith(f"{killed}goes on with {ranks - 1} of {ranks}")
    assert lost.batch_sizes[victim] == 0
    assert sum(lost.batch_sizes) == 60
    assert lost.step >= 5
    assert result.steps == 48
    losses = assert_every_sample_once(asked, ranks, 2)
    assert sum(device.samples for device in result.devices) == 2 * ROWS
    assert [row["epoch"] for row in rows(asked, "epochs")] == [0, 1]
    assert [row["step"] for row in rows(asked, "splits")] == [event.step for event in result.split_events]

    if ranks == 2:  # the order of a sum of two is none: a replay is exact
        again = request(tmp_path / "b", batches, **spec).model_copy(update={"replay_events": result.split_events})
        train(again)
        assert assert_every_sample_once(again, ranks, 2) == losses


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "horovod"])
def test_a_replacement_joins_between_two_steps(tmp_path: Path, heard: list[dict[str, Any]], backend: str) -> None:
    devices = [{"type": "emulated", "speed": 1.0}] * 2
    asked = request(tmp_path, [40, 20], devices=devices, epochs=400, backend=backend)
    stop = threading.Event()
    first = when_checkpoint(tmp_path, 5, lambda: os.kill(pids(heard)[1], signal.SIGKILL))
    back = [event for event in heard if event["event"] == "split"]

    def is_back() -> bool:
        back[:] = [event for event in heard if event["event"] == "split" and "is back" in event["reason"]]
        return bool(back)

    second = once(is_back, stop.set)
    with pytest.raises(Exception, match="stopped after step"):
        train(asked, stop=stop)
    first.join()
    second.join()
    assert back[0]["reason"] == "rank 1 (here/1) is back; goes on with 2 of 2"
    assert back[0]["batch_sizes"] == [40, 20]
    assert not any(event["state"] == "was killed by SIGABRT" for event in heard if event["event"] == "rank")
    steps = [row["step"] for row in rows(asked, "steps-rank0")]
    assert steps == list(range(len(steps)))
    assert len(pids(heard)) == 2


@pytest.mark.slow
def test_with_a_minimum_of_all_the_others_wait_for_the_replacement(tmp_path: Path, heard: list[dict[str, Any]]) -> None:
    asked = with_min_count(request(tmp_path, [40, 20], devices=SLOW, epochs=1, backend="torch"), 2)
    watcher = when_checkpoint(tmp_path, 5, lambda: os.kill(pids(heard)[0], signal.SIGKILL))
    result = train(asked)
    watcher.join()
    assert result.steps == 24
    assert all(0 not in event.batch_sizes for event in result.split_events)
    assert_every_sample_once(asked, 2, 1)


@pytest.mark.slow
def test_fewer_than_the_minimum_is_a_checkpoint_and_a_clear_failure(
    tmp_path: Path, heard: list[dict[str, Any]]
) -> None:
    spec = {"devices": SLOW, "epochs": 50, "backend": "torch", "checkpoint": {"every_steps": 7}}
    asked = with_min_count(request(tmp_path, [40, 20], faults={"restarts": 0}, **spec), 2)
    watcher = when_checkpoint(tmp_path, 7, lambda: os.kill(pids(heard)[1], signal.SIGKILL))
    with pytest.raises(
        TrainingFailed, match=r"1 of 2 devices left, and devices.min_count is 2.*rank 1 .*SIGKILL"
    ) as caught:
        train(asked)
    watcher.join()
    step = caught.value.details["step"]
    assert (tmp_path / f"run/checkpoints/step-{step:08d}/state.json").exists()
    assert [row["step"] for row in rows(asked, "steps-rank0")] == list(range(step))


@pytest.mark.slow
def test_when_all_ranks_are_killed_training_begins_again_at_the_last_checkpoint(
    tmp_path: Path, heard: list[dict[str, Any]]
) -> None:
    asked = request(tmp_path / "a", [40, 20], devices=SLOW, epochs=2, backend="torch", checkpoint={"every_steps": 20})

    def kill() -> None:
        for pid in pids(heard).values():
            os.kill(pid, signal.SIGKILL)

    watcher = when_checkpoint(tmp_path / "a", 20, kill)
    result = train(asked)
    watcher.join()
    assert result.steps == 48
    losses = assert_every_sample_once(asked, 2, 2)
    quiet = request(tmp_path / "b", [40, 20], epochs=2, backend="torch", checkpoint={"every_steps": 20})
    train(quiet)
    assert losses[:20] == assert_every_sample_once(quiet, 2, 2)[:20]


@pytest.mark.parametrize("backend", ["torch", pytest.param("horovod", marks=pytest.mark.slow)])
def test_a_stopped_rank_counts_as_lost_after_the_stall_timeout(
    tmp_path: Path, heard: list[dict[str, Any]], backend: str
) -> None:
    asked = request(tmp_path, [40, 20], devices=SLOW, epochs=1, backend=backend, faults={"stall_timeout": "2s"})
    watcher = when_checkpoint(tmp_path, 5, lambda: os.kill(pids(heard)[1], signal.SIGSTOP))
    result = train(asked)
    watcher.join()
    assert "2 s and was killed; goes on with 1 of 2" in result.split_events[0].reason
    assert_every_sample_once(asked, 2, 1)


@pytest.mark.slow
def test_a_launcher_that_is_killed_leaves_no_rank_and_what_follows_is_the_same(tmp_path: Path) -> None:
    spec: dict[str, Any] = {"devices": SLOW, "epochs": 2, "backend": "torch", "model": {"norm": True, "dropout": 0.2}}
    asked = request(tmp_path / "a", [40, 20], **spec)
    (tmp_path / "request.json").write_text(asked.model_dump_json(by_alias=True))
    program = (
        "import sys; from pathlib import Path; from trainwright.tasks.train import TrainRequest, train;"
        "train(TrainRequest.model_validate_json(Path(sys.argv[1]).read_text()))"
    )
    said = tmp_path / "progress"
    launcher = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "request.json")],
        env={**os.environ, "TRAINWRIGHT_PROGRESS": str(said)},
    )
    when_checkpoint(tmp_path / "a", 30, launcher.kill).join()
    launcher.wait()
    loaded = [int(line.split('"pid": ')[1].split(",")[0]) for line in said.read_text().splitlines() if '"pid"' in line]
    assert len(loaded) == 2
    deadline = time.monotonic() + 5
    while any(_alive(pid) for pid in loaded) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in loaded)
    assert train(asked).resumed_from_step is not None
    whole = request(tmp_path / "b", [40, 20], **spec)
    train(whole)
    assert assert_every_sample_once(asked, 2, 2) == assert_every_sample_once(whole, 2, 2)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_sums_that_fail_again_and_again_without_a_lost_rank_end_the_training(tmp_path: Path) -> None:
    asked = request(tmp_path, [20, 20], devices=SLOW, epochs=1, backend="torch", faults={"wait_for_devices": "3s"})
    cut = "from trainwright.tasks.train.collective import PeersLost\n\ndef loss(*_):\n    raise PeersLost('no route')\n"
    source = tmp_path / "source" / "net.py"
    source.write_text(source.read_text() + cut)
    with pytest.raises(
        TrainingFailed, match=r"sums failed \d times in a row, and no rank was lost: no route; hosts must.*say more$"
    ):
        train(asked)


def test_an_error_that_comes_once_costs_a_process_but_not_the_training(tmp_path: Path) -> None:
    asked = hostile(tmp_path, [40, 20], "error once", epochs=2, backend="torch")
    result = train(asked)
    assert "failed (RuntimeError: a cable came loose); goes on with 1 of 2" in result.split_events[0].reason
    assert_every_sample_once(asked, 2, 2)


def test_an_error_that_comes_back_at_the_same_step_ends_the_training_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match=r"rank \d .*a cable came loose.*its log is"):
        train(hostile(tmp_path, [40, 20], "error always", backend="torch"))


def test_a_loss_that_is_no_number_goes_back_to_the_checkpoint_with_half_the_rate(tmp_path: Path) -> None:
    asked = hostile(tmp_path, [40, 20], "nan once", epochs=1, backend="torch")
    result = train(asked)
    assert len(result.split_events) == 1
    assert result.split_events[0].step == 5
    assert (
        "the loss is nan at step 7 (learning rate 0.01); back to step 5 with 50 % of" in result.split_events[0].reason
    )
    assert_every_sample_once(asked, 2, 1)
    assert [row["learning_rate"] for row in rows(asked, "steps-rank0")] == [0.01] * 5 + [0.005] * 19


def test_a_loss_that_stays_no_number_fails_naming_step_and_rate(tmp_path: Path) -> None:
    asked = hostile(tmp_path, [40, 20], "nan always", backend="torch")
    with pytest.raises(TrainingFailed, match=r"the loss is nan at step 5 \(learning rate 0.00125\), after 3 returns"):
        train(asked)


def test_a_rank_without_memory_gets_a_batch_that_fits_and_the_others_take_more(tmp_path: Path) -> None:
    asked = hostile(tmp_path, [50, 10], "memory", least=37, epochs=1, backend="torch")
    result = train(asked)
    assert result.split_events[0].reason == (
        "rank 0 (here/0) has no memory for a batch of 50; 25 would fit, and it takes no more from now on; goes on with 2 of 2"
    )
    assert result.split_events[0].batch_sizes == [25, 35]
    assert [device.batch_size for device in result.devices] == [25, 35]
    assert_every_sample_once(asked, 2, 1)


@pytest.mark.slow
def test_a_batch_that_fits_nowhere_is_a_clear_failure(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match=r"global batch of 60 does not fit into the memory.*global_batch_size"):
        train(hostile(tmp_path, [40, 20], "memory", least=10, epochs=1, backend="torch"))


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_ramp_by_name(tmp_path: Path, heard: list[dict[str, Any]]) -> None:
    asked = request(tmp_path, [40, 20], devices=SLOW)
    watcher = once(
        lambda: any(event["event"] == "ramp" for event in heard), lambda: os.kill(pids(heard)[1], signal.SIGKILL)
    )
    with pytest.raises(TrainingFailed, match=r"rank 1 \(here/1\) was killed by SIGKILL.*rank-1\.log"):
        ramp(asked, [1e-5] * 2000)
    watcher.join()


def test_a_model_that_does_not_fit_its_labels_is_bad_input_and_not_tried_again(
    tmp_path: Path, heard: list[dict[str, Any]]
) -> None:
    with pytest.raises(BadInput, match="model: "):
        train(request(tmp_path, [40, 20], model={"broken": True}))
    assert not any(event["event"] == "world" for event in heard)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "horovod"])
def test_twenty_kills_in_a_row_end_in_the_accuracy_of_an_undisturbed_training(
    tmp_path: Path, heard: list[dict[str, Any]], backend: str
) -> None:
    import random

    devices = [{"type": "emulated", "speed": 1.0}] * 3
    asked = request(tmp_path / "a", [20] * 3, devices=devices, epochs=50, backend=backend)
    over, draw, kills = threading.Event(), random.Random(1), []

    def torment() -> None:
        seen = 0
        while len(kills) < 20 and not over.wait(draw.uniform(0.1, 2)):
            alive, checkpoints = list(pids(heard).items()), sum(event["event"] == "checkpoint" for event in heard)
            if alive and checkpoints > seen:  # it has gone on since the last kill
                number, pid = draw.choice(alive)
                os.kill(pid, signal.SIGKILL)
                kills.append(number)
                seen = checkpoints

    thread = threading.Thread(target=torment)
    thread.start()
    try:
        result = train(asked)
    finally:
        over.set()
        thread.join()
    assert len(kills) == 20
    assert_every_sample_once(asked, 3, 50)
    found = [train(request(tmp_path / str(seed), [60], epochs=50, seed=seed)).metrics["accuracy"] for seed in range(3)]
    assert abs(result.metrics["accuracy"] - found[0]) <= max(found) - min(found) + 0.01


@pytest.mark.slow
def test_the_rate_of_a_growing_batch_outlives_a_lost_rank_and_is_the_same_in_a_replay(
    tmp_path: Path, heard: list[dict[str, Any]]
) -> None:
    spec: dict[str, Any] = {
        "epochs": 2, "schedule": "cosine", "adaptive_batch": True, "learning_rate_rule": "adascale",
        "batch_bounds": [32, 120], "backend": "torch",
    }  # fmt: skip
    asked = request(tmp_path / "a", [40, 20], devices=[{"type": "emulated", "speed": 0.5}] * 2, **spec)
    watcher = when_checkpoint(tmp_path / "a", 15, lambda: os.kill(pids(heard)[0], signal.SIGKILL))
    result = train(asked)
    watcher.join()
    lost = next(event for event in result.split_events if event.batch_sizes[0] == 0)
    assert result.noise_scale is not None
    losses = assert_every_sample_once(asked, 2, 2)
    survivor = {row["step"]: row for row in rows(asked, "steps-rank1")}
    assert survivor[lost.step]["noise_scale"] > 0
    again = request(tmp_path / "b", [40, 20], **spec).model_copy(update={"replay_events": result.split_events})
    train(again)
    assert assert_every_sample_once(again, 2, 2) == losses
    replayed = {row["step"]: row["learning_rate"] for row in rows(again, "steps-rank1")}
    assert replayed == {step: row["learning_rate"] for step, row in survivor.items()}


@pytest.mark.slow
def test_a_split_event_of_an_absent_rank_is_replayed_as_a_share_of_nothing(tmp_path: Path) -> None:
    events = [
        SplitEvent(step=4, batch_sizes=[60, 0], reason="gone"),
        SplitEvent(step=9, batch_sizes=[20, 40], reason="back"),
    ]
    asked = request(tmp_path, [40, 20], model={"norm": True}).model_copy(update={"replay_events": events})
    assert train(asked).split_events == events
    assert [row["batch_size"] for row in rows(asked, "steps-rank1")][:10] == [20] * 4 + [0] * 5 + [40]
    assert_every_sample_once(asked, 2, 1)


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A cgroup whose processes may hold 700 MB."""
    group = Path("/sys/fs/cgroup/memory") / f"trainwright-test-{tmp_path.name}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(700 << 20))
    except OSError:
        pytest.skip("no right to limit a process's memory by a cgroup")
    yield group
    for _ in range(100):
        try:
            return group.rmdir()
        except OSError:
            time.sleep(0.05)


@pytest.mark.slow
def test_a_rank_that_the_kernel_kills_for_want_of_memory_comes_back_with_a_batch_that_fits(
    tmp_path: Path, heard: list[dict[str, Any]], small_memory: Path
) -> None:
    asked = hostile(tmp_path, [40, 20], "gluttony", least=30, epochs=1, backend="torch")
    asked = with_min_count(asked, 2)
    (tmp_path / "source" / "net.py").write_text(GLUTTON.replace("GROUP", str(small_memory / "cgroup.procs")))
    result = train(asked)
    assert "most likely by the kernel for want of memory" in result.split_events[0].reason
    assert "has no memory for a batch of 40; 20 would fit" in result.split_events[0].reason
    assert result.split_events[0].batch_sizes == [20, 40]
    assert_every_sample_once(asked, 2, 1)
