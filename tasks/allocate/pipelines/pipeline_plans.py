"""Plans with pipelines: the best one for a problem as a layout with its cost."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from trainwright.tasks.allocate.actions.network import RankNetwork
from trainwright.tasks.allocate.actions.step_simulator import SimulatedStep, StepSimulator
from trainwright.tasks.allocate.layouts.choose import links_between
from trainwright.tasks.allocate.layouts.memory import Shortage
from trainwright.tasks.allocate.layouts.permitted import require_permitted
from trainwright.tasks.allocate.layouts.planning import LayoutCandidate
from trainwright.tasks.allocate.layouts.resends import Resends
from trainwright.tasks.allocate.layouts.stage_syncs import StageSyncs, beside_sums
from trainwright.tasks.allocate.pipelines.pipeline_cost import configured
from trainwright.tasks.allocate.pipelines.pipeline_search import PipelineSearch, SearchMemory
from trainwright.tasks.allocate.pipelines.pipeline_words import pipeline_in_words, span
from trainwright.tasks.allocate.pipelines.recomputed_stages import StageRecomputation, stages_in
from trainwright.tasks.allocate.pipelines.replicas import PipelineDivision
from trainwright.tasks.allocate.plan.topology import machine_of
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.allocate.recompute.recompute_words import recompute_in_words
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.layout import (
    CHUNK_BYTES,
    Layout,
    Pipeline,
    Stage,
    name_of,
)
from trainwright.tasks.spec.pool import Device
from trainwright.tasks.spec.train_spec import LayoutSpec

_SIMULATED, _SIMULATED_BRIEFLY = 6, 2
_FEW = 8
"""Of more devices, a brief search only sums dense layers between pipelines."""
_MEMORIES: tuple[SearchMemory, ...] = ("no_limit", "recomputed")


@dataclass(frozen=True)
class PipelinePlan:
    """A layout with stages, and what each of its devices needs."""

    candidate: LayoutCandidate
    needs: Mapping[str, float]
    """peak memory in bytes, by device"""
    compute_s: Mapping[str, float]
    """seconds of a step that it computes, by device"""


class PipelinePlanner:
    """The pipelines of a problem, by global batch; `spec` fixes some of the choices.

    A `brief` search tries less.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        spec: LayoutSpec,
        *,
        brief: bool = False,
    ) -> None:
        self._brief = brief
        self._problem, self._spec, self._model = problem, spec, problem.model
        self._search = PipelineSearch(problem, spec, brief=brief)
        self._layers, self._units = self._search.layers, self._search.units
        self._refused = ""
        """why no layer permits the way of dense layers that the job says"""

    def plans(self, batch: int) -> list[PipelinePlan]:
        """The pipelines for a global batch that fit into memory, best first."""
        self._refused = ""
        most = _SIMULATED_BRIEFLY if self._brief else _SIMULATED
        divisions = self._with_recomputation(self._leading(self._search, batch, most), batch, most)
        found = [plan for one in divisions if (plan := self._plan(one)) is not None]
        if short := _lacking(found):  # the simulated peaks exceed what the search adds
            leaner = self._leading(self._searching("kept", short), batch, most)
            found += [plan for one in leaner if (plan := self._plan(one)) is not None]
        if self._refused and not found:
            raise BadInput(
                f"train.layout.dense: got {self._spec.dense!r}; no layer permits it between the "
                f"pipelines: {self._refused}"
            )
        goal, limits = self._problem.goal, self._problem.limits

        def key(one: PipelinePlan) -> tuple[tuple[float, float], float]:
            return one.candidate.misses(limits), one.candidate.configuration.value(goal)

        return sorted(found, key=key)

    def nearest(self, batch: int) -> PipelinePlan | None:
        """The pipeline for a global batch that needs least memory beyond what there is."""
        stages = StageRecomputation.of(self._problem, self._search)
        found = None
        if stages is not None and self._spec.recompute != "none":
            lean = self._searching("recomputed").with_more_memory(batch)
            found = None if lean is None else stages.with_least_memory(lean, self._apart(lean))
        if found is None:
            found = self._search.with_more_memory(batch)
        return None if found is None else self._plan(found)

    def _searching(
        self, memory: SearchMemory, spared_bytes: Mapping[str, float] | None = None
    ) -> PipelineSearch:
        return PipelineSearch(
            self._problem,
            self._spec,
            brief=self._brief,
            memory=memory,
            spared_bytes=spared_bytes,
        )

    def _leading(self, search: PipelineSearch, batch: int, most: int) -> list[PipelineDivision]:
        """The divisions to simulate: the quickest ones.

        If money or energy counts, also the quickest one of each number of devices.
        """
        found = search.found(batch)
        if self._problem.goal == "time" and math.isinf(self._problem.limits.budget):
            return found[:most]
        by_count: dict[int, PipelineDivision] = {}
        for one in found:
            by_count.setdefault(one.count, one)
        few = [one for one in by_count.values() if one not in found[:most]]
        return [*found[:most], *sorted(few, key=lambda one: one.count)[:most]]

    def _with_recomputation(
        self, divided: Sequence[PipelineDivision], batch: int, most: int
    ) -> list[PipelineDivision]:
        """The divisions, and those in which stages recompute, as the job says or memory needs."""
        wanted = self._spec.recompute
        stages = None if wanted == "none" else StageRecomputation.of(self._problem, self._search)
        if stages is None or (wanted == "auto" and not self._search.memory.may_lack(batch)):
            return list(divided)
        more = [
            one
            for memory in _MEMORIES
            for one in self._leading(self._searching(memory), batch, most)
        ]
        if wanted == "all":
            return [stages.with_all(one, self._apart(one)) for one in (*divided, *more)]
        found = {one.key: one for one in divided}
        for each in more:
            if each.key not in found:
                one = stages.cheapest(each, self._apart(each))
                found |= {each.key: one} if one is not None else {}
        return list(found.values())

    def _apart(self, divided: PipelineDivision) -> Collection[str]:
        """The layers that send in their passes, which are not made again."""
        if len(divided.pipelines) == 1 or self._spec.dense in ("auto", "sum"):
            return ()
        return [one.name for one in self._layers if one.dense is not None]

    def _plan(self, divided: PipelineDivision) -> PipelinePlan | None:
        """None if no layer permits the way of dense layers that the job says."""
        placed = _placed(divided)
        devices = [device for device, _ in placed]
        curves = [self._model.kind(device).curve for device in devices]
        links = links_between(self._model, devices)
        network = RankNetwork.of(devices, links)
        passes = self._model.estimate.pass_cost
        simulator = StepSimulator(self._layers, curves, network, self._units, passes)
        simulate = functools.partial(simulator, events=False)
        resends = Resends(self._layers, devices, network, self._search.memory.tensors - 1)
        layouts = self._with_dense(self._layout(divided), simulate, resends)
        if not layouts:
            return None
        needed = [self._needs(divided, one) for one in layouts]
        chosen = next((place for place, (_, short) in enumerate(needed) if short is None), -1)
        needs, shortage = needed[chosen]
        layout, step = resends.added(layouts[chosen], simulate(layouts[chosen]))
        require_permitted(
            layout, self._layers, {device.id: size for device, size in placed}, self._units
        )
        parts = max(len(one.micro_batches) for one in layout.pipelines)
        configuration = configured(self._problem, layout, placed, step, parts)
        compute = step.computed_s
        bubble = 1 - sum(compute) / (len(compute) * step.step_s) if step.step_s > 0 else 0.0
        normalises = any(one.batch_statistics for one in self._units)
        words = pipeline_in_words(layout, self._layers, bubble, normalises=normalises)
        words += self._recompute_words(divided, dict(zip(layout.devices, compute, strict=True)))
        return PipelinePlan(
            LayoutCandidate(configuration, words, shortage),
            needs,
            dict(zip(layout.devices, compute, strict=True)),
        )

    def _layout(self, divided: PipelineDivision) -> Layout:
        names, spec = [one.name for one in self._units], self._spec
        pipelines = [
            Pipeline(
                micro_batches=list(one.micro_batches),
                stages=[
                    Stage(
                        device=device.id,
                        layers=names[begin:end],
                        recompute=list(again.names) if again is not None else [],
                    )
                    for device, (begin, end), again in zip(
                        one.devices,
                        itertools.pairwise([0, *one.cuts, len(names)]),
                        one.again,
                        strict=True,
                    )
                ],
            )
            for one in divided.pipelines
        ]
        return Layout(
            name=name_of({"sum"}, 2),
            pipelines=pipelines,
            schedule=divided.schedule,
            batch_norm=spec.batch_norm,
            chunk_bytes=spec.chunk_bytes or CHUNK_BYTES,
            factor_type=spec.factor_type,
        )

    def _with_dense(
        self, layout: Layout, simulate: Callable[[Layout], SimulatedStep], resends: Resends
    ) -> list[Layout]:
        """The layout with its dense layers kept equal between pipelines as the job says.

        If the planner chooses, the best one, and that with sums; none if no layer permits the way.
        """
        how = self._spec.dense
        if len(layout.pipelines) == 1 or how == "sum":
            return [layout]
        known = {device.id: device for device in self._problem.devices}
        batch = sum(sum(one.micro_batches) for one in layout.pipelines)
        devices = [known[one] for one in layout.devices]
        speeds = {one.id: 1 / self._model.kind(one).curve.median_s(batch) for one in devices}
        syncs = StageSyncs(
            layout,
            self._layers,
            self._units,
            lambda one: resends.added(one, simulate(one))[1].step_s,
            speeds,
        )
        if how != "auto":
            permitted = syncs.permitted(how)
            self._refused = "" if permitted else syncs.why_none(how)
            return [syncs.with_ways(permitted)] if permitted else []
        many = self._brief and len(devices) > _FEW
        if many or len({machine_of(one) for one in devices}) == 1:
            return [layout]
        best = syncs.best()
        return [best] if best == layout else [best, layout]

    def _needs(
        self, divided: PipelineDivision, layout: Layout
    ) -> tuple[dict[str, float], Shortage | None]:
        """Peak memory of each device, and the one that lacks most."""
        memory = self._search.memory
        needs, worst = dict[str, float](), None
        spans = {one.device: span(one.layers) for each in layout.pipelines for one in each.stages}
        for stage in stages_in(divided, self._layers, self._units):
            sizes = stage.layer_bytes(memory.tensors)
            more = {
                one.name: beside_sums(one, layout, stage.device.id, memory.tensors)
                for one in stage.layers
            }
            sizes = {name: size + more[name] for name, size in sizes.items()}
            place = self._search.place(stage.device)
            cut = [one for one in stage.layers if layout.how(one.name) == "rows"]
            beside = sum(more.values()) + memory.copies.gathered_bytes(cut)
            need = memory.need(place, stage.tensors(memory.tensors), beside)
            needs[stage.device.id] = need
            limit = memory.limit_bytes(place)
            if limit is not None and need > limit * (1 + 1e-9):
                largest = max(sizes, key=sizes.__getitem__)
                short = Shortage(
                    stage.device.id,
                    need,
                    limit,
                    largest,
                    spans[stage.device.id],
                    memory.process_bytes(place),
                    memory.sharing(place),
                )
                if worst is None or short.over_bytes > worst.over_bytes:
                    worst = short
        return needs, worst

    def _recompute_words(self, divided: PipelineDivision, compute_s: Mapping[str, float]) -> str:
        """What the stages recompute, and how their memory and time change by it."""
        memory, found = self._search.memory, ""
        for stage in stages_in(divided, self._layers, self._units):
            if (again := stage.again) is None:
                continue
            place = self._search.place(stage.device)
            before, after = (
                memory.need(place, one.tensors(memory.tensors))
                for one in (stage.recomputing(None), stage)
            )
            less = 1 - after / before
            seconds = again.seconds * stage.parts
            longer = seconds / max(compute_s[stage.device.id] - seconds, 1e-30)
            found += f"; {stage.device.id}: {recompute_in_words(again.names, less, longer)}"
        return found


def _lacking(plans: Sequence[PipelinePlan]) -> dict[str, float]:
    """By device: the most bytes that it lacks in these plans; empty if one of them fits."""
    found: dict[str, float] = {}
    for one in plans:
        short = one.candidate.shortage
        if short is None:
            return {}
        found[short.device] = max(found.get(short.device, 0.0), short.over_bytes)
    return found


def _placed(divided: PipelineDivision) -> list[tuple[Device, int]]:
    """Devices with the samples that they compute, in the order of the layout."""
    return [(device, sum(one.micro_batches)) for one in divided.pipelines for device in one.devices]
