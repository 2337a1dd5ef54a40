"""A measured step of a pipeline, to set beside the planned one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainwright.tasks.runs.artefacts.step_kinds import StepByKind
from trainwright.tasks.runs.artefacts.training_result import Result


@dataclass(frozen=True)
class MeasuredStep:
    """The passes of stages, and peaks of memory in bytes, by device."""

    stages: Mapping[str, StepByKind] = field(default_factory=dict)
    peak_bytes: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, result: Result | None) -> MeasuredStep:
        """What a training measured; None: it has not ended."""
        if result is None:
            return cls()
        return cls(
            {one.device: one for one in result.measured.by_kind if one.passes},
            {one.id: one.peak_memory_bytes for one in result.devices},
        )

    def of_device(self, device: str) -> StepByKind | None:
        """A device's part; None if it had no stage."""
        return self.stages.get(device)

    @property
    def step_s(self) -> float:
        """When the last pass has ended; 0 without stages."""
        return max((one.passes[-1].end_s for one in self.stages.values()), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of that in which devices make no pass."""
        passed_s = sum(
            each.end_s - each.begin_s for one in self.stages.values() for each in one.passes
        )
        whole_s = len(self.stages) * self.step_s
        return 1 - passed_s / whole_s if whole_s > 0 else 0.0
