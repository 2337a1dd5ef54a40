"""What finished runs teach: how far a device's predictions were off, and how far the next will be. Loads no torch.

Of each run, y = log(measured / predicted), where predicted is what the calibration alone says. y is a Gaussian process over the
model and its batch: a part for the device (and for the share of it that the rank had), one for what the step's time is spent on,
one for the very same model, and one that changes from run to run. The calibration's interval is the process's variance σ² before
any run, so that without evidence nothing changes.

    k(p, q) = s² v · [ D (1 + [same cores]) / 2  +  F · cos(f_p, f_q)² · M(p, q)  +  S · [same model] (1 + M(p, q)) / 2 ]
              + c² v · exp(−|i_p − i_q| / λ)
    M(p, q) = exp(−(log b_p − log b_q)² / 2 ℓ²)             D + F + S = 1             v = σ² − n²

f: shares of the predicted time by family of operations; b: batch size; i: the run's place in their order, the next one's is one
more than the last's; n²: what two runs of the same step vary by, r² as much where runs show that the machine is less steady. s is
not 1 where they show that the interval was too narrow or too wide, c is not 0 where they show that the machine's speed changes:
then the newest tell more of the next than the older ones. s, r, c and λ are those under which each run is likeliest given the
others. A run that the others contradict counts less: its variance given them is divided by the weight of Student's
t-distribution (ν = 4).

Time and memory learn; energy follows from the time, since power is not measured in a run.

Source: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, equations 2.25, 2.26, 5.12 and section 5.4.2; Lange
et al., Robust Statistical Modeling Using the t Distribution, 1989.
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
_RUN_NOISE = (
    0.1  # halves of a run differ by 6 % at the median, a tenth of them by 20 to 30 %: measured
)
_STEPS_TOGETHER = 20  # steps that are slow or fast together
_OTHER_CALIBRATION = 0.1  # what two calibrations of one device differ by
_FURTHEST = 2.0  # a run that is further off (e²) tells of something else than its device
_SIGNALS, _NOISES = (1.0, 0.5, 2.0, 4.0), (1.0, 2.0, 4.0)  # s, r
_CHANGES = ((0.0, 1.0), *itertools.product((1.0, 3.0), (4.0, 16.0)))  # c, λ
_RARELY = 1.0  # of the logarithm of the odds: that a machine's speed changes needs to be shown
_FREEDOM = 4.0  # ν
_ROUNDS = 8


class Finding(FrozenModel):
    """What one device of a run was predicted to do, by its calibration alone, and what it did."""

    basis: Basis
    cores: float | None
    batch_size: int = Field(ge=1)
    steps: int = Field(ge=1, description="that the measured step time is the median of")
    predicted_step_time_s: float = Field(gt=0)
    predicted_loop_s: float | None = Field(
        default=None, description="of that, what training adds; None: it is not in it"
    )
    measured_step_time_s: Interval = Field(
        description="of its own work: median, 5th and 95th percentile"
    )
    memory_batch_size: int = Field(ge=1, description="the largest that it had")
    predicted_peak_memory_bytes: float = Field(gt=0, description="of the step alone")
    kept_bytes: float = Field(
        default=0.0, ge=0, description="predicted besides it, by the model's size"
    )
    measured_peak_memory_bytes: float = Field(gt=0, description="of the rank, its process included")


class FinishedRun(FrozenModel):
    """`<store>/calibrations/<device type>/runs/<run id>.json`: what a run found out about a device type.

    Runs are ordered by the last part of `run`, their id: it begins with the time at which they were made.
    """

    schema_version: int = SCHEMA_VERSION
    run: str
    device_type: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class _Seen:
    """Where findings lie. Shapes: (n,), shares (n, families)."""

    models: Any
    cores: Any
    log_batches: Any
    shares: Any
    order: Any


def learn(curve: DeviceCurve, runs: Sequence[FinishedRun]) -> DeviceCurve:
    """The curve, corrected by what finished runs of its device type took on the same hardware and torch.

    Unchanged where none is of use: of another device, processor or torch version, or where the curve is no calibration's.
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
    """A rank takes besides what its model's size says and the median of what others were seen to take besides theirs; all of it
    is above what the same model took.
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
    """The variance of the logarithm of a run's median: π/2 of its mean's (for normal steps), of as many as are apart."""
    time = finding.measured_step_time_s
    if not 0 < time.low <= time.high:
        return _FURTHEST**2
    spread = math.log(time.high / time.low) / (2 * NINETY)
    return math.pi / 2 * spread**2 / max(1.0, finding.steps / _STEPS_TOGETHER)


def _predicted_s(curve: DeviceCurve, finding: Finding) -> float:
    """What was predicted; where that was of the model's step alone and the curve is of training's, with what this one adds."""
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
    """The findings, then the curve at its batch sizes, as the next run."""
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
    """k of all places with one another, of variance 1, for c = 0."""
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
    """Of each place behind the findings: the mean of y, and its variance for a further run."""

    means: list[float]
    variances: list[float]


def _posterior(
    places: _Seen, off: Sequence[float], noise: Sequence[float], variance: float, floor: float
) -> _Learned:
    """What findings that were `off` by so much tell of the places behind them.

    `noise` is each one's variance, `variance` the process's, `floor` what two runs of the same step vary by.
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
    # that others were predicted well narrows no interval: only runs near it do
    _, variances = _given(max(1.0, signal) ** 2 * every + changes[change], own + extra, known)
    return _Learned(means.tolist(), (variances + loud**2 * floor).tolist())


def _given(every: Any, own: Any, known: Any) -> tuple[Any, Any]:
    """Mean and variance of the places behind the known ones (equations 2.25 and 2.26)."""
    import numpy as np

    count = len(known)
    cross = every[count:, :count]
    weights = np.linalg.solve(every[:count, :count] + np.diag(own), cross.T)
    return weights.T @ known, np.maximum(np.diag(every)[count:] - (cross * weights.T).sum(1), 0.0)


def _likeliest(
    every: Any, own: Any, known: Any, changes: Sequence[Any]
) -> tuple[float, float, int]:
    """s, r and the place in `_CHANGES` of c and λ: of those allowed, where each run is likeliest given the others.

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
    """The standard deviation of each run given the others, and how many of them it is off (equation 5.12)."""
    import numpy as np

    inverse = np.linalg.inv(covariance)
    deviations = 1 / np.sqrt(np.diag(inverse))
    return deviations, np.abs(inverse @ known) * deviations
