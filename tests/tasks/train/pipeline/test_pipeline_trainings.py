"""Trainings of pipelines with real ranks: exact, also after a rank is killed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from joint_batch_case import BOUNDS, largest_difference
from staged_case import with_stages
from training_case import NO_SPARE, alone, ranks, request, when_checkpoint

from trainwright.tasks.train import train

SLOW = [{"type": "emulated", "speed": 0.5}] * 4


def test_real_ranks_equal_one_process_with_evaluations_and_checkpoints_between(
    tmp_path: Path,
) -> None:
    asked = request(
        tmp_path,
        [40, 0, 20],
        validation_fraction=1100 / 1797,
        epochs=2,
        backend="torch",
        precision="fp64",
        optimizer={"name": "adamw", "weight_decay": 0.1},
        **NO_SPARE,
    )
    metrics: list[dict[str, float]] = []
    staged = with_stages(asked, [([10] * 4, [0.5]), ([20], [])], "zero-bubble")
    result = train(staged)
    expected = alone(staged, metrics=metrics)
    assert largest_difference(tmp_path / "run", result.steps, expected) <= BOUNDS["fp64"]
    assert result.metrics["loss"] == pytest.approx(metrics[-1]["loss"], rel=1e-9)
    passes = [len(one.passes) for one in result.measured.by_kind]
    assert passes == [3 * 4, 3 * 4, 2]  # zero-bubble has three of a micro-batch, a whole model two
    for one in result.measured.by_kind:
        ends = [(each.begin_s, each.end_s) for each in one.passes]
        assert all(begin <= end for begin, end in ends)
        assert ends == sorted(ends)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pipelines",
    [[([30, 30], [0.5])], [([20, 20], [0.5]), ([10, 10], [0.5])]],
    ids=["one pipeline", "two pipelines"],
)
def test_after_a_killed_rank_the_training_goes_on_and_ends(
    tmp_path: Path, pipelines: list[Any]
) -> None:
    count = 2 * len(pipelines)
    asked = request(
        tmp_path, [60, *[0] * (count - 1)], epochs=2, backend="torch", devices=SLOW[:count]
    )
    killed = when_checkpoint(tmp_path, 5, lambda: ranks()[1].send_signal(signal.SIGKILL))
    result = train(with_stages(asked, pipelines))
    killed.join()
    assert result.steps == 48
    assert any("rank 1" in one.reason for one in result.split_events)
    undisturbed: list[dict[str, float]] = []
    alone(asked, metrics=undisturbed)
    assert result.metrics["loss"] == pytest.approx(undisturbed[-1]["loss"], rel=1e-3)
