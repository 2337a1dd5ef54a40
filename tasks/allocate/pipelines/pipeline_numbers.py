"""Which numbers of pipelines, stages and micro-batches, and which schedules a search tries."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.runs.artefacts.layout import StageSchedule
from trainwright.tasks.spec.train_spec import LayoutSpec

FEW_DEVICES = 6
"""Up to so many devices, all numbers of micro-batches are tried with all schedules."""
_SCHEDULES: tuple[StageSchedule, ...] = ("1f1b", "zero-bubble", "gpipe")
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_REPLICAS = (1, 2, 4)


class PipelineNumbers:
    """The numbers to try for a problem on so many devices; `spec` fixes some of them.

    A `brief` search tries fewer numbers of micro-batches and replicas.
    """

    def __init__(
        self, problem: PlanningProblem, spec: LayoutSpec, devices: int, *, brief: bool
    ) -> None:
        self._spec, self._devices = spec, devices
        self._units = problem.model.estimate.units
        self._few_may_win = problem.goal != "time" or not math.isinf(problem.limits.budget)
        self.is_wide = not brief and len(problem.devices) <= FEW_DEVICES
        self.is_brief = brief and len(problem.devices) > FEW_DEVICES
        self._most_replicas = 2 if brief else _REPLICAS[-1]
        self.most = min(problem.job.devices.max_count or devices, devices)
        """devices"""
        self.least = problem.job.devices.min_count

    def replicas(self) -> list[int]:
        """Numbers of pipelines, fewer first."""
        if self._spec.replicas is not None:
            return [self._spec.replicas]
        most = min(self._most_replicas, max(1, self.most // 2))
        return [one for one in _REPLICAS if one <= most]

    def schedules(self) -> tuple[StageSchedule, ...]:
        """Schedules; the first one is tried with all numbers."""
        given = self._spec.schedule
        return _SCHEDULES if given == "auto" else (given,)

    def micro_batches(self, samples: int) -> list[int]:
        """Numbers of micro-batches of a pipeline with these samples, fewer first."""
        joint = self._spec.batch_norm == "joint"
        if joint and any(one.batch_statistics for one in self._units):
            return [1]
        if self._spec.micro_batches is not None:
            return [self._spec.micro_batches] if self._spec.micro_batches <= samples else []
        if self.is_wide:
            return [one for one in _MICRO_BATCHES if one <= samples]
        useful = [one for one in _MICRO_BATCHES if 2 * self._devices <= one <= samples]
        return useful[:2] or [one for one in _MICRO_BATCHES if one <= samples][-1:]

    def stages(self, replicas: int) -> Iterator[int | None]:
        """Numbers of stages to try; None: the one with the shortest step."""
        if self._spec.stages is not None:
            yield self._spec.stages
            return
        yield None
        most = min(self.most // replicas, len(self._units))
        least = max(2 if replicas == 1 else 1, -(-self.least // replicas))
        if self._few_may_win or self.least > 1:
            yield from range(least, min(most, least + FEW_DEVICES) + 1)
        elif replicas > 1 and most > 1 and not (self.is_brief and most > FEW_DEVICES):
            yield 2  # the shortest step may need no stages
