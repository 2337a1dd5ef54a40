"""The configurations that a topology allows for one global batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainwright.tasks.allocate.plan.configuration import Configuration
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.plan.kinds import Share
from trainwright.tasks.allocate.plan.placement import placements
from trainwright.tasks.allocate.plan.split import levels_of, split_kinds
from trainwright.tasks.allocate.plan.topology import Topology


class SearchSpace:
    """All numbers of ranks between `min_ranks` and `max_ranks`, and all accumulations.

    The accumulations are 1, 2, 4, … up to `max_accumulation`, or up to the first at which no
    device's memory limits its share: more would only take longer.
    """

    def __init__(
        self,
        topology: Topology,
        batch: int,
        min_ranks: int,
        max_ranks: int,
        max_accumulation: int = 1,
    ) -> None:
        self.topology, self.batch, self.min_ranks = topology, batch, min_ranks
        self.max_ranks = min(max_ranks, batch, sum(group.count for group in topology.groups))
        self.model: CostModel = topology.model
        self.accumulations: list[int] = []
        self.tables: dict[int, dict[int, Any]] = {}
        """Seconds for 1, 2, … samples, by accumulation and kind."""
        self.levels: dict[int, Any] = {}
        """Water levels to choose from, by accumulation."""
        shared = any(kind.shares_memory for kind in topology.kinds)
        accumulation = 1
        while accumulation <= min(max_accumulation, batch):
            tables = {
                kind.index: self.model.times(kind, batch, accumulation) for kind in topology.kinds
            }
            self.tables[accumulation] = tables
            self.levels[accumulation] = levels_of(
                [table for table in tables.values() if len(table)]
            )
            self.accumulations.append(accumulation)
            if not shared and all(len(table) == batch for table in tables.values()):
                break
            accumulation *= 2

    def configure(self, counts: Sequence[int], accumulation: int) -> list[Configuration]:
        """These ranks by group, with each placement of them; empty if they do not fit."""
        if not self.min_ranks <= sum(counts) <= self.max_ranks:
            return []
        by_kind: dict[int, int] = {}
        for group, count in zip(self.topology.groups, counts, strict=True):
            if count:
                by_kind[group.kind.index] = by_kind.get(group.kind.index, 0) + count
        kinds = [kind for kind in self.topology.kinds if kind.index in by_kind]
        tables = [self.tables[accumulation][kind.index] for kind in kinds]
        if not all(len(table) for table in tables):
            return []
        split = split_kinds(
            self.batch, tables, [by_kind[kind.index] for kind in kinds], self.levels[accumulation]
        )
        if split is None:
            return []
        largest = {kind.index: one[0][0] for kind, one in zip(kinds, split, strict=True)}
        shares = tuple(
            Share(kind, batch, count)
            for kind, one in zip(kinds, split, strict=True)
            for batch, count in one
        )
        fit = self._ranks_that_fit(counts, largest, accumulation)
        found = []
        for placement in placements(self.topology, counts, fit):
            collectives = self.topology.collectives.time(placement.ring)
            cost = self.model.cost(shares, collectives, self.batch, accumulation)
            found.append(
                Configuration(
                    self.topology, tuple(counts), placement, shares, self.batch, accumulation, cost
                )
            )
        return found

    def _ranks_that_fit(
        self, counts: Sequence[int], largest: dict[int, int], accumulation: int
    ) -> dict[int, int]:
        """By site in use: how many ranks of a kind fit in one machine's memory.

        Each rank counts with the largest share of its kind.
        """
        found = {}
        for number, places in self.topology.in_use(counts).items():
            site = self.topology.sites[number]
            kinds = [(self.topology.groups[place].kind, counts[place]) for place in places]
            sharing = [(kind, count) for kind, count in kinds if kind.shares_memory]
            most = site.size
            if sharing:
                needs = [
                    self.model.memory_bytes(kind, largest[kind.index], accumulation)
                    for kind, _ in sharing
                ]
                limit = min(kind.curve.memory_limit_bytes or math.inf for kind, _ in sharing)
                needed = sum(need * count for need, (_, count) in zip(needs, sharing, strict=True))
                if len(site.room) == 1:
                    most = int(min(most, sharing[0][0].ranks_that_fit(needs[0])))
                elif needed > limit * len(site.machines):
                    most = 0  # a site of one machine (see `Topology`) whose memory they exceed
            found[number] = most
        return found
