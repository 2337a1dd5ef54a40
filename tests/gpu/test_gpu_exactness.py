"""Ranks on a GPU and on CPUs at once train as one process on a CPU does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import source_of
from gpu_case import gpu
from joint_batch_case import relative_difference
from layout_ranks import train_in_threads, whole_state, with_layout
from staged_case import with_stages
from training_case import alone, request

from trainwright.tasks.train import TrainRequest
from trainwright.tasks.train.rank.rank import Rank

DEVICES = ["cpu", "cuda:0", "cpu"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "data-parallel": {"sync": {}},
    "late-multiply": {"sync": {"out": "factors"}},
    "sharded": {"sync": {"out": "rows"}, "rows": {"out": [2, 5, 3]}},
}
BOUNDS = {"fp64": 1e-9, "fp32": 2e-3}
"""Relative to the largest parameter; in fp32, rounding differs by device, and training adds up."""


def _asked(folder: Path, model: dict[str, Any] | None = None, **train: Any) -> TrainRequest:
    more: dict[str, Any] = {"optimizer": {"name": "momentum"}, "clip_norm": 5.0, **train}
    return request(
        folder,
        [31, 20, 11],  # the last batch of an epoch is smaller
        validation_fraction=1500 / 1797,
        model=model,
        epochs=2,
        **more,
    )


def _on_the_host(rank: Rank) -> dict[str, torch.Tensor]:
    return {name: value.cpu().clone() for name, value in whole_state(rank)[0].items()}


def _assert_equal(folder: Path, asked: TrainRequest, divided: TrainRequest, bound: float) -> None:
    gpu()
    found = train_in_threads(divided, folder / "store", _on_the_host, devices=DEVICES)
    expected = alone(asked)
    off = max(relative_difference(one, expected) for one in found)
    print(f"relative difference from one process {off:.1e}")
    assert off <= bound


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_with_a_gpu_equals_one_process(
    tmp_path: Path, layout: str, precision: str
) -> None:
    asked = _asked(tmp_path, {"dropout": 0.4}, precision=precision)
    _assert_equal(tmp_path, asked, with_layout(asked, **LAYOUTS[layout]), BOUNDS[precision])


def test_a_pipeline_with_a_gpu_equals_one_process(tmp_path: Path) -> None:
    asked = _asked(tmp_path, precision="fp64")
    (Path(asked.source_folder) / "net.py").write_text(source_of("residual MLP"))
    staged = with_stages(asked, [([16, 16, 16, 14], [0.3, 0.7])], "zero-bubble")
    _assert_equal(tmp_path, asked, staged, BOUNDS["fp64"])


@pytest.mark.parametrize("precision", ["amp", "bf16"])
def test_half_precision_on_a_gpu_follows_one_process(tmp_path: Path, precision: str) -> None:
    asked = _asked(tmp_path, {"dropout": 0.4}, precision=precision)
    _assert_equal(tmp_path, asked, with_layout(asked, sync={}), 0.1)
