"""Trainings with a changing global batch replay and resume to the last digit.

A learning-rate search leaves no trace in the training after it.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from training_case import LEARNING_RATE, NO_SPARE, once, pids, ranks, request, rows, when_checkpoint

from trainwright.tasks.errors import BadInput, Interrupted
from trainwright.tasks.runs.artefacts.training_result import SplitEvent
from trainwright.tasks.search_lr.learning_rate import choose, ladder
from trainwright.tasks.train import search, train
from trainwright.tasks.train.checkpoint.files import list_states
from trainwright.tasks.train.rank.optimizer import learning_rate_at

SLOW = [{"type": "emulated", "speed": 1.0}, {"type": "emulated", "speed": 0.5}]
GROWN = [
    SplitEvent(step=12, batch_sizes=[60, 30], reason="set by the test"),
    SplitEvent(step=28, batch_sizes=[100, 80], reason="set by the test"),
]


def losses(asked: Any, rank: int) -> list[tuple[int, float, float, int]]:
    return [
        (row["step"], row["loss"], row["learning_rate"], row["batch_size"])
        for row in rows(asked, f"steps-rank{rank}")
    ]


def test_a_stopped_training_with_a_grown_batch_resumes_to_the_last_digit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "devices": SLOW,
        "epochs": 3,
        "schedule": "cosine",
        "adaptive_batch": True,
        "learning_rate_rule": "adascale",
        "checkpoint": {"every_steps": 5},
        "batch_bounds": [32, 200],
        **NO_SPARE,
    }
    whole = request(tmp_path / "whole", [40, 20], **settings).model_copy(
        update={"replay_events": GROWN}
    )
    expected = train(whole)
    assert expected.split_events == GROWN
    assert expected.global_batch_size == 60
    assert [device.batch_size for device in expected.devices] == [100, 80]
    taken = [rows(whole, f"steps-rank{rank}") for rank in (0, 1)]
    for epoch in range(3):
        assert (
            sum(row["batch_size"] for own in taken for row in own if row["epoch"] == epoch) == 1438
        )
    assert expected.noise_scale is not None
    plain = learning_rate_at(12 * 60 + 8 * 90, 3 * 1438, LEARNING_RATE, "cosine")
    assert taken[0][20]["learning_rate"] / plain > 1.02

    stopped = request(tmp_path / "stopped", [40, 20], **settings).model_copy(
        update={"replay_events": GROWN}
    )
    stop = threading.Event()
    watcher = when_checkpoint(tmp_path / "stopped", 20, stop.set)
    with pytest.raises(Interrupted, match="checkpoint"):
        train(stopped, stop=stop)
    watcher.join()
    assert ranks() == {}
    result = train(stopped)
    assert result.resumed_from_step
    assert result.metrics == expected.metrics
    assert result.noise_scale == expected.noise_scale
    assert [losses(stopped, rank) for rank in (0, 1)] == [losses(whole, rank) for rank in (0, 1)]


def test_a_resumed_run_shares_its_grown_batch_over_the_devices_of_another_plan(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {
        "epochs": 3,
        "adaptive_batch": True,
        "checkpoint": {"every_steps": 5},
        "batch_bounds": [32, 90],
        **NO_SPARE,
    }
    stop = threading.Event()
    watcher = when_checkpoint(tmp_path, 20, stop.set)
    with pytest.raises(Interrupted, match="checkpoint"):
        train(
            request(tmp_path, [40, 20], devices=SLOW, **settings).model_copy(
                update={"replay_events": GROWN[:1]}
            ),
            stop=stop,
        )
    watcher.join()
    again = request(tmp_path, [20, 20, 20], **settings)
    result = train(again)
    since = result.resumed_from_step
    assert since
    assert result.split_events[1] == SplitEvent(
        step=since, batch_sizes=[30, 30, 30], reason="another plan; begins with 3 of 3"
    )
    recorded = [row for rank in range(3) for row in rows(again, f"steps-rank{rank}")]
    assert sum(row["batch_size"] for row in recorded if row["step"] == since) == 90
    for epoch in range(3):
        assert sum(row["batch_size"] for row in recorded if row["epoch"] == epoch) == 1438


def test_a_checkpoint_with_another_initial_batch_is_refused(tmp_path: Path) -> None:
    asked = request(tmp_path, [40, 20], adaptive_batch=True, validation_fraction=0.9)
    grown = [SplitEvent(step=1, batch_sizes=[60, 60], reason="set by the test")]
    train(asked.model_copy(update={"replay_events": grown}))
    other = request(tmp_path, [80, 40], adaptive_batch=True, validation_fraction=0.9)
    with pytest.raises(
        BadInput, match=r"a global batch of 120; the run's checkpoint .* was made with 60"
    ):
        train(other)


def test_the_batch_grows_if_larger_steps_cost_the_same_and_records_why(tmp_path: Path) -> None:
    # The emulated devices are so fast that a step costs the same for every batch.
    asked = request(
        tmp_path,
        [6, 2],
        epochs=12,
        adaptive_batch=True,
        batch_bounds=[8, 64],
        schedule="constant",
        checkpoint={"every_steps": 1000},
        **NO_SPARE,
    )
    result = train(asked)
    assert result.split_events
    first = result.split_events[0]
    assert sum(first.batch_sizes) == 16
    assert first.reason.startswith("global batch from 8 to 16: noise scale ")
    assert all(sum(event.batch_sizes) <= 64 for event in result.split_events)
    recorded = rows(asked, "steps-rank0") + rows(asked, "steps-rank1")
    for epoch in range(12):
        assert sum(row["batch_size"] for row in recorded if row["epoch"] == epoch) == 1438


def test_a_growing_batch_does_not_change_when_a_rank_is_lost_or_comes_back(
    tmp_path: Path, heard: list[dict[str, Any]]
) -> None:
    """Kills the first rank: its replacement takes its state from the others and checkpoints it."""
    asked = request(
        tmp_path,
        [6, 2],
        epochs=10_000,
        adaptive_batch=True,
        batch_bounds=[8, 64],
        schedule="constant",
        backend="torch",
        checkpoint={"every_steps": 100},
    )

    def split_because_of(word: str) -> bool:
        return any(event["event"] == "split" and word in event["reason"] for event in heard)

    stop = threading.Event()
    first = once(
        lambda: split_because_of("global batch"),
        lambda: os.kill(pids(heard)[0], signal.SIGKILL),
    )
    second = once(lambda: split_because_of("is back"), stop.set)
    with pytest.raises(Interrupted, match="its checkpoint is kept"):
        train(asked, stop=stop)
    first.join()
    second.join()
    state = list_states(asked.store())[-1]
    events = [SplitEvent.model_validate(event) for event in state.events]
    batches = [8, *(sum(event.batch_sizes) for event in events)]
    for before, after, event in zip(batches[:-1], batches[1:], events, strict=True):
        assert (before != after) == event.reason.startswith(
            f"global batch from {before} to {after}"
        )
    growth = state.adaptive["growth"]
    assert growth["base"] == 8
    assert growth["batch"] == batches[-1] == sum(state.split)
    assert growth["changes"] == sum(
        before != after for before, after in itertools.pairwise(batches)
    )
    assert min(state.split) > 0
    by_step: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows(asked, "steps-rank0") + rows(asked, "steps-rank1"):
        by_step[row["step"]].append(row)
    assert sorted(by_step) == list(range(state.step))
    for own in by_step.values():
        assert len({row["learning_rate"] for row in own}) == 1
        assert len({row["rank"] for row in own}) == len(own)
    changed_at = [0, *(event.step for event in events), state.step]
    for batch, (begin, end) in zip(batches, itertools.pairwise(changed_at), strict=True):
        taken = {sum(row["batch_size"] for row in by_step[step]) for step in range(begin, end)}
        assert max(taken, default=batch) == batch  # the last step of an epoch may be smaller


@pytest.mark.slow
def test_the_batch_does_not_grow_beyond_the_ranks_memory(tmp_path: Path) -> None:
    devices = [{"type": "emulated", "speed": 1e6, "most_batch_size": most} for most in (6, 2)]
    asked = request(
        tmp_path,
        [6, 2],
        devices=devices,
        epochs=4,
        adaptive_batch=True,
        batch_bounds=[8, 64],
        checkpoint={"every_steps": 1000},
    )
    assert train(asked).split_events == []


@pytest.mark.slow
def test_a_search_leaves_parameters_optimizer_and_random_state_unchanged(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {
        "model": {"norm": True, "dropout": 0.3},
        "optimizer": {"name": "adamw"},
        "validation_fraction": 0.6,
        **NO_SPARE,
    }
    rates = [10 ** (-4 + step / 8) for step in range(30)]
    searched = request(tmp_path / "searched", [40, 20], **settings)
    found, again = search(searched, rates, 6), search(searched, rates, 6)
    assert len(found.points) > 10
    assert len(found.trials) >= 3
    assert len(found.states) == 2
    assert (again.points, again.trials) == (found.points, found.trials)
    assert not (tmp_path / "searched/run").exists()
    train(searched)
    plain = request(tmp_path / "plain", [40, 20], **settings)
    train(plain)
    assert [losses(searched, rank) for rank in (0, 1)] == [losses(plain, rank) for rank in (0, 1)]
    name = "run/checkpoints/step-00000012/model.safetensors"
    assert (tmp_path / "searched" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_a_search_on_unequal_ranks_equals_one_process_with_the_joint_batch(
    tmp_path: Path,
) -> None:
    """In fp64: when the loss diverges, so do rounding errors."""
    settings: dict[str, Any] = {
        "model": {"norm": True},
        "precision": "fp64",
        "optimizer": {"name": "adamw"},
        "backend": "torch",
        **NO_SPARE,
    }
    rates = ladder(1e-4, 10.0, 30)
    joint = search(request(tmp_path / "joint", [60], **settings), rates, 4)
    unlike = search(request(tmp_path / "unlike", [40, 15, 5], **settings), rates, 4)
    for found, expected in ((unlike.points, joint.points), (unlike.trials, joint.trials)):
        assert [one.loss for one in found] == pytest.approx(
            [one.loss for one in expected], rel=1e-5
        )
        assert [one.learning_rate for one in found] == pytest.approx(
            [one.learning_rate for one in expected], rel=1e-5
        )
    assert len(joint.trials) > 1
    assert [one.accuracy for one in unlike.points] == pytest.approx(
        [one.accuracy for one in joint.points]
    )
    chosen = [
        choose([(one.learning_rate, one.loss, one.accuracy) for one in found.points])
        for found in (unlike, joint)
    ]
    assert chosen[0].learning_rate == pytest.approx(chosen[1].learning_rate, rel=1e-5)


COUNTED = """
import torch


class Net(torch.nn.Sequential):
    def forward(self, images):
        if self.training:
            with open({path!r}, "a") as file:
                file.write(f"{{len(images)}}\\n")
        return super().forward(images)


def build_model():
    return Net(torch.nn.Flatten(), torch.nn.Linear(64, 10))
"""


def test_a_single_device_measures_the_noise_in_passes_of_at_most_a_micro_batch(
    tmp_path: Path,
) -> None:
    asked = request(
        tmp_path, [64], backend="torch", adaptive_batch=True, batch_bounds=[64, 64], **NO_SPARE
    )
    asked = asked.model_copy(update={"plan": asked.plan.model_copy(update={"accumulation": 4})})
    (tmp_path / "source" / "net.py").write_text(COUNTED.format(path=str(tmp_path / "passes")))
    result = train(asked)
    passes = [int(one) for one in (tmp_path / "passes").read_text().split()]
    assert max(passes) == 16
    assert len(passes) > 4 * result.steps
