"""Unlike ranks together compute what one process computes on the joint batch; with either library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training_case import alone, request

from trainwright.tasks.train import train

ROWS_OF_20_STEPS = 0.332
"""Share of the 1,797 digits held out, so that 1,200 rows remain: 20 steps of 60."""


def largest_difference(run: Path, step: int, expected: dict[str, Any]) -> float:
    """The greatest difference of a tensor, relative to its own norm."""
    import torch
    from safetensors.torch import load_file

    found = load_file(run / f"checkpoints/step-{step:08d}/model.safetensors")
    assert found.keys() == expected.keys()
    return max(
        float(torch.linalg.vector_norm(found[name].double() - value.double()))
        / max(1e-12, float(torch.linalg.vector_norm(value.double())))
        for name, value in expected.items()
    )


@pytest.mark.parametrize(
    ("backend", "optimizer", "precision", "clip_norm", "bound"),
    [
        ("horovod", "momentum", "fp64", None, 1e-10),
        ("horovod", "adam", "fp32", None, 1e-5),
        ("torch", "adam", "fp64", 0.5, 1e-10),
        pytest.param("torch", "momentum", "fp32", 0.5, 1e-5, marks=pytest.mark.slow),
        pytest.param("horovod", "adam", "fp64", None, 1e-10, marks=pytest.mark.slow),
        pytest.param("horovod", "momentum", "fp32", None, 1e-5, marks=pytest.mark.slow),
    ],
)
def test_two_ranks_with_batches_2_to_1_equal_one_process_after_20_steps(
    tmp_path: Path, backend: str, optimizer: str, precision: str, clip_norm: float | None, bound: float
) -> None:
    asked = request(
        tmp_path, [40, 20], validation_fraction=ROWS_OF_20_STEPS, backend=backend, optimizer={"name": optimizer},
        precision=precision, clip_norm=clip_norm,
    )  # fmt: skip
    result = train(asked)
    assert (result.steps, result.backend.split(".")[0]) == (20, backend)
    assert largest_difference(tmp_path / "run", 20, alone(asked)) <= bound


@pytest.mark.parametrize("backend", ["horovod", pytest.param("torch", marks=pytest.mark.slow)])
def test_batch_norm_sees_the_joint_batch_in_double_precision(tmp_path: Path, backend: str) -> None:
    # The last of 24 steps takes 1 row: two of the three ranks have none, and yet take part.
    asked = request(
        tmp_path, [30, 15, 5], validation_fraction=646 / 1797, model={"norm": True}, backend=backend,
        precision="fp64", optimizer={"name": "adam"},
    )  # fmt: skip
    result = train(asked)
    assert result.steps == 24
    assert [device.samples for device in result.devices] == [691, 345, 115]
    assert largest_difference(tmp_path / "run", 24, alone(asked)) <= 1e-8


def test_batch_norm_sees_the_joint_batch_in_single_precision_for_one_step(tmp_path: Path) -> None:
    asked = request(tmp_path, [80, 40], validation_fraction=1677 / 1797, model={"norm": True})
    assert train(asked).steps == 1
    assert largest_difference(tmp_path / "run", 1, alone(asked)) <= 1e-6


@pytest.mark.parametrize("backend", ["horovod", "torch"])
def test_micro_batches_add_up_to_the_joint_batch(tmp_path: Path, backend: str) -> None:
    # A rank has fewer samples than micro-batches, and the last step takes 10 rows.
    asked = request(tmp_path, [40, 17, 3], validation_fraction=587 / 1797, backend=backend, precision="fp64")
    asked = asked.model_copy(update={"plan": asked.plan.model_copy(update={"accumulation": 4})})
    assert train(asked).steps == 21
    assert largest_difference(tmp_path / "run", 21, alone(asked)) <= 1e-10


def test_batch_norm_takes_the_statistics_of_each_micro_batch_over_all_ranks(tmp_path: Path) -> None:
    asked = request(tmp_path, [40, 17, 3], validation_fraction=1677 / 1797, model={"norm": True}, precision="fp64")
    asked = asked.model_copy(update={"plan": asked.plan.model_copy(update={"accumulation": 4})})
    assert train(asked).steps == 2
    from safetensors.torch import load_file

    found = load_file(tmp_path / "run/checkpoints/step-00000002/model.safetensors")
    assert int(found["norm.num_batches_tracked"]) == 2 * 4
