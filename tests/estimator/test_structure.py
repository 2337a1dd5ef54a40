"""A structure's fingerprint: the same for the same model trained the same way."""

from __future__ import annotations

from torch import nn

from trainwright.estimator.structure import Structure
from trainwright.estimator.trace.source import BatchSpec, ModelDefinition
from trainwright.estimator.trace.trace import TrainingStepSpec, trace


def _traced(
    width: int = 8, batch_size: int = 16, optimizer: str = "adamw", side: int = 8
) -> Structure:
    images = BatchSpec(
        inputs={"inputs": (1, side, side)},
        input_dtypes={"inputs": "float32"},
        target_dtype="int64",
        classes=10,
        task="image-classification",
    )
    definition = ModelDefinition(
        lambda: nn.Sequential(
            nn.Conv2d(1, width, 3),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, 10),
        ),
        None,
        None,
    )
    return trace(TrainingStepSpec(definition, {}, images, {"name": optimizer}, "fp32"), batch_size)


def test_the_traced_batch_size_is_not_part_of_the_fingerprint() -> None:
    assert len({_traced(batch_size=size).fingerprint() for size in (2, 16, 64)}) == 1


def test_another_width_optimizer_or_image_gives_another_fingerprint() -> None:
    changed = [_traced(), _traced(width=9), _traced(optimizer="sgd"), _traced(side=16)]
    assert len({one.fingerprint() for one in changed}) == 4
