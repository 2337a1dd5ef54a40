"""A device's calibration: what its operations and steps cost there. Kept as JSON; loads no torch.

A training step takes c · Σ t + d · (number of operations): Σ t its operations by `op_cost`, c and d for what they cost one
another and what being timed added to each (`fitting` finds them).

Its 90 % interval is exp(± q · σ) of that, σ² = σ₀² + Σ over families (Σ share · deviation)²: σ₀ is how far steps are from the sum
of their operations; the deviations are those of `op_cost` for what calibration has not seen, taken to err together in a family.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trainwright.estimator.devices import DEVICE_TYPES
from trainwright.estimator.energy import Power
from trainwright.estimator.errors import BadInput
from trainwright.estimator.op_cost import FamilyCost, Work, cost_family, times
from trainwright.estimator.speed import Speed
from trainwright.estimator.structure import Operation, Structure

SCHEMA_VERSION = 3
_FLOPS_FACTOR = {"fp64": 2.0}  # what is measured is fp32; fp64 has half the lanes (its bytes are counted double)
_LARGE = ("conv", "conv_backward", "matmul", "attention", "rnn")


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


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
    mode: Literal["calibrated", "few-shot"] = "calibrated"
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
    families: dict[str, FamilyCost] = Field(min_length=1)
    kinds: tuple[str, ...] = Field(description="the operations that were seen")
    correction: StepCorrection
    cross_validated_error: ErrorSummary
    step_deviation: float = Field(description="σ₀: of the logarithm of a step's time over its operations'")
    interval_quantile: float = Field(description="q: half the interval's width in deviations")
    power: Power | None = Field(default=None, description="where the machine has a meter; of `threads` cores of a CPU")

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
        deviation = deviation_of(self._op_times(structure, batch_size).values(), self.step_deviation)
        return math.exp(-self.interval_quantile * deviation), math.exp(self.interval_quantile * deviation)

    def _op_times(self, structure: Structure, batch_size: int) -> dict[str, tuple[Any, Any]]:
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
    """A step's operations by family of cost."""
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
    """Operations (family, kind, count, flops, bytes, dims) by family of cost."""
    groups: dict[str, list[tuple[str, str, int, float, float, dict[str, float]]]] = {}
    calls = Counter[str]()
    for row in rows:
        calls[row[1]] += row[2]
    for row in rows:
        told = (*row[:5], in_step(row[0], row[5], calls[row[1]]))
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


def in_step(family: str, dims: dict[str, float], calls: int) -> dict[str, float]:
    """The sizes that an operation's time depends on, with how often the step calls its kind: small ones are quicker when hot."""
    return dims if family in _LARGE else dims | {"calls": float(calls)}


def deviation_of(families: Iterable[tuple[Any, Any]], step: float) -> float:
    """σ of a step, from its families' seconds and deviations."""
    parts = [(float(seconds.sum()), float((seconds * deviation).sum())) for seconds, deviation in families]
    total = sum(seconds for seconds, _ in parts) or 1.0
    return math.sqrt(step**2 + sum((unsure / total) ** 2 for _, unsure in parts))


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
    if found.device_type not in DEVICE_TYPES:
        raise BadInput(
            f"calibration: {where}: is of device type {found.device_type!r}; allowed: {', '.join(sorted(DEVICE_TYPES))}"
        )
    if torch_version is not None and found.torch != torch_version:
        raise BadInput(
            f"calibration: {where}: was made with torch {found.torch}, here is {torch_version}; calibrate again"
        )
    return found
