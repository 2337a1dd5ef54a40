"""Divisions of a model whose stages recompute what does not fit into memory otherwise."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from trainwright.estimator.structure import LayerFacts, Unit
from trainwright.tasks.allocate.actions.schedules import in_flight
from trainwright.tasks.allocate.actions.stage_parts import layers_of_units
from trainwright.tasks.allocate.pipelines.pipeline_search import PipelineSearch
from trainwright.tasks.allocate.pipelines.replicas import PipelineDivision
from trainwright.tasks.allocate.pipelines.stage_memory import StageTensors
from trainwright.tasks.allocate.pipelines.stage_peaks import StageWorkload
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.allocate.recompute.recomputing_curves import (
    RecomputingCurves,
    library_bytes,
)
from trainwright.tasks.allocate.recompute.stage_recompute import RecomputedStage, StageRecompute
from trainwright.tasks.spec.pool import Device

_TURNS, _MORE = 4, 1.05
"""How often more is recomputed if the simulated peak does not fit, and by what factor more."""


@dataclass(frozen=True)
class DividedStage:
    """A stage of a division."""

    pipeline: int
    device: Device
    layers: tuple[LayerFacts, ...]
    workload: StageWorkload
    flight: int
    """micro-batches of which it keeps what backward passes need"""
    again: RecomputedStage | None

    @property
    def samples(self) -> int:
        """Of its largest micro-batch."""
        return max(self.workload.micro_batches)

    @property
    def parts(self) -> int:
        """How many micro-batches it has."""
        return len(self.workload.micro_batches)

    def tensors(self, tensors: int) -> StageTensors:
        """Its tensors with what it recomputes; `tensors`: as of `layer_bytes`."""
        kept = sum(self.layer_bytes(tensors).values())
        names = self.again.names if self.again is not None else ()
        return StageTensors(self.workload, kept, self.freed_bytes, names)

    def recomputing(self, again: RecomputedStage | None) -> DividedStage:
        """The same with something else recomputed."""
        return replace(self, again=again)

    def layer_bytes(self, tensors: int) -> dict[str, float]:
        """Bytes of each layer without recomputation: its parameters' tensors, and what it keeps."""
        return {
            one.name: tensors * one.parameter_bytes + self.flight * one.kept_bytes(self.samples)
            for one in self.layers
        }

    @property
    def freed_bytes(self) -> float:
        """Bytes that it needs less by recomputing; what is made again at once counts."""
        again = self.again
        return 0.0 if again is None else self.flight * again.saved_bytes - again.again_bytes


def stages_in(
    divided: PipelineDivision, layers: Sequence[LayerFacts], units: Sequence[Unit]
) -> Iterator[DividedStage]:
    """The stages of all pipelines, in order."""
    by_unit = list(layers_of_units(layers, units).values())
    for number, one in enumerate(divided.pipelines):
        ends = itertools.pairwise([0, *one.cuts, len(by_unit)])
        count, parts = len(one.devices), len(one.micro_batches)
        for place, (device, (begin, end)) in enumerate(zip(one.devices, ends, strict=True)):
            yield DividedStage(
                number,
                device,
                tuple(layer for unit in by_unit[begin:end] for layer in unit),
                StageWorkload(begin, end, divided.schedule, place, count, one.micro_batches),
                in_flight(divided.schedule, count, place, parts),
                one.again[place],
            )


class StageRecomputation:
    """Adds recomputation to divisions."""

    def __init__(
        self, problem: PlanningProblem, search: PipelineSearch, choices: StageRecompute
    ) -> None:
        self._problem, self._search, self._choices = problem, search, choices

    @classmethod
    def of(cls, problem: PlanningProblem, search: PipelineSearch) -> StageRecomputation | None:
        """None: the estimate does not say what each module keeps."""
        step = problem.model.estimate.step
        if step is None:
            return None
        curves = RecomputingCurves(step, search.units)
        return cls(problem, search, StageRecompute(curves, search.layers, search.units))

    def cheapest(
        self, divided: PipelineDivision, apart: Collection[str]
    ) -> PipelineDivision | None:
        """Each stage recomputes what it takes to fit; None if one does not fit even so.

        None of the layers `apart` is recomputed.
        """
        found: list[tuple[int, RecomputedStage | None]] = []
        for stage in stages_in(divided, self._search.layers, self._search.units):
            again: RecomputedStage | None = None
            if (over := self._over(stage)) > 0:
                again = self._fitting(stage, over, apart)
                if again is None:
                    return None
            found.append((stage.pipeline, again))
        return _with_recomputed(divided, found)

    def with_least_memory(
        self, divided: PipelineDivision, apart: Collection[str]
    ) -> PipelineDivision:
        """Each stage recomputes what saves most memory, or nothing if its peak would not be lower.

        None of the layers `apart` is recomputed.
        """

        def lower(stage: DividedStage) -> RecomputedStage | None:
            again = self._all_that_saves(stage, apart)
            saves = again is not None and self._over(stage.recomputing(again)) < self._over(stage)
            return again if saves else None

        stages = stages_in(divided, self._search.layers, self._search.units)
        return _with_recomputed(divided, [(one.pipeline, lower(one)) for one in stages])

    def with_all(self, divided: PipelineDivision, apart: Collection[str]) -> PipelineDivision:
        """Each stage recomputes all that saves memory, as a job may ask, whatever its peak is then.

        None of the layers `apart` is recomputed.
        """
        stages = stages_in(divided, self._search.layers, self._search.units)
        return _with_recomputed(
            divided, [(one.pipeline, self._all_that_saves(one, apart)) for one in stages]
        )

    def _over(self, stage: DividedStage) -> float:
        """By how many bytes of tensors a stage exceeds its device's memory."""
        memory = self._search.memory
        return memory.over_bytes(self._search.place(stage.device), stage.tensors(memory.tensors))

    def _fitting(
        self, stage: DividedStage, over: float, apart: Collection[str]
    ) -> RecomputedStage | None:
        """What takes least time so that a stage fits; None: nothing does.

        The choice adds what is saved by each module; the simulated peak may need more, or less.
        """
        curve = self._problem.model.kind(stage.device).curve
        own = [one.name for one in stage.layers]
        wanted = over + library_bytes(curve)
        for _ in range(_TURNS):
            again = self._choices.cheapest(
                curve, stage.samples, own, stage.flight, wanted, apart=apart
            )
            if again is None:
                break
            left = self._over(stage.recomputing(again))
            if left <= 0:
                return again
            wanted += _MORE * left
        again = self._all_that_saves(stage, apart)
        fits = again is not None and self._over(stage.recomputing(again)) <= 0
        return again if fits else None

    def _all_that_saves(
        self, stage: DividedStage, apart: Collection[str]
    ) -> RecomputedStage | None:
        curve = self._problem.model.kind(stage.device).curve
        own = [one.name for one in stage.layers]
        return self._choices.leanest(curve, stage.samples, own, stage.flight, apart=apart)


def _with_recomputed(
    divided: PipelineDivision, found: Sequence[tuple[int, RecomputedStage | None]]
) -> PipelineDivision:
    """The division whose stages recompute this; by stage: its pipeline, and what."""
    return replace(
        divided,
        pipelines=tuple(
            replace(one, recomputed=tuple(own for place, own in found if place == number))
            for number, one in enumerate(divided.pipelines)
        ),
    )
