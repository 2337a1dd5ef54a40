"""A device's calibration: what its operations and steps cost, fitted to measurements of it. Kept as JSON; loads no torch.

A training step takes c · Σ t + d · (number of operations): Σ t its operations by `op_cost`, c and d for what they cost one
another and what being timed added to each. c and d are used where cross-validation says that they help, else 1 and 0.

The interval is conformal (Vovk et al., Algorithmic Learning in a Random World, 2005), its width that of the step at hand:
exp(± q · σ), σ² = σ₀² + Σ over families (Σ share · deviation)². σ₀ is how far steps are from the sum of their operations; the
deviations are those of `op_cost` for what calibration has not seen, taken to err together within a family. q is the 90 %
quantile of |ln(measured / predicted)| / σ on networks that the fit had not seen, less what measuring them was off by. The error
that is told is of networks whose whole family it had not seen.

What was measured is told in the machine's median speed, by the sentinel.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from trainwright.estimator.errors import BadInput, BusyMachine
from trainwright.estimator.op_cost import FamilyCost, OpSample, Work, cost_family, fit_families, times
from trainwright.estimator.structure import Operation, Structure

SCHEMA_VERSION = 3
_FLOPS_FACTOR = {"fp64": 2.0}  # what is measured is fp32; fp64 has half the lanes (its bytes are counted double)
_INSIDE = 0.9  # the interval's share
_LARGE = ("conv", "conv_backward", "matmul", "attention", "rnn")
_LEAST_DEVIATION = 0.02
_FOLDS = 8
_LEAST_OWN = 0.5  # of the squared errors that are the model's own, whatever the noise of the measurements
SENTINEL_FLOPS = 3 * 2 * 160**3
SENTINEL_CALLS = 90


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Speed(_Value):
    """Seconds that three kernels took, which are always the same: how fast the machine was at the moment.

    Neighbours on a machine take its caches and its memory from a program far more than its arithmetic.
    """

    compute_s: float = Field(description="matrix products that fit in the caches, of `SENTINEL_FLOPS` together")
    memory_s: float = Field(description="a sum of arrays that do not")
    calls_s: float = Field(description="a chain of small operations, `SENTINEL_CALLS` of them")

    def slower(self, than: Speed, seconds: float, flops: float, calls: float = 1.0) -> float:
        """How many times as long as at that speed something takes that took so many seconds, for so many FLOPs and calls.

        What its FLOPs and calls take at the sentinel's rates is arithmetic and calling; the rest waits for memory.
        """
        compute = min(1.0, flops / SENTINEL_FLOPS * self.compute_s / seconds)
        call = min(1.0 - compute, calls / SENTINEL_CALLS * self.calls_s / seconds)
        return float(
            (self.compute_s / than.compute_s) ** compute
            * (self.calls_s / than.calls_s) ** call
            * (self.memory_s / than.memory_s) ** (1 - compute - call)
        )

    @staticmethod
    def median(seen: Sequence[Speed]) -> Speed:
        """Of each kernel."""
        return Speed(
            compute_s=statistics.median(one.compute_s for one in seen),
            memory_s=statistics.median(one.memory_s for one in seen),
            calls_s=statistics.median(one.calls_s for one in seen),
        )


class StepSample(_Value):
    """Seconds that one training step of a network took, and each of its operations where it stood in it."""

    family: str
    single: bool = Field(default=False, description="one layer only: it tells of operations, not of steps")
    batch_size: int
    seconds: float
    noise: float = Field(
        default=0.0, description="of the logarithm of `seconds`, its standard deviation as it was seen"
    )
    speed: Speed = Field(description="while the steps were timed")
    ops_speed: Speed = Field(description="while the operations were")
    ops: tuple[OpSample, ...]


class ErrorSummary(_Value):
    """Relative errors, 0.1 for 10 %."""

    median: float
    p90: float


class StepCorrection(_Value):
    """t = scale · Σ t + per_op_s · operations, and never below half of Σ t."""

    scale: float = 1.0
    per_op_s: float = 0.0

    def __call__(self, ops_s: Any, count: Any) -> Any:
        """Seconds of a step from those of its operations and their number; of numbers or of arrays."""
        import numpy as np

        return np.maximum(self.scale * ops_s + self.per_op_s * count, 0.5 * ops_s)


class Calibration(_Value):
    """The file that `trainwright calibrate` writes."""

    schema_version: int = SCHEMA_VERSION
    device_type: str
    threads: int
    dtype: str
    torch: str
    processor: str
    created_at: str
    measurements: int
    duration_s: float
    speed: Speed = Field(description="the machine's median speed in the session, at which all times are told")
    sentinel_drift: float = Field(description="spread of the sentinel's time over the session: (p90 - p10) / median")
    families: dict[str, FamilyCost]
    kinds: tuple[str, ...] = Field(description="the operations that were seen")
    correction: StepCorrection
    cross_validated_error: ErrorSummary
    step_deviation: float = Field(description="σ₀: of the logarithm of a step's time over its operations'")
    interval_quantile: float = Field(description="q: half the interval's width in deviations")

    def step_times_s(self, structure: Structure, batch_sizes: Sequence[int]) -> list[float]:
        """The predicted median of a training step, seconds, for each batch size (ascending); never less for more samples."""
        raw = [
            self.correction(sum(float(seconds.sum()) for seconds, _ in each.values()), op_count(structure))
            for each in (self._op_times(structure, size) for size in batch_sizes)
        ]
        return list(itertools.accumulate(raw, max))

    def coverage(self, structure: Structure, batch_size: int) -> tuple[float, list[str]]:
        """The share of the predicted time in kinds of operations that were measured, and the other kinds, dearest first."""
        seen, unknown = 0.0, dict[str, float]()
        work = _work(structure, batch_size)
        for family, (seconds, _) in self._op_times(structure, batch_size).items():
            for kind, value in zip(work[family].kinds, seconds, strict=True):
                if kind in self.kinds:
                    seen += float(value)
                else:
                    unknown[kind] = unknown.get(kind, 0.0) + float(value)
        total = seen + sum(unknown.values())
        return (min(1.0, seen / total) if total > 0 else 0.0), sorted(unknown, key=lambda kind: -unknown[kind])

    def shares(self, structure: Structure, batch_size: int) -> dict[str, float]:
        """The shares of the operations' predicted time, by family; they sum to one."""
        took = {family: float(seconds.sum()) for family, (seconds, _) in self._op_times(structure, batch_size).items()}
        total = sum(took.values())
        return {family: seconds / total for family, seconds in took.items()} if total > 0 else {}

    def sha256(self) -> str:
        """What tells this calibration from others."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def factors(self, structure: Structure, batch_size: int) -> tuple[float, float]:
        """The 90 % interval's ends over the median."""
        deviation = _deviation(self._op_times(structure, batch_size).values(), self.step_deviation)
        return math.exp(-self.interval_quantile * deviation), math.exp(self.interval_quantile * deviation)

    def _op_times(self, structure: Structure, batch_size: int) -> dict[str, tuple[Any, Any]]:
        factor = _FLOPS_FACTOR.get(structure.precision, 1.0)
        return {
            family: times(self.families, family, work, factor) for family, work in _work(structure, batch_size).items()
        }


def op_count(structure: Structure) -> int:
    """How many operations a step calls."""
    return sum(one.count for one in structure.trace)


def _work(structure: Structure, batch_size: int) -> dict[str, Work]:
    """A step's operations by family of cost."""
    return _by_family(
        [
            (
                one.family, _known_as(one), one.count, one.flops(batch_size), one.bytes(batch_size),
                {name: line(batch_size) for name, line in one.dims.items()},
            )
            for one in structure.trace
        ]
    )  # fmt: skip


def _known_as(one: Operation) -> str:
    """The kind as calibration names it: what computes in half precision is another operation."""
    return f"{one.kind} in {one.dtype}" if one.dtype in ("bfloat16", "float16") else one.kind


def _by_family(rows: Sequence[tuple[str, str, int, float, float, dict[str, float]]]) -> dict[str, Work]:
    groups: dict[str, list[tuple[str, str, int, float, float, dict[str, float]]]] = {}
    calls = Counter[str]()
    for row in rows:
        calls[row[1]] += row[2]
    for row in rows:
        told = (*row[:5], _in_step(row[0], row[5], calls[row[1]]))
        groups.setdefault(cost_family(row[0], row[5]), []).append(told)
    return {
        family: Work(
            kinds=tuple(row[1] for row in members),
            counts=tuple(row[2] for row in members),
            flops=tuple(row[3] for row in members),
            bytes=tuple(row[4] for row in members),
            dims=tuple(row[5] for row in members),
        )
        for family, members in groups.items()
    }


def _deviation(families: Iterable[tuple[Any, Any]], step: float) -> float:
    """σ of a step, from its families' seconds and deviations."""
    parts = [(float(seconds.sum()), float((seconds * deviation).sum())) for seconds, deviation in families]
    total = sum(seconds for seconds, _ in parts) or 1.0
    return math.sqrt(step**2 + sum((unsure / total) ** 2 for _, unsure in parts))


def _predicted(costs: dict[str, FamilyCost], step: StepSample) -> list[tuple[Any, Any]]:
    work = _by_family([(one.family, one.kind, one.count, one.flops, one.bytes, one.dims) for one in step.ops])
    return [times(costs, family, each) for family, each in work.items()]


class _Sums:
    """Steps beside the sums of their operations, both measured: what a step takes beyond them."""

    def __init__(self, steps: Sequence[StepSample]) -> None:
        import numpy as np

        self.ops_s = np.array([sum(one.count * one.seconds for one in step.ops) for step in steps])
        self.counts = np.array([float(sum(one.count for one in step.ops)) for step in steps])
        self.seconds = np.array([step.seconds for step in steps])

    def fit(self) -> StepCorrection:
        """The correction of least logarithmic errors, which outliers bend little."""
        from scipy.optimize import least_squares

        found = least_squares(
            lambda x: self.errors(StepCorrection(scale=float(x[0]), per_op_s=1e-6 * float(x[1]))),
            [1.0, 0.0], bounds=([0.5, -5.0], [2.0, 50.0]), loss="soft_l1", f_scale=0.1,
        )  # fmt: skip
        return StepCorrection(scale=float(found.x[0]), per_op_s=1e-6 * float(found.x[1]))

    def errors(self, correction: StepCorrection) -> Any:
        """ln(measured / corrected)."""
        import numpy as np

        return np.log(self.seconds / correction(self.ops_s, self.counts))


def drift(samples: Sequence[StepSample]) -> float:
    """How far the machine's speed spread while they were measured: (p90 - p10) / median of the sentinel's time."""
    import numpy as np

    unit = Speed.median([one.speed for one in samples])
    low, high = np.quantile([one.speed.slower(unit, one.seconds, 0.0, 0.0) for one in samples], [0.1, 0.9])
    return float(high - low)


def refuse_busy(samples: Sequence[StepSample], most_drift: float) -> None:
    """Raise BusyMachine where the machine's speed spread by more than `most_drift` while they were measured."""
    found = drift(samples)
    if found > most_drift:
        raise BusyMachine(
            f"calibrate: the machine was too busy: its speed spread by {100 * found:.0f} % while it was measured; allowed: "
            f"{100 * most_drift:.0f} %; stop what else runs on it and calibrate again, or allow more with --most-drift",
            sentinel_drift=found,
        )


def fit(samples: Sequence[StepSample], **facts: Any) -> Calibration:
    """The calibration that these measurements give; `facts` are the device's and the session's."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=1, user_api="blas"):  # the matrices are small: more threads only wait for one another
        return _fit(samples, facts)


def _fit(samples: Sequence[StepSample], facts: dict[str, Any]) -> Calibration:
    import numpy as np

    unit = Speed.median([one.speed for one in samples])
    steps = [_at_median_speed(one, unit) for one in samples]
    costs = fit_families([op for step in steps for op in step.ops])
    correction, step_deviation = _correction(steps)
    whole = [one for one in steps if not one.single]
    families = [[one for one in whole if one.family == family] for family in sorted({one.family for one in whole})]
    off = [error for left in families for error, _ in _left_out(left, steps, costs, correction, step_deviation)]
    relative = np.abs([math.exp(-error) - 1 for error in off])
    parts = [whole[number::_FOLDS] for number in range(min(_FOLDS, len(whole)))]
    unseen = [one for left in parts for one in _left_out(left, steps, costs, correction, step_deviation)]
    scores = sorted(abs(error) / deviation for error, deviation in unseen)
    rank = min(len(scores), math.ceil((len(scores) + 1) * _INSIDE)) - 1
    noise = np.mean([one.noise**2 for one in whole]) / np.mean([error**2 for error, _ in unseen])
    return Calibration(
        families=costs,
        kinds=tuple(sorted({op.kind for step in steps for op in step.ops})),
        correction=correction,
        measurements=sum(len(one.ops) + 1 for one in samples),
        speed=unit,
        sentinel_drift=drift(samples),
        cross_validated_error=ErrorSummary(median=float(np.median(relative)), p90=float(np.quantile(relative, 0.9))),
        step_deviation=step_deviation,
        interval_quantile=scores[rank] * math.sqrt(max(_LEAST_OWN, 1 - float(noise))),
        **facts,
    )


def _correction(steps: Sequence[StepSample]) -> tuple[StepCorrection, float]:
    """What a step takes beyond its operations, where that helps families that were left out; the deviation that is left."""
    import numpy as np

    plain: list[float] = []
    corrected: list[float] = []
    for family in sorted({one.family for one in steps}):
        left = _Sums([one for one in steps if one.family == family])
        plain += np.abs(left.errors(StepCorrection())).tolist()
        others = [one for one in steps if one.family != family]
        corrected += np.abs(left.errors(_Sums(others).fit())).tolist() if others else plain
    helps = float(np.mean(corrected)) < float(np.mean(plain))
    deviation = 1.25 * float(
        np.mean(corrected if helps else plain)
    )  # mean absolute to standard, of a normal distribution
    return (_Sums(steps).fit() if helps else StepCorrection()), max(_LEAST_DEVIATION, deviation)


def _left_out(
    left: Sequence[StepSample],
    steps: Sequence[StepSample],
    costs: dict[str, FamilyCost],
    correction: StepCorrection,
    step_deviation: float,
) -> list[tuple[float, float]]:
    """ln(measured / predicted) and the predicted deviation of steps, by a fit that has seen none of them (its kernels have)."""
    names = {id(one) for one in left}
    without = fit_families([op for step in steps if id(step) not in names for op in step.ops], like=costs)
    found = []
    for step in left:
        parts = _predicted(without, step)
        ops_s = sum(float(seconds.sum()) for seconds, _ in parts)
        predicted = float(correction(ops_s, sum(one.count for one in step.ops)))
        found.append((math.log(step.seconds / predicted), _deviation(parts, step_deviation)))
    return found


def _in_step(family: str, dims: dict[str, float], calls: int) -> dict[str, float]:
    """The sizes that an operation's time depends on, with how often the step calls its kind: small ones are quicker when hot."""
    return dims if family in _LARGE else dims | {"calls": float(calls)}


def _at_median_speed(sample: StepSample, unit: Speed) -> StepSample:
    """The sample as it would have been at the speed `unit`."""

    calls = Counter[str]()
    for one in sample.ops:
        calls[one.kind] += one.count
    ops = tuple(
        one.model_copy(
            update={
                "seconds": one.seconds / sample.ops_speed.slower(unit, one.seconds, one.flops),
                "dims": _in_step(one.family, one.dims, calls[one.kind]),
            }
        )
        for one in sample.ops
    )
    flops = sum(one.count * one.flops for one in sample.ops)
    seconds = sample.seconds / sample.speed.slower(unit, sample.seconds, flops, calls.total())
    return sample.model_copy(update={"seconds": seconds, "ops": ops})


def save(calibration: Calibration, path: Path) -> None:
    """Write a calibration, at once or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(calibration.model_dump_json())
    part.replace(path)


def load(path: Path, torch_version: str | None = None) -> Calibration:
    """Read a calibration. Raises BadInput where it is missing, cut short, of another schema, or of another torch."""
    try:
        data = path.read_bytes()
    except OSError:
        raise BadInput(f"calibration: {path}: no such file that can be read") from None
    return parse(data, str(path), torch_version)


def parse(data: bytes, where: str, torch_version: str | None = None) -> Calibration:
    """The calibration that a file holds; `where` names it in an error. Raises BadInput as `load` does."""
    try:
        document = json.loads(data)
        version = document.get("schema_version") if isinstance(document, dict) else None
        if version != SCHEMA_VERSION:
            raise BadInput(
                f"calibration: {where}: has schema version {version}; allowed: {SCHEMA_VERSION}; calibrate again"
            )
        found = Calibration.model_validate(document)
    except (ValueError, RecursionError):
        raise BadInput(f"calibration: {where}: is not a calibration, or was cut short; calibrate again") from None
    if torch_version is not None and found.torch != torch_version:
        raise BadInput(
            f"calibration: {where}: was made with torch {found.torch}, here is {torch_version}; calibrate again"
        )
    return found
