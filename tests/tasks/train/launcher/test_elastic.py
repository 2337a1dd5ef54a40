"""Real ranks are killed or stopped during training: no step is lost or done twice."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from training_case import (
    NO_SPARE,
    ROWS,
    SLOW,
    alone,
    assert_every_sample_once,
    once,
    pids,
    request,
    rows,
    when_checkpoint,
    with_min_count,
)

from trainwright.estimator.curves import Interval
from trainwright.tasks.errors import TrainingFailed
from trainwright.tasks.runs.artefacts.training_result import SplitEvent
from trainwright.tasks.train import ramp, train


@pytest.mark.parametrize(
    ("backend", "ranks", "victim"),
    [
        ("torch", 2, 0),
        ("horovod", 3, 0),
    ],
)
def test_training_continues_when_a_rank_is_killed_and_it_comes_back(
    tmp_path: Path, heard: list[dict[str, Any]], backend: str, ranks: int, victim: int
) -> None:
    batches = [60 // ranks] * ranks
    spec: dict[str, Any] = {
        "epochs": 2,
        "model": {"norm": True, "dropout": 0.1},
        "backend": backend,
    }
    asked = request(
        tmp_path / "a", batches, devices=[{"type": "emulated", "speed": 0.5}] * ranks, **spec
    )
    watcher = when_checkpoint(
        tmp_path / "a", 5, lambda: os.kill(pids(heard)[victim], signal.SIGKILL)
    )
    result = train(asked)
    watcher.join()
    lost = result.split_events[0]
    killed = f"rank {victim} (here/{victim}) was killed by SIGKILL; "
    assert lost.reason.startswith(killed)
    if backend == "torch":  # Horovod may keep another rank in the broken sum until it is killed too
        assert lost.reason.startswith(f"{killed}continues with {ranks - 1} of {ranks}")
    assert lost.batch_sizes[victim] == 0
    assert sum(lost.batch_sizes) == 60
    assert lost.step >= 5
    assert result.steps == 48
    losses = assert_every_sample_once(asked, ranks, 2)
    assert sum(device.samples for device in result.devices) == 2 * ROWS
    assert [row["epoch"] for row in rows(asked, "epochs")] == [0, 1]
    assert [row["step"] for row in rows(asked, "splits")] == [
        event.step for event in result.split_events
    ]

    if ranks == 2:  # a sum of two has only one order, so a replay is exact
        again = request(tmp_path / "b", batches, **spec).model_copy(
            update={"replay_events": result.split_events}
        )
        train(again)
        assert assert_every_sample_once(again, ranks, 2) == losses


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "horovod"])
def test_a_replacement_joins_between_two_steps(
    tmp_path: Path, heard: list[dict[str, Any]], backend: str
) -> None:
    devices = [{"type": "emulated", "speed": 1.0}] * 2
    asked = request(tmp_path, [40, 20], devices=devices, epochs=400, backend=backend)
    stop = threading.Event()
    first = when_checkpoint(tmp_path, 5, lambda: os.kill(pids(heard)[1], signal.SIGKILL))
    back = [event for event in heard if event["event"] == "split"]

    def is_back() -> bool:
        back[:] = [
            event for event in heard if event["event"] == "split" and "is back" in event["reason"]
        ]
        return bool(back)

    second = once(is_back, stop.set)
    with pytest.raises(Exception, match="stopped after step"):
        train(asked, stop=stop)
    first.join()
    second.join()
    assert back[0]["reason"] == "rank 1 (here/1) is back; continues with 2 of 2"
    assert back[0]["batch_sizes"] == [40, 20]
    assert not any(
        event["state"] == "was killed by SIGABRT" for event in heard if event["event"] == "rank"
    )
    steps = [row["step"] for row in rows(asked, "steps-rank0")]
    assert steps == list(range(len(steps)))
    assert len(pids(heard)) == 2


@pytest.mark.slow
def test_with_too_few_devices_training_saves_a_checkpoint_and_fails_clearly(
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


def test_a_stopped_rank_counts_as_lost_after_the_stall_timeout(
    tmp_path: Path, heard: list[dict[str, Any]]
) -> None:
    asked = request(
        tmp_path, [40, 20], devices=SLOW, epochs=1, backend="torch", faults={"stall_timeout": "2s"}
    )
    watcher = when_checkpoint(tmp_path, 5, lambda: os.kill(pids(heard)[1], signal.SIGSTOP))
    result = train(asked)
    watcher.join()
    assert "2 s and was killed; continues with 1 of 2" in result.split_events[0].reason
    assert_every_sample_once(asked, 2, 1)


def test_a_rank_with_many_times_its_planned_batch_does_not_count_as_hung(
    tmp_path: Path, heard: list[dict[str, Any]]
) -> None:
    planned = Interval(
        median=0.08, low=0.08, high=0.081
    )  # a step of the slow rank alone takes 2.5 s
    devices = [{"type": "emulated", "speed": speed, "step_time_s": planned} for speed in (3.0, 0.1)]
    faults = {"restarts": 0, "stall_timeout": "2s"}
    asked = request(
        tmp_path,
        [240, 8],
        devices=devices,
        backend="torch",
        checkpoint={"every_steps": 2},
        faults=faults,
    )
    watcher = when_checkpoint(tmp_path, 2, lambda: os.kill(pids(heard)[0], signal.SIGKILL))
    result = train(asked)
    watcher.join()
    assert [device.batch_size for device in result.devices] == [0, 248]
    assert_every_sample_once(asked, 2, 1)


HANGING = """
import os, time, torch


class Net(torch.nn.Sequential):
    passes = 0

    def forward(self, images):
        self.passes += 1
        if self.passes == 14 and os.environ["HOROVOD_RANK"] in {ranks}:
            try:
                os.close(os.open({once!r} + os.environ["HOROVOD_RANK"], os.O_CREAT | os.O_EXCL))
                time.sleep(600)
            except FileExistsError:
                pass
        return super().forward(images)


def build_model():
    return Net(torch.nn.Flatten(), torch.nn.Linear(64, 10))
"""
"""a model that hangs in its 14th forward pass, once on each of these ranks"""


@pytest.mark.parametrize(
    ("backend", "batches", "hanging"),
    [
        ("torch", [40, 20], [1]),
        ("horovod", [60], [0]),
        pytest.param("torch", [40, 20], [0, 1], marks=pytest.mark.slow),
    ],
)
def test_only_ranks_that_hang_in_the_model_count_as_lost_even_if_no_other_waits(
    tmp_path: Path,
    heard: list[dict[str, Any]],
    backend: str,
    batches: list[int],
    hanging: list[int],
) -> None:
    asked = request(tmp_path, batches, epochs=2, backend=backend, faults={"stall_timeout": "2s"})
    model = HANGING.format(ranks=[str(number) for number in hanging], once=str(tmp_path / "once-"))
    (Path(asked.source_folder) / "net.py").write_text(model)
    result = train(asked)
    assert result.steps == 48
    lost = [
        event["rank"] for event in heard if event["event"] == "rank" and "2 s" in event["state"]
    ]
    assert sorted(lost) == hanging
    assert_every_sample_once(asked, len(batches), 2)


RATES = [1e-4 * 1.05**number for number in range(60)]
"""steps of a ramp that takes some seconds on slow devices"""


@pytest.mark.parametrize(
    ("backend", "victim", "by"),
    [
        ("torch", 0, signal.SIGKILL),
        pytest.param("horovod", 1, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_search_that_loses_a_rank_restarts_and_finds_the_same_points(
    tmp_path: Path, heard: list[dict[str, Any]], backend: str, victim: int, by: signal.Signals
) -> None:
    faults = {"stall_timeout": "2s"} if by == signal.SIGSTOP else {}
    asked = request(tmp_path, [40, 20], devices=SLOW, backend=backend, faults=faults)
    watcher = once(
        lambda: any(event["event"] == "ramp" and event["step"] > 5 for event in heard),
        lambda: os.kill(pids(heard)[victim], by),
    )
    found = ramp(asked, RATES)
    watcher.join()
    (said,) = [event["reason"] for event in heard if event["event"] == "world"]
    how = (
        "was killed by SIGKILL"
        if by == signal.SIGKILL
        else "sent no heartbeat for 2 s and was killed"
    )
    assert f"rank {victim} (here/{victim}) {how}" in said
    assert said.endswith("continues with 2 of 2")
    assert found == ramp(request(tmp_path / "undisturbed", [40, 20], backend=backend), RATES)


@pytest.mark.slow
def test_the_ramp_continues_without_a_rank_that_is_not_replaced(
    tmp_path: Path, heard: list[dict[str, Any]]
) -> None:
    asked = request(tmp_path, [20] * 3, devices=[SLOW[1]] * 3, backend="torch", **NO_SPARE)
    watcher = once(
        lambda: any(event["event"] == "ramp" for event in heard),
        lambda: os.kill(pids(heard)[2], signal.SIGKILL),
    )
    found = ramp(asked, RATES)
    watcher.join()
    assert [event["ranks"] for event in heard if event["event"] == "world"] == [[0, 1]]
    of_two = ramp(request(tmp_path / "two", [30, 30], backend="torch"), RATES)
    assert [one.loss for one in found] == pytest.approx([one.loss for one in of_two], rel=1e-4)


@pytest.mark.slow
def test_many_kills_in_a_row_do_not_change_the_final_accuracy(
    tmp_path: Path, heard: list[dict[str, Any]]
) -> None:
    import random

    count, epochs = 4, 14
    devices = [
        {"type": "emulated", "speed": 0.5}
    ] * 3  # steps of 40 ms or more take twice as long as the kills
    asked = request(tmp_path / "a", [20] * 3, devices=devices, epochs=epochs, backend="horovod")
    over, draw, kills = threading.Event(), random.Random(1), []

    def torment() -> None:
        seen = 0
        while len(kills) < count and not over.wait(draw.uniform(0.1, 1)):
            alive, checkpoints = (
                list(pids(heard).items()),
                sum(event["event"] == "checkpoint" for event in heard),
            )
            if alive and checkpoints > seen:  # it has made progress since the last kill
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
    assert len(kills) == count
    assert_every_sample_once(asked, 3, epochs)
    found = []
    for seed in range(3):
        metrics: list[dict[str, float]] = []
        alone(request(tmp_path / str(seed), [60], epochs=epochs, seed=seed), metrics=metrics)
        found.append(metrics[-1]["accuracy"])
    assert abs(result.metrics["accuracy"] - found[0]) <= max(found) - min(found) + 0.01


@pytest.mark.slow
def test_the_rate_of_a_growing_batch_survives_a_lost_rank_and_is_the_same_in_a_replay(
    tmp_path: Path, heard: list[dict[str, Any]]
) -> None:
    spec: dict[str, Any] = {
        "epochs": 2,
        "schedule": "cosine",
        "adaptive_batch": True,
        "learning_rate_rule": "adascale",
        "batch_bounds": [32, 120],
        "backend": "torch",
    }
    asked = request(
        tmp_path / "a", [40, 20], devices=[{"type": "emulated", "speed": 0.5}] * 2, **spec
    )
    watcher = when_checkpoint(tmp_path / "a", 15, lambda: os.kill(pids(heard)[0], signal.SIGKILL))
    result = train(asked)
    watcher.join()
    lost = next(event for event in result.split_events if event.batch_sizes[0] == 0)
    assert result.noise_scale is not None
    losses = assert_every_sample_once(asked, 2, 2)
    survivor = {row["step"]: row for row in rows(asked, "steps-rank1")}
    assert survivor[lost.step]["noise_scale"] > 0
    again = request(tmp_path / "b", [40, 20], **spec).model_copy(
        update={"replay_events": result.split_events}
    )
    train(again)
    assert assert_every_sample_once(again, 2, 2) == losses
    replayed = {row["step"]: row["learning_rate"] for row in rows(again, "steps-rank1")}
    assert replayed == {step: row["learning_rate"] for step, row in survivor.items()}


@pytest.mark.slow
def test_a_split_event_of_an_absent_rank_is_replayed_with_an_empty_share(tmp_path: Path) -> None:
    events = [
        SplitEvent(step=4, batch_sizes=[60, 0], reason="gone"),
        SplitEvent(step=9, batch_sizes=[20, 40], reason="back"),
    ]
    asked = request(tmp_path, [40, 20], model={"norm": True}).model_copy(
        update={"replay_events": events}
    )
    assert train(asked).split_events == events
    assert [row["batch_size"] for row in rows(asked, "steps-rank1")][:10] == [20] * 4 + [0] * 5 + [
        40
    ]
    assert_every_sample_once(asked, 2, 1)
