"""Searches pipelines for a planning problem: replicas, micro-batches, schedule, cuts, devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from trainwright.tasks.allocate.actions.network import RankNetwork
from trainwright.tasks.allocate.layouts.choose import links_between, micro_batches
from trainwright.tasks.allocate.pipelines.partition import MOST_WORK, Partition, partition
from trainwright.tasks.allocate.pipelines.pipeline_numbers import PipelineNumbers
from trainwright.tasks.allocate.pipelines.replicas import (
    DividedPipeline,
    PipelineDivision,
    batch_shares,
    exchanges,
    groupings,
)
from trainwright.tasks.allocate.pipelines.stage_chain import StageChain, stage_chain
from trainwright.tasks.allocate.pipelines.stage_memory import StageMemory
from trainwright.tasks.allocate.plan.topology import machine_of
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.runs.artefacts.layout import StageSchedule
from trainwright.tasks.spec.pool import Device
from trainwright.tasks.spec.train_spec import LayoutSpec

SearchMemory = Literal["kept", "recomputed", "no_limit"]
"""What must fit into memory: all that is kept, or what is kept if all units are recomputed; or
memory does not limit the search."""
MOST_DEVICES = 16
"""Of more devices, the fastest ones are used, unless the job asks for more stages in all."""
_MOST_MEMORY = 1e6
_SHARES = 3
"""How often the shares of pipelines are set by the speeds with the shares before."""
_ROUNDS = 4
_BRIEF_UNITS, _BRIEF_WORK = 40, 1e6
"""of a brief search among more devices: runs of units are not cut, and devices of about the same
speed count as alike"""


class PipelineSearch:
    """The pipelines of a problem's model on its devices; `spec` fixes some of the choices.

    A `brief` search tries fewer numbers of micro-batches and replicas, and if devices are many,
    fewer cuts until the last.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        spec: LayoutSpec,
        *,
        brief: bool = False,
        memory: SearchMemory = "kept",
        spared_bytes: Mapping[str, float] | None = None,
    ) -> None:
        """`memory`: what must fit. `spared_bytes`: left free on a device, by its id."""
        self._problem, self._spec, model = problem, spec, problem.model
        self._must_fit = memory
        self.layers, self.units = model.estimate.layers, model.estimate.units
        self._devices = _fastest(
            problem, max(MOST_DEVICES, (spec.stages or 1) * (spec.replicas or 1))
        )
        self._curves = [model.kind(device).curve for device in self._devices]
        links = links_between(model, self._devices)
        self._network = RankNetwork.of(self._devices, links)
        self.memory = StageMemory(model, self.layers, self._devices, spared_bytes)
        self._chains: dict[tuple[int, ...], StageChain] = {}
        self._numbers = PipelineNumbers(problem, spec, len(self._devices), brief=brief)

    def place(self, device: Device) -> int:
        """The device's number in `memory`."""
        return self._devices.index(device)

    def found(self, batch: int) -> list[PipelineDivision]:
        """Divisions for a global batch that fit into memory, the shortest step first."""
        if self._numbers.is_brief:
            return self._found_briefly(batch)
        found: dict[tuple[int, int, StageSchedule], list[PipelineDivision]] = {}
        replicas = [one for one in self._numbers.replicas() if one <= batch]
        schedules = self._numbers.schedules()
        for number in replicas:
            for parts in self._numbers.micro_batches(batch // number):
                found[number, parts, schedules[0]] = self._of(batch, number, parts, schedules[0])
        keys = sorted(
            found, key=lambda key: min((one.step_s for one in found[key]), default=math.inf)
        )
        for number, parts, _ in keys if self._numbers.is_wide else keys[:2]:
            for schedule in schedules[1:]:
                found[number, parts, schedule] = self._of(batch, number, parts, schedule)
        every = [one for some in found.values() for one in some]
        several = [one for one in every if len(one.pipelines) > 1]
        if several:
            every += self._exchanged(min(several, key=lambda one: one.step_s), batch)
        return sorted(every, key=lambda one: (one.step_s, one.count))

    def _found_briefly(self, batch: int) -> list[PipelineDivision]:
        """Divisions among many devices: cuts at any unit only for the best one."""
        schedules, found = self._numbers.schedules(), list[PipelineDivision]()
        for number in self._numbers.replicas():
            counts = self._numbers.micro_batches(batch // number)
            if found:  # as many as are best for fewer pipelines
                most = len(min(found, key=_step_s).pipelines[0].micro_batches)
                counts = [most] if most <= batch // number else []
            for parts in counts:
                found += self._of(batch, number, parts, schedules[0])
        for schedule in schedules[1:] if found else ():
            found += self._again(min(found, key=_step_s), schedule, coarse=True)
        if found:
            best = min(found, key=_step_s)
            found += self._again(best, best.schedule, coarse=False)
        return sorted(found, key=lambda one: (one.step_s, one.count))

    def _again(
        self, division: PipelineDivision, schedule: StageSchedule, *, coarse: bool
    ) -> list[PipelineDivision]:
        """A division's devices and samples, divided with a schedule."""
        groups = [[*map(self.place, one.devices)] for one in division.pipelines]
        samples = [sum(one.micro_batches) for one in division.pipelines]
        parts = len(division.pipelines[0].micro_batches)
        found = self._divided(groups, samples, parts, schedule, None, coarse=coarse)
        return [found] if found is not None and self._is_allowed(found, division.batch) else []

    def _is_allowed(self, one: PipelineDivision, batch: int) -> bool:
        return (
            one.has_stages
            and self._numbers.least <= one.count <= self._numbers.most
            and one.batch == batch
        )

    def _exchanged(self, division: PipelineDivision, batch: int) -> list[PipelineDivision]:
        """Better divisions with devices exchanged between pipelines, or moved to another one."""
        parts, found = len(division.pipelines[0].micro_batches), [division]
        groups = [[*map(self.place, one.devices)] for one in division.pipelines]
        for _ in range(_ROUNDS):
            tried: list[tuple[PipelineDivision, list[list[int]]]] = []
            for other in exchanges(groups, self._kinds(batch)):
                for stages in self._numbers.stages(len(groups)):
                    again = self._grouped(other, batch, parts, division.schedule, stages)
                    tried += [(one, other) for one in again]
            best, other = min(tried, key=lambda pair: pair[0].step_s, default=(division, groups))
            if best.step_s >= found[-1].step_s * (1 - 1e-9):
                break
            found.append(best)
            groups = other
        return found[1:]

    def _kinds(self, batch: int) -> tuple[int, ...]:
        return self._chain([batch]).alike

    def with_more_memory(self, batch: int) -> PipelineDivision | None:
        """The division that fits if all memories are larger by the least factor.

        None if the batch permits no pipeline at all.
        """
        replicas, schedule = self._numbers.replicas()[0], self._numbers.schedules()[0]
        if not (counts := self._numbers.micro_batches(batch // replicas)):
            return None
        low, high = 0.0, math.log(_MOST_MEMORY)
        best: PipelineDivision | None = None
        while high - low > 0.005:
            middle = (low + high) / 2 if best is not None else high
            tried = self._of(batch, replicas, counts[-1], schedule, math.exp(middle))
            if tried:
                best, high = tried[0], middle
            elif best is None:
                return None
            else:
                low = middle
        return best

    def _of(
        self,
        batch: int,
        replicas: int,
        parts: int,
        schedule: StageSchedule,
        more_memory: float = 1.0,
    ) -> list[PipelineDivision]:
        """Divisions with these numbers: one for each grouping of the devices, or more."""
        even = self._chain(micro_batches(batch // replicas, parts))
        speeds = (1 / even.mean_seconds.sum(axis=1)).tolist()
        machines = [machine_of(device) for device in self._devices]
        found = []
        for groups in groupings(even.alike, speeds, machines, replicas):
            for stages in self._numbers.stages(replicas):
                found += self._grouped(groups, batch, parts, schedule, stages, more_memory)
        return found

    def _grouped(
        self,
        groups: Sequence[Sequence[int]],
        batch: int,
        parts: int,
        schedule: StageSchedule,
        stages: int | None,
        more_memory: float = 1.0,
    ) -> list[PipelineDivision]:
        """Divisions with one pipeline for each group of devices, with shares by its speed."""
        samples, found = [batch // len(groups)] * len(groups), list[PipelineDivision]()
        for _ in range(1 if len(groups) == 1 else 2 if self._numbers.is_brief else _SHARES):
            one = self._divided(
                groups, samples, parts, schedule, stages, more_memory, coarse=self._numbers.is_brief
            )
            if one is None:
                break
            found.append(one)
            rates = [size / each.step_s for size, each in zip(samples, self._last, strict=True)]
            samples = batch_shares(batch, rates, parts)
        kept = {one.key: one for one in found if self._is_allowed(one, batch)}
        return list(kept.values())

    def _divided(
        self,
        groups: Sequence[Sequence[int]],
        samples: Sequence[int],
        parts: int,
        schedule: StageSchedule,
        stages: int | None,
        more_memory: float = 1.0,
        *,
        coarse: bool = False,
    ) -> PipelineDivision | None:
        pipelines, self._last = [], list[Partition]()
        known: dict[object, tuple[Partition, Sequence[int]]] = {}
        for group, size in zip(groups, samples, strict=True):
            sizes = micro_batches(size, parts)
            chain = self._chain(sizes).of_devices(group)
            key = (chain.alike, size)
            if key not in known:
                ends = list(range(1, chain.units + 1))
                if coarse:
                    ends = chain.even_ends(_BRIEF_UNITS)
                    chain = chain.joined(ends)
                room = chain.room_bytes
                if more_memory > 1:
                    more, plain = (self.memory.rooms(max(sizes), one) for one in (more_memory, 1.0))
                    added = [more[place] - plain[place] for place in group]
                    room = room + [one if math.isfinite(one) else 0.0 for one in added]
                most = max(1, self._numbers.most // len(groups))
                own = stages if self._spec.stages or not stages else min(stages, len(group))
                one = partition(
                    chain.with_room(room),
                    schedule,
                    stages=own,
                    most_stages=most,
                    most_work=_BRIEF_WORK if coarse else MOST_WORK,
                )
                if one is None:
                    return None
                known[key] = one, [ends[cut - 1] for cut in one.division.cuts]
            one, cuts = known[key]
            self._last.append(one)
            devices = tuple(self._devices[group[place]] for place in one.division.devices)
            pipelines.append(DividedPipeline(devices, tuple(cuts), tuple(sizes)))
        return PipelineDivision(tuple(pipelines), schedule, max(one.step_s for one in self._last))

    def _chain(self, sizes: Sequence[int]) -> StageChain:
        key = tuple(sizes)
        if key not in self._chains:
            chain = stage_chain(
                self.layers,
                self.units,
                self._curves,
                self._network,
                sizes,
                tensors=self.memory.searched_tensors(max(sizes)),
                room_bytes=self.memory.rooms(max(sizes)),
                passes=self._problem.model.estimate.pass_cost,
            )
            if self._must_fit == "recomputed":
                chain = chain.recomputing()
            elif self._must_fit == "no_limit":
                chain = chain.with_room(chain.room_bytes + math.inf)
            self._chains[key] = chain
        return self._chains[key]


def _fastest(problem: PlanningProblem, most: int) -> list[Device]:
    """The devices, or the fastest ones if they are many; in the order of the pool."""
    devices, model = list(problem.devices), problem.model
    sizes = problem.sizes[0]

    def seconds(device: Device) -> float:
        return model.kind(device).curve.median_s(sizes)

    kept = sorted(devices, key=lambda device: (seconds(device), device.id))[:most]
    return [device for device in devices if device in kept]


def _step_s(division: PipelineDivision) -> float:
    return division.step_s
