"""A device's calibration: what its operations and steps cost, fitted to measurements of it. Kept as JSON; loads no torch.

A training step takes c · Σ t + d · (number of operations): Σ t its operations by `op_cost`, c and d for what they cost one
another and what Python and autograd cost each. c and d are used where cross-validation says that they help, else 1 and 0. The
interval is conformal: the quantiles of measured / predicted on families of networks that the fit had not seen (leave one family
out; Vovk et al., Algorithmic Learning in a Random World, 2005). What was measured is told in the machine's median speed, by the
sentinel.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainwright.estimator.devices import DEVICE_TYPES
from trainwright.estimator.energy import Power
from trainwright.estimator.errors import BadInput
from trainwright.estimator.op_cost import FamilyCost, OpSample, Work, fit_families, times
from trainwright.estimator.structure import Operation, Structure

SCHEMA_VERSION = 2
_FLOPS_FACTOR = {"fp64": 2.0}  # what is measured is fp32; fp64 has half the lanes (its bytes are counted double)
_TAIL = 0.05
_UNSEEN = 1.0  # what the logarithm of an interval's half widens by where nothing of a step was seen


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class StepSample(_Value):
    """Seconds that one training step of a network took, and each of its operations where it stood in it."""

    family: str
    single: bool = Field(default=False, description="one layer only: it tells of operations, not of steps")
    batch_size: int
    seconds: float
    sentinel_s: float
    ops: tuple[OpSample, ...]


class ErrorSummary(_Value):
    """Relative errors, 0.1 for 10 %."""

    median: float
    p90: float


class StepCorrection(_Value):
    """t = scale · Σ t + per_op_s · operations."""

    scale: float = 1.0
    per_op_s: float = 0.0


class Calibration(_Value):
    """The file that `trainwright calibrate` writes."""

    schema_version: int = SCHEMA_VERSION
    mode: Literal["calibrated", "few-shot"] = "calibrated"
    device_type: str
    threads: int
    dtype: str
    torch: str
    processor: str
    created_at: str
    measurements: int
    duration_s: float
    sentinel_drift: float = Field(description="spread of the sentinel's time over the session: (p90 - p10) / median")
    families: dict[str, FamilyCost] = Field(min_length=1)
    kinds: tuple[str, ...] = Field(description="the operations that were seen")
    correction: StepCorrection
    cross_validated_error: ErrorSummary
    low_factor: float = Field(description="5th percentile of measured / predicted, families left out")
    high_factor: float = Field(description="95th percentile")
    power: Power | None = Field(default=None, description="where the machine has a meter; of `threads` cores of a CPU")

    def step_times_s(self, structure: Structure, batch_sizes: Sequence[int]) -> list[float]:
        """The predicted median of a training step, seconds, for each batch size (ascending); never less for more samples."""
        raw = [
            _corrected(self.correction, sum(float(one.sum()) for one in each.values()), op_count(structure))
            for each in (self._op_times(structure, size) for size in batch_sizes)
        ]
        return list(itertools.accumulate(raw, max))

    def coverage(self, structure: Structure, batch_size: int) -> tuple[float, list[str]]:
        """The share of the predicted time in kinds of operations that were measured, and the other kinds, dearest first."""
        seen, unknown = 0.0, dict[str, float]()
        work = _work(structure, batch_size)
        for family, seconds in self._op_times(structure, batch_size).items():
            for kind, value in zip(work[family].kinds, seconds, strict=True):
                if kind in self.kinds:
                    seen += float(value)
                else:
                    unknown[kind] = unknown.get(kind, 0.0) + float(value)
        total = seen + sum(unknown.values())
        return (min(1.0, seen / total) if total > 0 else 0.0), sorted(unknown, key=lambda kind: -unknown[kind])

    def factors(self, coverage: float) -> tuple[float, float]:
        """The interval's ends over the median, wider where less of the step was seen."""
        wider = math.exp(_UNSEEN * (1 - coverage))
        return self.low_factor / wider, self.high_factor * wider

    def _op_times(self, structure: Structure, batch_size: int) -> dict[str, Any]:
        factor = self._flops_factor(structure.precision)
        return {
            family: times(self.families, family, work, factor) for family, work in _work(structure, batch_size).items()
        }

    def _flops_factor(self, precision: str) -> float:
        """How many FLOPs of fp32, which is what was measured, one of this precision costs: few-shot, by the datasheet's peaks."""
        if self.mode == "calibrated":
            return _FLOPS_FACTOR.get(precision, 1.0)
        peaks = DEVICE_TYPES[self.device_type].peak_flops
        return peaks["fp32"] / peaks["bf16" if precision == "amp" else precision]


def op_count(structure: Structure) -> int:
    """How many operations a step calls."""
    return sum(one.count for one in structure.trace)


def _work(structure: Structure, batch_size: int) -> dict[str, Work]:
    """A step's operations by family."""
    return by_family(
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


def by_family(rows: Sequence[tuple[str, str, int, float, float, dict[str, float]]]) -> dict[str, Work]:
    """Operations (family, kind, count, flops, bytes, dims) by family."""
    groups: dict[str, list[tuple[str, str, int, float, float, dict[str, float]]]] = {}
    for row in rows:
        groups.setdefault(row[0], []).append(row)
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


def _corrected(correction: StepCorrection, ops_s: float, count: int) -> float:
    return correction.scale * ops_s + correction.per_op_s * count


class _Fold:
    """The steps as a fit sees them: predicted operations and their number, beside what was measured."""

    def __init__(self, costs: dict[str, FamilyCost], steps: Sequence[StepSample]) -> None:
        import numpy as np

        self.ops_s = np.array([_predicted(costs, step) for step in steps])
        self.counts = np.array([float(sum(one.count for one in step.ops)) for step in steps])
        self.seconds = np.array([step.seconds for step in steps])

    def fit(self) -> StepCorrection:
        """Non-negative least squares on relative errors."""
        import numpy as np
        from scipy.optimize import nnls

        rows = np.stack([self.ops_s / self.seconds, self.counts / self.seconds], axis=1)
        (scale, per_op), _ = nnls(rows, np.ones(len(self.seconds)))
        return StepCorrection(scale=float(scale), per_op_s=float(per_op)) if scale > 0 else StepCorrection()

    def ratios(self, correction: StepCorrection) -> Any:
        """measured / predicted."""
        return self.seconds / (correction.scale * self.ops_s + correction.per_op_s * self.counts)


def _predicted(costs: dict[str, FamilyCost], step: StepSample) -> float:
    work = by_family([(one.family, one.kind, one.count, one.flops, one.bytes, one.dims) for one in step.ops])
    return sum(float(times(costs, family, each).sum()) for family, each in work.items())


def fit(samples: Sequence[StepSample], **facts: Any) -> Calibration:
    """The calibration that these measurements give; `facts` are the device's and the session's."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=1, user_api="blas"):  # the matrices are small: more threads only wait for one another
        return _fit(samples, facts)


def _fit(samples: Sequence[StepSample], facts: dict[str, Any]) -> Calibration:
    import numpy as np

    sentinels = np.array([one.sentinel_s for one in samples])
    unit = float(np.median(sentinels))
    steps = [_at_median_speed(one, unit / one.sentinel_s) for one in samples]
    costs = fit_families([op for step in steps for op in step.ops])
    ratios: dict[bool, list[float]] = {True: [], False: []}
    whole = [one for one in steps if not one.single]
    for family in sorted({one.family for one in whole}):
        others, left = [one for one in whole if one.family != family], [one for one in whole if one.family == family]
        without = fit_families([op for step in steps if step.family != family for op in step.ops], like=costs)
        for corrected in ratios:
            correction = _Fold(without, others).fit() if corrected else StepCorrection()
            ratios[corrected] += _Fold(without, left).ratios(correction).tolist()
    helps = np.median(np.abs(np.log(ratios[True]))) < np.median(np.abs(np.log(ratios[False])))
    seen = np.sort(ratios[bool(helps)])
    errors = np.abs(1 / seen - 1)
    rank = min(len(seen) - 1, math.ceil((len(seen) + 1) * (1 - _TAIL)) - 1)
    low, high = np.quantile(sentinels, [0.1, 0.9])
    return Calibration(
        families=costs,
        kinds=tuple(sorted({op.kind for step in steps for op in step.ops})),
        correction=_Fold(costs, whole).fit() if helps else StepCorrection(),
        measurements=sum(len(one.ops) + 1 for one in samples),
        sentinel_drift=float((high - low) / unit),
        cross_validated_error=ErrorSummary(median=float(np.median(errors)), p90=float(np.quantile(errors, 0.9))),
        low_factor=min(1.0, float(seen[len(seen) - 1 - rank])),
        high_factor=max(1.0, float(seen[rank])),
        **facts,
    )


def _at_median_speed(sample: StepSample, factor: float) -> StepSample:
    ops = tuple(one.model_copy(update={"seconds": one.seconds * factor}) for one in sample.ops)
    return sample.model_copy(update={"seconds": sample.seconds * factor, "ops": ops})


def save(calibration: Calibration, path: Path) -> None:
    """Write a calibration, at once or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(calibration.model_dump_json())
    part.replace(path)


def load(path: Path, torch_version: str | None = None) -> Calibration:
    """Read a calibration. Raises BadInput where it is missing, cut short, of another schema, or of another torch."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError):
        raise BadInput(f"calibration: {path}: no such file that can be read") from None
    try:
        document = json.loads(text)
        version = document.get("schema_version") if isinstance(document, dict) else None
        if version != SCHEMA_VERSION:
            raise BadInput(
                f"calibration: {path}: has schema version {version}; allowed: {SCHEMA_VERSION}; calibrate again"
            )
        found = Calibration.model_validate(document)
    except (ValueError, ValidationError):
        raise BadInput(f"calibration: {path}: is not a calibration, or was cut short; calibrate again") from None
    if found.device_type not in DEVICE_TYPES:
        raise BadInput(
            f"calibration: {path}: is of device type {found.device_type!r}; allowed: {', '.join(sorted(DEVICE_TYPES))}"
        )
    if torch_version is not None and found.torch != torch_version:
        raise BadInput(
            f"calibration: {path}: was made with torch {found.torch}, here is {torch_version}; calibrate again"
        )
    return found
