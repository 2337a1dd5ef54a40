"""A training with stages equals that of one process on the joint batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import source_of
from joint_batch_case import BOUNDS, relative_difference
from layout_ranks import train_in_threads, whole_state
from staged_case import with_stages
from training_case import alone, request

from trainwright.tasks.runs.artefacts.layout import StageSchedule
from trainwright.tasks.train import TrainRequest
from trainwright.tasks.train.rank.rank import Rank

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "momentum, clipped": {"optimizer": {"name": "momentum"}, "clip_norm": 0.5},
    "adamw": {"optimizer": {"name": "adamw", "weight_decay": 0.1}},
}


def state(rank: Rank) -> dict[str, torch.Tensor]:
    """The whole model, after an evaluation."""
    rank.validate()
    return {name: value.clone() for name, value in whole_state(rank)[0].items()}


@pytest.mark.parametrize(
    ("precision", "way", "schedule"),
    [
        ("fp64", "momentum, clipped", "1f1b"),
        ("fp64", "adamw", "gpipe"),
        ("fp32", "momentum, clipped", "zero-bubble"),
        ("fp32", "adamw", "1f1b"),
    ],
)
def test_a_pipeline_equals_one_process(
    tmp_path: Path, precision: str, way: str, schedule: StageSchedule
) -> None:
    asked = request(
        tmp_path,
        [60, 0],
        validation_fraction=1110 / 1797,  # the last batch of an epoch is smaller
        epochs=2,
        precision=precision,
        model={"dropout": 0.4},
        **OPTIMIZERS[way],
    )
    staged = with_stages(asked, [([20, 15, 15, 10], [0.5])], schedule)
    found = train_in_threads(staged, tmp_path / "store", state)
    expected = alone(asked)
    for one in found:
        assert relative_difference(one, expected) <= BOUNDS[precision]


def request_of(folder: Path, batch_sizes: list[int], family: str) -> TrainRequest:
    """A short training of a model of the family."""
    asked = request(
        folder,
        batch_sizes,
        validation_fraction=1500 / 1797,
        epochs=3,
        precision="fp64",
        optimizer={"name": "momentum"},
        clip_norm=5.0,
    )
    (Path(asked.source_folder) / "net.py").write_text(source_of(family))
    return asked


@pytest.mark.parametrize(
    ("family", "schedule"),
    [
        ("residual network", "zero-bubble"),
        ("U-Net", "gpipe"),
        ("LSTM", "1f1b"),
        ("two-way GRU", "zero-bubble"),
        ("transformer", "zero-bubble"),
        ("shared layer, used twice", "1f1b"),
    ],
)
def test_unlike_pipelines_of_an_unmodified_model_train_as_one_process(
    tmp_path: Path, family: str, schedule: StageSchedule
) -> None:
    def evaluate(rank: Rank, step: int) -> None:
        if step == 7:  # all ranks at once, between two steps
            rank.validate()

    # Joint statistics of batches need one micro-batch.
    joint = "norm" in source_of(family).lower()
    sizes = ([40], [22]) if joint else ([10] * 4, [8, 7, 7])
    three = [0.3, 0.7] if family != "two-way GRU" else [0.5]  # which has two units
    asked = request_of(tmp_path, [40, 0, 22, *([0] * len(three))], family)
    pipelines = [(sizes[0], [0.5]), (sizes[1], three)]
    staged = with_stages(asked, pipelines, schedule)
    found = train_in_threads(staged, tmp_path / "store", state, before=evaluate)
    expected = alone(asked)
    for one in found:
        assert relative_difference(one, expected) <= BOUNDS["fp64"]
