"""Corrects a device's predictions by finished runs, and estimates the error of the next one.

Arithmetic; loads no torch. For each run, y = log(measured / predicted), where the prediction is the
calibration's alone. y is a Gaussian process over the model and its batch, with a part for the
device (and the rank's share of it), one for the families of the step's operations, one for the same
model, and one that changes from run to run. Before any run, the process's variance σ² is that of
the calibration's interval, so that without runs nothing changes.

    k(p, q) = s² v · [ D (1 + [same cores]) / 2
                       + F · cos(f_p, f_q)² · M(p, q)
                       + S · [same model] (1 + M(p, q)) / 2 ]
              + c² v · exp(−|i_p − i_q| / λ)
    M(p, q) = exp(−(log b_p − log b_q)² / 2 ℓ²)        D + F + S = 1        v = σ² − n²

f: shares of the predicted time by family of operations. b: batch size. i: the run's number in
order; the next run follows the last. n²: the variance between two runs of the same step, times r²
if runs show that the machine is less steady. s differs from 1 if runs show that the interval was
too narrow or too wide. c differs from 0 if they show that the machine's speed changes: then newer
runs count more than older ones. s, r, c and λ are those under which each run is likeliest given the
others. A run that the others contradict counts less: its variance given them is divided by the
weight of Student's t-distribution (ν = 4).

Time and memory are corrected. Energy follows from the time, since runs do not measure power.

Source: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, equations 2.25, 2.26,
5.12 and section 5.4.2; Lange et al., Robust Statistical Modeling Using the t Distribution, 1989.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from trainwright.estimator.curves import Basis, DeviceCurve, Interval, Knots, line_through
from trainwright.estimator.frozen_model import FrozenModel
from trainwright.estimator.quantiles import NINETY

SCHEMA_VERSION = 1
_DEVICE, _FAMILIES, _SAME_MODEL = 0.3, 0.2, 0.5
_BATCH_LENGTH = math.log(8)
# Measured: the halves of a run differ by 6 % at the median, and a tenth of them by 20 to 30 %.
_RUN_NOISE = 0.1
_STEPS_TOGETHER = 20  # number of consecutive steps that are slow or fast together
_OTHER_CALIBRATION = 0.1  # difference between two calibrations of a device
_FURTHEST = 2.0  # a run with a larger error (e²) shows something other than its device
_SIGNALS, _NOISES = (1.0, 0.5, 2.0, 4.0), (1.0, 2.0, 4.0)  # s, r
_CHANGES = ((0.0, 1.0), *itertools.product((1.0, 3.0), (4.0, 16.0)))  # c, λ
_RARELY = 1.0  # prior log odds against a machine whose speed changes
_FREEDOM = 4.0  # ν
_ROUNDS = 8


class Finding(FrozenModel):
    """The calibration's own prediction for one device of a run, and the measurement."""

    basis: Basis
    cores: float | None
    batch_size: int = Field(ge=1)
    steps: int = Field(ge=1, description="steps in the measured median")
    predicted_step_time_s: float = Field(gt=0)
    predicted_loop_s: float | None = Field(
        default=None, description="the training loop's part of it; None: not included"
    )
    measured_step_time_s: Interval = Field(
        description="time of the rank's own work: median, 5th and 95th percentile"
    )
    memory_batch_size: int = Field(ge=1, description="the largest batch in the run")
    predicted_peak_memory_bytes: float = Field(gt=0, description="of the step alone")
    kept_bytes: float = Field(
        default=0.0, ge=0, description="predicted besides the step, from the model's size"
    )
    measured_peak_memory_bytes: float = Field(gt=0, description="of the rank, its process included")


class FinishedRun(FrozenModel):
    """`<store>/calibrations/<device type>/runs/<run id>.json`: a run's measurements by type.

    Runs are ordered by the last part of `run`, their id, which begins with the time of creation.
    """

    schema_version: int = SCHEMA_VERSION
    run: str
    device_type: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class _Seen:
    """The coordinates of findings in the process. Shapes: (n,), shares (n, families)."""

    models: Any
    cores: Any
    log_batches: Any
    shares: Any
    order: Any


def learn(curve: DeviceCurve, runs: Sequence[FinishedRun]) -> DeviceCurve:
    """The curve, corrected by finished runs of its device type with the same processor and torch.

    Unchanged without such runs, or if the curve is not from a calibration.
    """
    basis = curve.basis
    if basis is None or curve.time_knots is None:
        return curve
    of_use = [
        (run.run.rpartition("/")[2], run.run, one)
        for run in runs
        if run.device_type == curve.device_type
        for one in run.findings
        if (one.basis.processor, one.basis.torch) == (basis.processor, basis.torch)
        and one.measured_step_time_s.median > 0
    ]
    if not of_use:
        return curve
    of_use.sort(key=lambda each: (each[0], each[1], each[2].model_dump_json()))
    findings = [one for _, _, one in of_use]
    runs_in_order = list(dict.fromkeys((name, run) for name, run, _ in of_use))
    order = [runs_in_order.index((name, run)) for name, run, _ in of_use]
    before = {
        "learned_from": len(runs_in_order),
        "calibrated_time_knots": curve.time_knots,
    }
    return _with_memory(
        _with_time(curve.model_copy(update=before), basis, findings, order), basis, findings
    )


def _with_time(
    curve: DeviceCurve, basis: Basis, findings: Sequence[Finding], order: Sequence[int]
) -> DeviceCurve:
    assert curve.time_knots is not None
    sizes, values = curve.time_knots.sizes, curve.time_knots.values
    before = (math.log(max(curve.high_factor / curve.low_factor, 1.02)) / (2 * NINETY)) ** 2
    noise = min(_RUN_NOISE**2, before / 2)
    off = [math.log(one.measured_step_time_s.median / _predicted_s(curve, one)) for one in findings]
    own = [noise + _own_noise(one) + _recalibrated(basis, one) for one in findings]
    found = _posterior(
        _places(basis, curve.cores, sizes, findings, order), off, own, before - noise, noise
    )
    times = list(
        itertools.accumulate(
            (v * math.exp(m) for v, m in zip(values, found.means, strict=True)), max
        )
    )
    exponent = math.sqrt(max(found.variances) / before)
    return curve.model_copy(
        update={
            "time_knots": Knots(sizes=sizes, values=tuple(times)),
            "step_time_s": line_through(sizes, times),
            "low_factor": curve.low_factor**exponent,
            "high_factor": curve.high_factor**exponent,
        }
    )


def _with_memory(curve: DeviceCurve, basis: Basis, findings: Sequence[Finding]) -> DeviceCurve:
    """The curve with corrected `process_bytes`.

    They are the part due to the model's size, plus the median of the remaining memory in other
    runs. The rank's memory is at least that in runs of the same model.
    """
    besides = [
        one.measured_peak_memory_bytes - one.predicted_peak_memory_bytes - one.kept_bytes
        for one in findings
    ]
    same = [
        one.measured_peak_memory_bytes - curve.safe_memory_bytes(one.memory_batch_size)
        for one in findings
        if one.basis.model == basis.model
    ]
    found = max([curve.kept_bytes + max(0.0, statistics.median(besides)), *same])
    return curve.model_copy(update={"process_bytes": found})


def _own_noise(finding: Finding) -> float:
    """The variance of the logarithm of a run's median, from the number of independent steps.

    A median's variance is π/2 times that of a mean, for normally distributed steps.
    """
    time = finding.measured_step_time_s
    if not 0 < time.low <= time.high:
        return _FURTHEST**2
    spread = math.log(time.high / time.low) / (2 * NINETY)
    return math.pi / 2 * spread**2 / max(1.0, finding.steps / _STEPS_TOGETHER)


def _predicted_s(curve: DeviceCurve, finding: Finding) -> float:
    """The predicted time, comparable with the curve's.

    If the prediction was of the model's step alone and the curve includes the training loop, the
    loop's time is added.
    """
    alone = finding.predicted_loop_s is None
    return finding.predicted_step_time_s + (
        curve.loop_part_s(finding.batch_size) or 0.0 if alone else 0.0
    )


def _recalibrated(basis: Basis, finding: Finding) -> float:
    return 0.0 if finding.basis.calibration == basis.calibration else _OTHER_CALIBRATION**2


def _places(
    basis: Basis,
    cores: float | None,
    sizes: Sequence[int],
    findings: Sequence[Finding],
    order: Sequence[int],
) -> _Seen:
    """The places of the findings, then of the curve at its batch sizes, as the next run."""
    import numpy as np

    families = sorted({name for one in findings for name in one.basis.shares} | set(basis.shares))
    each = [one.basis for one in findings] + [basis] * len(sizes)
    shares = np.array([[one.shares.get(name, 0.0) for name in families] for one in each]).reshape(
        len(each), -1
    )
    lengths = np.linalg.norm(shares, axis=1, keepdims=True)
    return _Seen(
        models=np.array([one.model for one in each]),
        cores=np.array([one.cores or 0.0 for one in findings] + [cores or 0.0] * len(sizes)),
        log_batches=np.log(np.array([*(one.batch_size for one in findings), *sizes], dtype=float)),
        shares=shares / np.where(lengths > 0, lengths, 1.0),
        order=np.array([*order, *[order[-1] + 1] * len(sizes)], dtype=float),
    )


def _covariance(seen: _Seen) -> Any:
    """k between all places, with variance 1 and c = 0."""
    import numpy as np

    near = np.exp(
        -((seen.log_batches[:, None] - seen.log_batches[None, :]) ** 2) / (2 * _BATCH_LENGTH**2)
    )
    same_cores = seen.cores[:, None] == seen.cores[None, :]
    same_model = seen.models[:, None] == seen.models[None, :]
    return (
        _DEVICE * (1 + same_cores) / 2
        + _FAMILIES * (seen.shares @ seen.shares.T) ** 2 * near
        + _SAME_MODEL * same_model * (1 + near) / 2
    )


@dataclass(frozen=True)
class _Learned:
    """For each place after the findings: the mean of y, and its variance for a further run."""

    means: list[float]
    variances: list[float]


def _posterior(
    places: _Seen, off: Sequence[float], noise: Sequence[float], variance: float, floor: float
) -> _Learned:
    """The prediction at the places after the findings, from the findings' errors `off`.

    `noise` is the variance of each, `variance` that of the process, and `floor` that between two
    runs of the same step.
    """
    import numpy as np

    count = len(off)
    known = np.clip(np.array(off), -_FURTHEST, _FURTHEST)
    every, own = variance * _covariance(places), np.array(noise)
    apart_in_order = np.abs(places.order[:, None] - places.order[None, :])
    changes = [variance * c**2 * np.exp(-apart_in_order / length) for c, length in _CHANGES]
    signal, loud, change = _likeliest(
        every[:count, :count], own, known, [one[:count, :count] for one in changes]
    )
    own, extra = loud**2 * own, np.zeros(count)
    among = signal**2 * every + changes[change]
    for _ in range(_ROUNDS):
        deviations, apart = _given_others(among[:count, :count] + np.diag(own + extra), known)
        alone = deviations**2 - extra
        weight = np.minimum(1.0, (_FREEDOM + 1) / (_FREEDOM + apart**2 * deviations**2 / alone))
        extra = alone * (1 / weight - 1)
    means, _ = _given(among, own + extra, known)
    # Accurate predictions of other steps do not narrow an interval; only runs near it do.
    _, variances = _given(max(1.0, signal) ** 2 * every + changes[change], own + extra, known)
    return _Learned(means.tolist(), (variances + loud**2 * floor).tolist())


def _given(every: Any, own: Any, known: Any) -> tuple[Any, Any]:
    """Mean and variance of the places after the known ones (equations 2.25 and 2.26)."""
    import numpy as np

    count = len(known)
    cross = every[count:, :count]
    weights = np.linalg.solve(every[:count, :count] + np.diag(own), cross.T)
    return weights.T @ known, np.maximum(np.diag(every)[count:] - (cross * weights.T).sum(1), 0.0)


def _likeliest(
    every: Any, own: Any, known: Any, changes: Sequence[Any]
) -> tuple[float, float, int]:
    """s, r, and the index in `_CHANGES` of c and λ under which each run is likeliest given others.

    With a prior for s = 1, r = 1 and c = 0.
    """
    import numpy as np

    def likelihood(chosen: tuple[float, float, int]) -> float:
        signal, loud, change = chosen
        deviations, apart = _given_others(
            signal**2 * every + changes[change] + np.diag(loud**2 * own), known
        )
        densities = -np.log(deviations) - (_FREEDOM + 1) / 2 * np.log1p(apart**2 / _FREEDOM)
        return (
            float(densities.sum())
            - math.log2(signal) ** 2
            - math.log2(loud) ** 2
            - _RARELY * (change > 0)
        )

    return max(itertools.product(_SIGNALS, _NOISES, range(len(changes))), key=likelihood)


def _given_others(covariance: Any, known: Any) -> tuple[Any, Any]:
    """The standard deviation of each run given the others, and its error in those (eq. 5.12)."""
    import numpy as np

    inverse = np.linalg.inv(covariance)
    deviations = 1 / np.sqrt(np.diag(inverse))
    return deviations, np.abs(inverse @ known) * deviations
