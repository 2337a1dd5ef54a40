"""A device's calibration: what its operations cost, fitted to measurements of it. Kept as JSON; loads no torch.

Per family of operations, t = a + max(flops / F, bytes / B). A training step is c · Σ t + d · (number of operations): c for what
operations cost one another (caches), d for what autograd and Python cost each. The interval is what was seen on networks that the
fit of c and d had not seen (leave one family out), widened by what the machine drifted meanwhile: it will drift again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainwright.estimator.errors import BadInput
from trainwright.estimator.structure import Structure

SCHEMA_VERSION = 1
_FLOPS_FACTOR = {
    "fp32": 1.0,
    "fp64": 2.0,
}  # what is measured is fp32; fp64 has half the lanes (its bytes are counted double)
_UNBOUND = 1e18  # a rate that no operation of the family is bound by, per second


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class OpMeasurement(_Value):
    """Seconds that one operation took."""

    family: str
    flops: float
    bytes: float
    seconds: float


class StepMeasurement(_Value):
    """Seconds that one training step of a network took, and the network's structure."""

    family: str
    batch_size: int
    structure: Structure
    seconds: float


class OpCost(_Value):
    """t = latency_s + max(flops / flops_per_s, bytes / bytes_per_s)."""

    latency_s: float
    flops_per_s: float
    bytes_per_s: float

    def __call__(self, flops: float, moved: float) -> float:
        return self.latency_s + max(flops / self.flops_per_s, moved / self.bytes_per_s)


class ErrorSummary(_Value):
    """Relative errors, 0.1 for 10 %."""

    median: float
    p90: float


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
    sentinel_drift: float = Field(description="spread of the sentinel's time over the session: (p90 - p10) / median")
    costs: dict[str, OpCost]
    step_scale: float
    step_per_op_s: float
    cross_validated_error: ErrorSummary
    low_factor: float = Field(description="5th percentile of measured / predicted, networks left out, less drift")
    high_factor: float = Field(description="95th percentile, and drift")

    def step_time_s(self, structure: Structure, batch_size: int) -> float:
        """The predicted median of a training step, seconds."""
        return self.step_scale * op_time_s(self.costs, structure, batch_size) + self.step_per_op_s * op_count(structure)

    def coverage(self, structure: Structure, batch_size: int) -> float:
        """The share of the predicted time in operations of families that were measured by themselves."""
        total, factor = op_time_s(self.costs, structure, batch_size), _FLOPS_FACTOR[structure.precision]
        known = sum(
            one.count * self.costs[one.family](factor * one.flops(batch_size), one.bytes(batch_size))
            for one in structure.trace
            if one.family in self.costs
        )
        return min(1.0, known / total) if total > 0 else 0.0


def op_count(structure: Structure) -> int:
    """How many operations a step calls."""
    return sum(one.count for one in structure.trace)


def op_time_s(costs: dict[str, OpCost], structure: Structure, batch_size: int) -> float:
    """The sum of a step's operations, each at its family's cost; an unknown family costs as elementwise operations do."""
    other, flops_factor = costs["elementwise"], _FLOPS_FACTOR[structure.precision]
    return sum(
        one.count * costs.get(one.family, other)(flops_factor * one.flops(batch_size), one.bytes(batch_size))
        for one in structure.trace
    )


def fit_op(measured: Sequence[OpMeasurement]) -> OpCost:
    """The cost of a family: the latency and rates of least absolute log error, searched from the best seen."""
    from scipy.optimize import minimize

    seconds = [one.seconds for one in measured]
    latency = min(seconds)
    flops_rate = max(one.flops / one.seconds for one in measured)
    bytes_rate = max(one.bytes / one.seconds for one in measured)

    def cost(logs: Any) -> OpCost:
        a, f, b = (math.exp(min(max(value, -80.0), 80.0)) for value in logs)
        return OpCost(latency_s=a, flops_per_s=f if flops_rate else _UNBOUND, bytes_per_s=b if bytes_rate else _UNBOUND)

    def loss(logs: Any) -> float:
        model = cost(logs)
        return sum(abs(math.log(model(one.flops, one.bytes) / one.seconds)) for one in measured)

    start = [math.log(latency), math.log(flops_rate or _UNBOUND), math.log(bytes_rate or _UNBOUND)]
    found = minimize(loss, start, method="Nelder-Mead", options={"maxiter": 2000, "xatol": 1e-3, "fatol": 1e-3})
    return cost(found.x)


def fit_step(costs: dict[str, OpCost], steps: Sequence[StepMeasurement]) -> tuple[float, float]:
    """Scale and per-operation overhead of whole steps, by non-negative least squares on relative errors."""
    import numpy as np
    from scipy.optimize import nnls

    rows = np.array(
        [
            [op_time_s(costs, one.structure, one.batch_size) / one.seconds, op_count(one.structure) / one.seconds]
            for one in steps
        ]
    )
    (scale, per_op), _ = nnls(rows, np.ones(len(steps)))
    return float(scale), float(per_op)


def fit(
    ops: Sequence[OpMeasurement], steps: Sequence[StepMeasurement], *, sentinel_drift: float, **facts: Any
) -> Calibration:
    """The calibration that these measurements give; `facts` are the device's and the session's."""
    import numpy as np

    by_family: dict[str, list[OpMeasurement]] = {}
    for op in ops:
        by_family.setdefault(op.family, []).append(op)
    costs = {family: fit_op(measured) for family, measured in by_family.items()}
    scale, per_op = fit_step(costs, steps)
    ratios = []
    for family in sorted({one.family for one in steps}):
        others = [one for one in steps if one.family != family]
        left_scale, left_per_op = fit_step(costs, others)
        for step in steps:
            if step.family == family:
                ops_s, count = op_time_s(costs, step.structure, step.batch_size), op_count(step.structure)
                ratios.append(step.seconds / (left_scale * ops_s + left_per_op * count))
    errors = np.abs(1 / np.array(ratios) - 1)
    low, high = np.quantile(ratios, [0.05, 0.95])
    return Calibration(
        costs=costs,
        step_scale=scale,
        step_per_op_s=per_op,
        measurements=len(ops) + len(steps),
        sentinel_drift=sentinel_drift,
        cross_validated_error=ErrorSummary(median=float(np.median(errors)), p90=float(np.quantile(errors, 0.9))),
        low_factor=float(min(1.0, low)) / (1 + sentinel_drift),
        high_factor=float(max(1.0, high)) * (1 + sentinel_drift),
        **facts,
    )


def save(calibration: Calibration, path: Path) -> None:
    """Write a calibration, at once or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(calibration.model_dump_json(indent=1))
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
    if torch_version is not None and found.torch != torch_version:
        raise BadInput(
            f"calibration: {path}: was made with torch {found.torch}, here is {torch_version}; calibrate again"
        )
    return found
