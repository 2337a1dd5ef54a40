"""Trainings on ranks with unequal batches, to compare with one process on the joint batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training_case import NO_SPARE, request

from trainwright.tasks.train import TrainRequest

SPLITS = {"3:1": [45, 15], "5:3:1:1": [30, 18, 6, 6], "2:1:0": [40, 20, 0]}
WAYS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": {"name": "sgd"}},
    "momentum": {"optimizer": {"name": "momentum"}},
    "adam": {"optimizer": {"name": "adam"}},
    "adamw": {"optimizer": {"name": "adamw", "weight_decay": 0.1}},
    "vectors": {"optimizer": {"name": "adamw", "weight_decay": 0.1, "decay_exclude": "vectors"}},
    "smoothed": {"optimizer": {"name": "momentum"}, "label_smoothing": 0.2},
    "clipped": {"optimizer": {"name": "momentum"}, "clip_norm": 0.5},
    "accumulated": {"optimizer": {"name": "adam"}},
    "accumulated, clipped": {"optimizer": {"name": "momentum"}, "clip_norm": 0.5},
}
BOUNDS = {"fp64": 1e-12, "fp32": 1e-6}
"""Bounds on the greatest difference after 50 steps, without batch normalisation."""


def joint(folder: Path, backend: str, split: str, way: str, precision: str) -> TrainRequest:
    """50 steps of one of `WAYS`, by one of `SPLITS`."""
    asked = request(
        folder,
        SPLITS[split],
        validation_fraction=297 / 1797,
        epochs=2,
        backend=backend,
        precision=precision,
        **WAYS[way],
        **NO_SPARE,
    )
    if "accumulated" in way:
        asked = asked.model_copy(update={"plan": asked.plan.model_copy(update={"accumulation": 3})})
    return asked


def normalized(folder: Path, backend: str, norm: bool | str) -> TrainRequest:
    """50 steps of Adam over three ranks, with batch normalisation.

    The last step of each epoch takes 1 row: two ranks have none, but take part.
    """
    return request(
        folder,
        [30, 15, 5],
        validation_fraction=596 / 1797,
        epochs=2,
        model={"norm": norm},
        backend=backend,
        precision="fp64",
        optimizer={"name": "adam"},
        **NO_SPARE,
    )


def normalized_single(folder: Path, backend: str) -> TrainRequest:
    """50 steps of momentum over four ranks, batch normalisation in single precision."""
    return request(
        folder,
        [30, 18, 6, 6],
        validation_fraction=297 / 1797,
        epochs=2,
        model={"norm": True},
        backend=backend,
        **NO_SPARE,
    )


def largest_difference(run: Path, step: int, expected: dict[str, Any]) -> float:
    """The difference of a checkpoint's model from the expected one."""
    return relative_difference(trained(run, step), expected)


def trained(run: Path, step: int) -> dict[str, Any]:
    """The model of a checkpoint."""
    from safetensors.torch import load_file

    return dict(load_file(run / f"checkpoints/step-{step:08d}/model.safetensors"))


def relative_difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The greatest difference of a tensor, relative to its own norm."""
    import torch

    assert found.keys() == expected.keys()
    return max(
        float(torch.linalg.vector_norm(found[name].double() - value.double()))
        / max(1e-12, float(torch.linalg.vector_norm(value.double())))
        for name, value in expected.items()
    )


def flat(tensors: dict[str, Any]) -> Any:
    """All values of a model in one vector."""
    import torch

    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])
