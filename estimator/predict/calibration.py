"""A device's calibration: the costs of operations and steps on it. A JSON file; loads no torch.

A training step takes e + c · Σ t + d · (number of operations) + f · (bytes of its large blocks).
Σ t is the time of its operations by `op_cost`, in memory that the process already holds, corrected
by whole steps (`fit.whole_steps`). c is the effect of operations on each other, d the time of
Python and autograd per operation, e that per step (`fit.step_fit`). f is the cost of memory that is
mapped and returned with each block (`memory.freed_memory`).

The 90 % interval is exp(± q · σ) times that, σ² = σ₀² + Σ over families (Σ share · deviation)². σ₀
is how far steps are from the sum of their operations. The deviations are those of `op_cost` for
operations that calibration has not seen; within a family they are assumed to err together. The
interval is of wall-clock time, under as much other load as during calibration.

For another version of torch than the measured one, σ₀ grows by a stated amount (`for_torch`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from trainwright.estimator.devices import DEVICE_TYPES
from trainwright.estimator.errors import BadInput
from trainwright.estimator.frozen_model import FrozenModel
from trainwright.estimator.memory.freed_memory import MOST_HEAP_BLOCK_BYTES
from trainwright.estimator.memory.step_memory import made_bytes
from trainwright.estimator.named_file import read_named, write_named
from trainwright.estimator.predict.energy import PowerDraw
from trainwright.estimator.predict.loop_cost import LoopCost
from trainwright.estimator.predict.machine_speed import Speed
from trainwright.estimator.predict.op_cost import FamilyCost, times
from trainwright.estimator.predict.step_work import FamilyWork, StepWork
from trainwright.estimator.quantiles import NINETY
from trainwright.estimator.structure import Structure

SCHEMA_VERSION = 9
# 3 has no `loop`. Before 5 operations include the cost of memory, before 6 that of a step itself.
# Before 7 no cost depends on zeros or `step_bytes`; 7 has `zeros` instead of `zeros_in_ten`. Before
# 9 a recurrent layer's workspace is among the bytes it moves.
_READ = (3, 4, 5, 6, 7, 8, SCHEMA_VERSION)
_MOST_DEVIATION, _MOST_QUANTILE, _LEAST_QUANTILE = 10.0, 1e3, 0.1
_MOST_WIDTH = 100.0  # largest logarithm of an interval's factor: e^100 means that nothing is known
OTHER_TORCH_DEVIATION = 0.2
"""A step's time under two versions of torch: standard deviation of the ratio's logarithm.

An assumption, not a measurement: with it alone, the 90 % interval is a factor of 1.39 either way.
Finished runs under the version in use narrow it (`correction`).
"""


class ErrorSummary(FrozenModel):
    """Relative errors, 0.1 for 10 %."""

    median: float
    p90: float


class StepCorrection(FrozenModel):
    """t = fixed_s + scale · Σ t + per_op_s · operations, but at least half of Σ t."""

    scale: float = 1.0
    per_op_s: float = 0.0
    fixed_s: float = 0.0

    def __call__(self, ops_s: Any, count: Any) -> Any:
        """Seconds of a step from its operations' total seconds and number; numbers or arrays."""
        import numpy as np

        return np.maximum(self.fixed_s + self.scale * ops_s + self.per_op_s * count, 0.5 * ops_s)


class StepUncertainty(FrozenModel):
    """Facts about a predicted step besides its median."""

    coverage: float = Field(
        description="share of its time in kinds of operations that were measured"
    )
    unknown: tuple[str, ...] = Field(description="the other kinds, most expensive first")
    low_factor: float = Field(description="ends of the 90 % interval, relative to the median")
    high_factor: float
    steps_factor: float = Field(
        description="`high_factor` if the costs of its operations were known exactly"
    )
    shares: dict[str, float] = Field(
        description="shares of its operations' time, by family of cost; they sum to one"
    )


class Calibration(FrozenModel):
    """The file that `trainwright calibrate` writes."""

    schema_version: int = SCHEMA_VERSION
    mode: Literal["calibrated", "few-shot"] = "calibrated"
    device_type: str
    threads: int = Field(ge=1, le=10_000)
    dtype: str
    torch: str = Field(description="the version of torch whose steps it predicts")
    measured_torch: str | None = Field(
        default=None, description="the version that was measured; None: `torch`"
    )
    processor: str
    created_at: str
    measurements: int = Field(ge=0)
    duration_s: float = Field(ge=0)
    speed: Speed = Field(
        description="the machine's median speed in the session; all times are normalised to it"
    )
    sentinel_drift: float = Field(
        ge=0,
        description="the largest spread of a sentinel kernel's time over the session: "
        "(p90 - p10) / median",
    )
    families: dict[str, FamilyCost] = Field(min_length=1)
    reference: str | None = Field(
        default=None,
        description="processor of the reference whose costs are scaled; None: no reference",
    )
    kinds: tuple[str, ...] = Field(description="the operations that were measured")
    correction: StepCorrection
    cross_validated_error: ErrorSummary
    step_deviation: float = Field(
        ge=0,
        le=_MOST_DEVIATION,
        description="σ₀: standard deviation of ln(a step's time / its operations' time)",
    )
    interval_quantile: float = Field(
        ge=0, le=_MOST_QUANTILE, description="q: half the interval's width in deviations"
    )
    power: PowerDraw | None = Field(
        default=None, description="for a CPU, the power of `threads` cores; None: no meter"
    )
    first_touch_s_per_byte: float = Field(
        default=0.0, ge=0, description="f: cost of memory that is mapped, touched and returned"
    )
    loop: LoopCost | None = Field(
        default=None,
        description="the training loop's time per step; None: not measured",
    )
    process_bytes: float | None = Field(
        default=None, gt=0, description="memory of a rank besides its model; None: not measured"
    )

    def step_times_s(self, structure: Structure, batch_sizes: Sequence[int]) -> list[float]:
        """The predicted median seconds of a training step for each batch size (ascending).

        A larger batch never takes less.
        """
        return self.step(structure, batch_sizes, batch_sizes[0])[0]

    def uncertainty(self, structure: Structure, batch_size: int) -> StepUncertainty:
        """The uncertainty of a step's prediction, and its composition."""
        return self.step(structure, [batch_size], batch_size)[1]

    def step(
        self, structure: Structure, batch_sizes: Sequence[int], at: int
    ) -> tuple[list[float], StepUncertainty]:
        """`step_times_s`, and `uncertainty` at one batch size, in little more time."""
        step, count, raw = StepWork(structure), op_count(structure), []
        for size in batch_sizes:
            work = step(size)
            took = self._op_times(work, structure.precision)
            ops_s = self.correction(
                sum(float(seconds.sum()) for seconds, _ in took.values()), count
            )
            raw.append(
                ops_s
                + self.first_touch_s_per_byte * made_bytes(structure, size, MOST_HEAP_BLOCK_BYTES)
            )
            if size == at:
                uncertainty = self._uncertainty(work, took)
        return list(itertools.accumulate(raw, max)), uncertainty

    def operation_times_s(self, structure: Structure, batch_sizes: Sequence[int]) -> Any:
        """Seconds of all calls of each operation of the trace, before the step's correction.

        Shape: (batch sizes, operations).
        """
        import numpy as np

        step, found = StepWork(structure), np.zeros((len(batch_sizes), len(structure.trace)))
        for row, size in zip(found, batch_sizes, strict=True):
            work = step(size)
            for family, (seconds, _) in self._op_times(work, structure.precision).items():
                row[list(work[family].places)] = seconds
        return found

    def _uncertainty(
        self, work: Mapping[str, FamilyWork], took: Mapping[str, tuple[Any, Any]]
    ) -> StepUncertainty:
        by_family = {family: float(seconds.sum()) for family, (seconds, _) in took.items()}
        seen, unknown = set(self.kinds), Counter[str]()
        for family, (seconds, _) in took.items():
            for kind, value in zip(work[family].kinds, seconds, strict=True):
                if kind not in seen:
                    unknown[kind] += value
        total = sum(by_family.values())
        half = _times(self.interval_quantile * deviation_of(took.values(), self.step_deviation))
        return StepUncertainty(
            coverage=max(0.0, 1 - float(unknown.total()) / total) if total > 0 else 0.0,
            unknown=tuple(kind for kind, _ in unknown.most_common()),
            low_factor=1 / half,
            high_factor=half,
            steps_factor=_times(self.interval_quantile * self.step_deviation),
            shares={family: seconds / total for family, seconds in by_family.items()}
            if total > 0
            else {},
        )

    def sha256(self) -> str:
        """Identifies this calibration."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def for_torch(self, version: str) -> Calibration:
        """The same costs for a version of torch that was not measured, with a wider interval."""
        if version == self.torch:
            return self
        before = self.measured_torch or self.torch
        return self.wider().model_copy(update={"torch": version, "measured_torch": before})

    def wider(self) -> Calibration:
        """The same costs with the interval of another version of torch.

        (q · σ₀)² grows by (1.645 · OTHER_TORCH_DEVIATION)²: the difference between versions is
        independent of the rest, and 1.645 is the quantile of its normal distribution.
        """
        quantile = max(self.interval_quantile, _LEAST_QUANTILE)
        more = NINETY * OTHER_TORCH_DEVIATION / quantile
        deviation = math.hypot(self.step_deviation, more)
        return self.model_copy(update={"step_deviation": deviation, "interval_quantile": quantile})

    def torch_note(self) -> str | None:
        """Notes for users if another version of torch was measured."""
        if self.measured_torch is None or self.measured_torch == self.torch:
            return None
        factor = math.exp(NINETY * OTHER_TORCH_DEVIATION)
        return (
            f"the calibration was measured with torch {self.measured_torch}; torch {self.torch} is "
            f"installed: the interval is wider, as if times differed by a factor of {factor:.1f} "
            "(an assumption); `trainwright calibrate` measures again"
        )

    def _op_times(
        self, work: Mapping[str, FamilyWork], precision: str
    ) -> dict[str, tuple[Any, Any]]:
        factor = self._flops_factor(precision)
        return {family: times(self.families, family, each, factor) for family, each in work.items()}

    def _flops_factor(self, precision: str) -> float:
        """How many FLOPs of fp32, which was measured, one FLOP of this precision costs.

        By the datasheet's peaks. The bytes of a precision are those of its traced operations.
        """
        peaks = DEVICE_TYPES[self.device_type].peak_flops
        return peaks["fp32"] / peaks["bf16" if precision == "amp" else precision]


def _times(width: float) -> float:
    return math.exp(min(width, _MOST_WIDTH))


def op_count(structure: Structure) -> int:
    """The number of operations that a step calls."""
    return sum(one.count for one in structure.trace)


def deviation_of(families: Iterable[tuple[Any, Any]], step: float) -> float:
    """σ of a step, from its families' seconds and deviations."""
    parts = [
        (float(seconds.sum()), float((seconds * deviation).sum()))
        for seconds, deviation in families
    ]
    total = sum(seconds for seconds, _ in parts) or 1.0
    return math.sqrt(step**2 + sum((unsure / total) ** 2 for _, unsure in parts))


def save(calibration: Calibration, path: Path) -> None:
    """Write a calibration atomically. Raises BadInput if that fails."""
    write_named(path, calibration.model_dump_json().encode(), "calibration")


def is_calibration(content: bytes) -> bool:
    """Whether a file's content is a calibration, of any version, torch or device."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return (
        isinstance(document, dict)
        and {"schema_version", "device_type", "families"} <= document.keys()
    )


def load(path: Path, torch_version: str | None = None) -> Calibration:
    """Read a calibration, for a version of torch if one is given (`Calibration.for_torch`).

    Raises BadInput if it is missing, truncated or of another schema.
    """
    return parse(read_named(path, "calibration"), str(path), torch_version)


def parse(data: bytes, where: str, torch_version: str | None = None) -> Calibration:
    """The calibration in a file's content; `where` names it in an error. Raises as `load` does."""
    try:
        document = json.loads(data)
        if not isinstance(document, dict) or "schema_version" not in document:
            raise BadInput(
                f"calibration: {where}: is not a calibration: it has no schema_version; "
                "calibrate again"
            )
        if (version := document["schema_version"]) not in _READ:
            if "device_type" not in document:  # for example a structure
                raise BadInput(f"calibration: {where}: is not a calibration; calibrate again")
            raise BadInput(
                f"calibration: {where}: has schema version {version}; allowed: {min(_READ)} to "
                f"{max(_READ)}; calibrate again"
            )
        found = Calibration.model_validate(document)
    except ValidationError as error:
        field = ".".join(map(str, error.errors()[0]["loc"])) or "a part"
        raise BadInput(
            f"calibration: {where}: is not a calibration: {field} is missing or invalid; "
            "calibrate again"
        ) from None
    except (ValueError, RecursionError):
        raise BadInput(
            f"calibration: {where}: is not a calibration, or was truncated; calibrate again"
        ) from None
    if found.device_type not in DEVICE_TYPES:
        raise BadInput(
            f"calibration: {where}: is of device type {found.device_type!r}; allowed: "
            f"{', '.join(sorted(DEVICE_TYPES))}"
        )
    return found if torch_version is None else found.for_torch(torch_version)
