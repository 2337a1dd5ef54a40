"""What the tests on a GPU share: the GPU, steps of the zoo's models on it, and quantiles."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map
from zoo import Case, cases

from trainwright.estimator.measure.torch_device import TorchDevice, device_named
from trainwright.estimator.structure import Structure
from trainwright.estimator.trace.source import ModelDefinition
from trainwright.estimator.trace.trace import trace
from trainwright.estimator.trace.training_step import TrainingStep, TrainingStepSpec, prepare

GROWTH = 8
"""Factor on the zoo's batch sizes, which are those for a core of a CPU."""


def gpu() -> TorchDevice:
    """The first GPU of this machine. Raises BadInput if there is none of a known type."""
    return device_named("cuda:0")


def zoo(count: int) -> list[Case]:
    """Models that calibration does not measure."""
    return cases(0, count)


@functools.cache
def structure_of(case: Case) -> Structure:
    """A case's structure, traced at its larger batch."""
    return trace(case.spec(), GROWTH * case.batch_size)


def step_on(case: Case, device: TorchDevice, batch_size: int) -> TrainingStep:
    """A case's step on a device."""

    def moved(size: int) -> tuple[Any, Any]:
        return tree_map(
            lambda one: one.to(device.torch) if isinstance(one, torch.Tensor) else one,
            case.example_batch(size),
        )

    torch.manual_seed(0)
    definition = ModelDefinition(case.build, moved, case.loss)
    spec = TrainingStepSpec(definition, {}, None, {"name": case.optimizer})
    return prepare(spec, case.build().to(device.torch), batch_size)


def summary(name: str, ratios: Sequence[float]) -> str:
    """Predicted over measured: the median error, the ninth decile of errors, and the range."""
    errors = [abs(one - 1) for one in ratios]
    tenths = statistics.quantiles(errors, n=10, method="inclusive")
    return (
        f"{name}: {len(ratios)} models, median error {statistics.median(errors):.1%}, "
        f"90 % below {tenths[-1]:.1%}, predicted / measured {min(ratios):.2f} to {max(ratios):.2f}"
    )
