"""Divides a step's time among its layers and phases. Arithmetic; loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainwright.estimator.curves import Affine, LayerCost, line_through
from trainwright.estimator.devices import EMULATED_SAMPLE_S
from trainwright.estimator.structure import Calls, Structure


def layer_costs(
    structure: Structure, batch_sizes: Sequence[int], operation_times_s: Any
) -> tuple[tuple[LayerCost, ...], Affine]:
    """The cost of each layer, and of the optimizer, from the seconds of the trace's operations.

    `operation_times_s` has the seconds of all calls of an operation; shape (batch sizes,
    operations).
    """
    import numpy as np

    each = np.asarray(operation_times_s, dtype=float)
    each = each / np.array([float(max(1, one.count)) for one in structure.trace])
    left = np.array([float(one.count) for one in structure.trace])

    def line(calls: Calls) -> Affine:
        if not calls:
            return Affine(fixed=0.0, per_sample=0.0)
        places, counts = [place for place, _ in calls], np.array([count for _, count in calls])
        left[places] -= counts
        seconds = (each[:, places] @ counts).tolist()
        if min(seconds) <= 0:
            return Affine(fixed=0.0, per_sample=0.0)
        return line_through(batch_sizes, seconds)

    layers = tuple(
        LayerCost(
            name=one.name,
            forward=line(one.forward),
            input_gradient=line(one.input_gradient),
            weight_gradient=line(one.weight_gradient),
        )
        for one in structure.layer_work
    )
    rest = tuple((place, float(count)) for place, count in enumerate(left) if count > 0)
    return layers, line(rest)


def emulated_costs(layers: Sequence[LayerCost], batch_size: int) -> tuple[LayerCost, ...]:
    """The cost of each layer on an emulated device of speed 1: shares of EMULATED_SAMPLE_S.

    In proportion to `layers` at a batch size. The optimizer's update takes no time. Empty if
    `layers` take none.
    """
    total = sum(
        line(batch_size)
        for one in layers
        for line in (one.forward, one.input_gradient, one.weight_gradient)
    )
    if total <= 0:
        return ()

    def share(line: Affine) -> Affine:
        return Affine(fixed=0.0, per_sample=EMULATED_SAMPLE_S * line(batch_size) / total)

    return tuple(
        LayerCost(
            name=one.name,
            forward=share(one.forward),
            input_gradient=share(one.input_gradient),
            weight_gradient=share(one.weight_gradient),
        )
        for one in layers
    )
