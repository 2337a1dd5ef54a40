"""The planning problem of one job: what to minimise, within which limits, on which devices."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainwright.tasks.allocate.plan.configuration import (
    Configuration,
    Goal,
    Limits,
    comes_before,
)
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.plan.search_request import MAX_NODES, SearchRequest
from trainwright.tasks.allocate.plan.topology import Topology, with_bandwidth
from trainwright.tasks.allocate.strategies import best
from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.eligibility import MOST_BATCH, asks_for_cost, require_possible
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Device

_MAX_NEIGHBOURS = 400


@dataclass(frozen=True)
class PlanningProblem:
    """One job's choice among devices. Made by `of`, which checks it."""

    job: Job
    model: CostModel
    devices: tuple[Device, ...]
    topology: Topology
    goal: Goal
    limits: Limits
    max_accumulation: int | None = None
    """The most micro-batches of a step; None: any number."""

    @classmethod
    def of(
        cls,
        job: Job,
        model: CostModel,
        devices: Sequence[Device],
        max_accumulation: int | None = None,
        *,
        apart: bool = False,
    ) -> PlanningProblem:
        """The problem of a job. With `apart`, no two machines count as alike.

        Raises BadInput if the job contradicts itself, the pool or the devices' estimates.
        """
        objective = job.objective
        limits = Limits(
            math.inf if objective.deadline is None else objective.deadline,
            math.inf if objective.budget is None else objective.budget,
        )
        topology = Topology(model, devices, apart=apart)
        problem = cls(
            job, model, tuple(devices), topology, objective.minimize, limits, max_accumulation
        )
        problem._check()
        return problem

    def _check(self) -> None:
        job, pool = self.job, self.model.pool
        require_possible(job, pool, self.model.data.train_rows)
        unknown = next(
            (
                kind.device_type
                for kind in self.topology.kinds
                if kind.idle_w is None or kind.load_w is None
            ),
            None,
        )
        if self.goal == "energy" and unknown:
            raise BadInput(
                f"objective.minimize: got 'energy'; the power of {unknown} is not known: "
                f"add it to pool {pool.name} (power)"
            )
        if (asked := asks_for_cost(job)) and "energy" in pool.prices and unknown:
            raise BadInput(
                f"objective.{asked}; the cost is not known: pool {pool.name} prices energy, "
                f"and the power of {unknown} is not known: add it to the pool (power)"
            )

    @functools.cached_property
    def sizes(self) -> list[int]:
        """The global batches to choose from: the given one, or the bounds and powers of two."""
        size = self.job.train.global_batch_size
        if size != "auto":
            return [size]
        rows = self.model.data.train_rows
        low, high = (min(bound, rows) for bound in self.job.train.batch_bounds)
        powers = (2**power for power in range(MOST_BATCH.bit_length()))
        return sorted({low, high} | {size for size in powers if low <= size <= high})

    def request(
        self,
        batch: int,
        goal: Goal | None = None,
        limits: Limits | None = None,
        cutoff: float = math.inf,
    ) -> SearchRequest:
        """The search for one global batch; goal and limits are the problem's unless given."""
        chosen = self.job.devices
        return SearchRequest(
            self.topology,
            batch,
            chosen.min_count,
            chosen.max_count or len(self.devices),
            goal or self.goal,
            limits or self.limits,
            cutoff,
            self.max_accumulation,
        )

    def least(self, goal: Goal, limits: Limits, max_nodes: int = MAX_NODES) -> Configuration | None:
        """The configuration with the least value of a goal, over all global batches.

        The best found, if a search ends at `max_nodes`.
        """
        chosen: Configuration | None = None
        for size in sorted(self.sizes, reverse=True):
            cutoff = chosen.value(goal) if chosen else math.inf
            request = replace(self.request(size, goal, limits, cutoff), max_nodes=max_nodes)
            one = best(request).best
            if one is not None and (chosen is None or comes_before(one, chosen, goal)):
                chosen = one
        return chosen

    def at_no_cost(self) -> PlanningProblem:
        """The problem of the quickest configuration among those whose goal is zero."""
        model = self.model
        powered = self.goal == "energy" or bool(model.energy_price_per_j)

        def is_free(device: Device) -> bool:
            kind = model.kind(device)
            return (not powered or kind.load_w == 0) and (
                self.goal == "energy" or kind.price_per_s == 0
            )

        free = tuple(filter(is_free, self.devices))
        return replace(self, goal="time", devices=free, topology=Topology(model, free))

    def with_bandwidth(self, factor: float) -> PlanningProblem:
        """The same problem with so many times the bandwidth between machines."""
        model = self.model.with_pool(with_bandwidth(self.model.pool, factor))
        return replace(self, model=model, topology=Topology(model, self.devices))

    def with_one_more(self, device: Device) -> PlanningProblem:
        """The same problem with one more device like this one, on its host."""
        more = device.model_copy(update={"id": f"{device.id}+1"})
        devices = (*self.devices, more)
        return replace(self, devices=devices, topology=Topology(self.model, devices))

    def neighbours(self, result: Configuration) -> list[Configuration]:
        """The same batch and accumulation on slightly different ranks.

        One rank more or fewer in a group, or all ranks in a group that the result does not use.
        """
        space = self.request(result.batch).space()
        counts = self.topology.counts_of([device for device, _ in result.devices()])
        found: list[Configuration] = []
        for place, group in enumerate(self.topology.groups):
            changes = [{place: counts[place] + 1}, {place: counts[place] - 1}]
            if counts[place] == 0:
                nowhere = {other: 0 for other, count in enumerate(counts) if count}
                changes.append(nowhere | {place: result.size})
            for change in changes:
                tried = [change.get(other, count) for other, count in enumerate(counts)]
                if 0 <= tried[place] <= group.count and any(tried):
                    some = space.configure(tried, result.accumulation, self.goal, self.limits)
                    found += [one for one, _ in itertools.islice(some, 1)]
            if len(found) > _MAX_NEIGHBOURS:
                break
        return found
