"""In every precision, a training in any layout equals one process up to that precision's rounding.

With accumulation, clipping, and a smaller last batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from joint_batch_case import BOUNDS, relative_difference
from layout_ranks import train_in_threads, with_layout
from test_exactness import LAYOUTS, state
from training_case import alone, request

from trainwright.tasks.train import TrainRequest
from trainwright.tasks.train.batch.sampling import shares

SPLIT, MICRO_BATCHES = [31, 20, 11], 3


def asked_for(folder: Path, precision: str, **settings: Any) -> TrainRequest:
    """A training of three ranks, with three micro-batches in a step."""
    asked = request(
        folder,
        SPLIT,
        validation_fraction=1500 / 1797,
        epochs=2,
        precision=precision,
        optimizer={"name": "momentum"},
        clip_norm=0.5,
        **settings,
    )
    plan = asked.plan.model_copy(update={"accumulation": MICRO_BATCHES})
    return asked.model_copy(update={"plan": plan})


def micro_batches(total: int) -> list[int]:
    """The samples of all micro-batches of a step, by rank."""
    return [
        len(part)
        for size in shares(total, SPLIT)
        for part in np.array_split(np.arange(size), MICRO_BATCHES)
        if len(part)
    ]


def require_alike(found: list[dict[str, torch.Tensor]]) -> None:
    """All ranks have the same last digits."""
    for one in found[1:]:
        assert all(torch.equal(found[0][name], value) for name, value in one.items())


@pytest.mark.parametrize("precision", ["fp64", "amp", "bf16"])
def test_each_layout_equals_one_process(tmp_path: Path, precision: str) -> None:
    asked = asked_for(tmp_path, precision)
    whole = alone(asked)
    rounding = max(
        relative_difference(alone(asked, parts), whole)
        for parts in (micro_batches, lambda size: [size // 2, size - size // 2])
    )
    for name, layout in LAYOUTS.items():
        found = train_in_threads(with_layout(asked, **layout), tmp_path / name, state)
        require_alike(found)
        bound = BOUNDS.get(precision, 2 * rounding)
        assert relative_difference(found[0], whole) <= bound, name


def test_each_layout_equals_one_process_in_fp16_with_a_loss_scale(tmp_path: Path) -> None:
    asked = asked_for(tmp_path, "amp", devices=[{"type": "nvidia-t4"}] * len(SPLIT))
    single = asked.job.train.model_copy(update={"precision": "fp32"})
    in_fp32 = asked.model_copy(update={"job": asked.job.model_copy(update={"train": single})})
    exact = alone(in_fp32)
    rounding_of_bf16 = relative_difference(alone(asked), exact)
    for name, layout in LAYOUTS.items():
        found = train_in_threads(with_layout(asked, **layout), tmp_path / name, state)
        require_alike(found)
        assert relative_difference(found[0], exact) <= rounding_of_bf16, name
