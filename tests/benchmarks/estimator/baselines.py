"""Simpler predictors of a training step's time, to compare the estimator with. Loads no torch.

Each `fit_…` takes measured steps and returns a function of a structure and a batch size, in
seconds. The two rooflines have nothing to fit: they take the device's rates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainwright.estimator.structure import Structure

Predictor = Callable[[Structure, int], float]

REGRESSORS = (
    "conv_layers",
    "filters",
    "dense_layers",
    "dense_widths",
    "image_height",
    "image_width",
)
"""The `Structure.features` in the regression of 2019, besides the batch size and a constant."""
TORCH_EFFICIENCY = 0.75
"""The share of the peak that torch's formula assumes."""
_CREATED = (
    "randint",
    "randn",
    "rand",
    "randn_like",
    "rand_like",
    "randint_like",
    "arange",
    "ones_like",
    "zeros_like",
)
_UNCOUNTED = ("rnn",)


@dataclass(frozen=True)
class MeasuredStep:
    """A timed training step."""

    structure: Structure
    batch_size: int
    seconds: float


@dataclass(frozen=True)
class Totals:
    """The FLOPs, bytes and operations of a whole step."""

    flops: float
    bytes: float
    operations: int


def totals(structure: Structure, batch_size: int) -> Totals:
    """The sums over a step's operations."""
    return Totals(
        flops=sum(one.count * one.flops(batch_size) for one in structure.trace),
        bytes=sum(one.count * one.bytes(batch_size) for one in structure.trace),
        operations=sum(one.count for one in structure.trace),
    )


def fit_regression(steps: Sequence[MeasuredStep]) -> Predictor:
    """t = w · (1, batch size, hand features): ordinary least squares, the regression of 2019.

    Because a line can go below zero, the result is at least the shortest measured step. Raises
    ValueError without steps.
    """
    import numpy as np

    _some(steps)
    rows = np.array([_features(one.structure, one.batch_size) for one in steps])
    weights, *_ = np.linalg.lstsq(rows, np.array([one.seconds for one in steps]), rcond=None)
    least = min(one.seconds for one in steps)

    def predict(structure: Structure, batch_size: int) -> float:
        return max(least, float(np.dot(_features(structure, batch_size), weights)))

    return predict


def fit_totals(steps: Sequence[MeasuredStep]) -> Predictor:
    """t = flops / F + bytes / B + d · operations, without negative parts.

    Least squares on relative errors (Lawson and Hanson 1974). Relative errors are bounded only
    below, which pulls a poor fit down; so the fit is scaled until half of the steps take longer
    than predicted. Raises ValueError without steps.
    """
    import numpy as np
    from scipy.optimize import nnls

    _some(steps)
    found = [totals(one.structure, one.batch_size) for one in steps]
    rows = np.array([[one.flops, one.bytes, float(one.operations)] for one in found])
    rows /= np.array([[one.seconds] for one in steps])
    scales = rows.max(axis=0)  # FLOPs and calls are ten orders of magnitude apart
    scales[scales == 0] = 1.0
    weights, _ = nnls(rows / scales, np.ones(len(steps)))
    fitted = rows @ (weights / scales)
    weights *= np.median(1 / fitted) if np.all(fitted > 0) else 1.0
    flop_s, byte_s, call_s = (float(one) for one in weights / scales)

    def predict(structure: Structure, batch_size: int) -> float:
        whole = totals(structure, batch_size)
        return whole.flops * flop_s + whole.bytes * byte_s + whole.operations * call_s

    return predict


def datasheet_roofline(flops_per_s: float, bytes_per_s: float) -> Predictor:
    """t = Σ max(flops / F, bytes / B) over the operations, at the maker's rates.

    Source: Williams et al., Roofline, 2009.
    """

    def predict(structure: Structure, batch_size: int) -> float:
        return sum(
            one.count
            * max(one.flops(batch_size) / flops_per_s, one.bytes(batch_size) / bytes_per_s)
            for one in structure.trace
        )

    return predict


def torch_roofline(flops_per_s: float, bytes_per_s: float) -> Predictor:
    """The formula of `torch.distributed._tools.runtime_estimator.RuntimeEstimator`.

    The original needs a GPU. t = Σ max((flops / 2) / (0.75 F), bytes / B), as in
    torch.utils._runtime_estimation: views and creations of tensors are left out, FLOPs are halved,
    and operations without a formula in torch's counter have none. F and B are the device's peaks.
    """

    def predict(structure: Structure, batch_size: int) -> float:
        seconds = 0.0
        for one in structure.trace:
            if one.family == "view" or one.kind.partition(".")[2] in _CREATED:
                continue
            flops = 0.0 if one.family in _UNCOUNTED else one.flops(batch_size)
            compute_s = flops / 2 / (TORCH_EFFICIENCY * flops_per_s)
            seconds += one.count * max(compute_s, one.bytes(batch_size) / bytes_per_s)
        return seconds

    return predict


def _features(structure: Structure, batch_size: int) -> list[float]:
    return [1.0, float(batch_size), *(structure.features.get(name, 0.0) for name in REGRESSORS)]


def _some(steps: Sequence[MeasuredStep]) -> None:
    if not steps:
        raise ValueError("steps: got none; at least one measured step is needed to fit")
