"""One configuration and what it is compared by, and the space of those that a layout allows for a global batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trainwright.tasks.allocate.plan.cost import Cost, CostModel, Share
from trainwright.tasks.allocate.plan.placement import Layout, Seating
from trainwright.tasks.allocate.plan.split import levels_of, split_kinds
from trainwright.tasks.spec.pool import Device

Goal = Literal["time", "energy", "cost", "upper_time", "upper_cost"]
EXACT = 1e-9
"""Two values this close, relatively, are one: what arithmetic leaves of a tie."""


@dataclass(frozen=True)
class Limits:
    """What a configuration must keep at the job's confidence. Infinite: no limit."""

    deadline_s: float = math.inf
    budget: float = math.inf


@dataclass(frozen=True)
class Configuration:
    """Ranks with their shares, and what that takes."""

    layout: Layout
    counts: tuple[int, ...]
    seating: Seating
    shares: tuple[Share, ...]
    batch: int
    accumulation: int
    cost: Cost
    strategy: str = "data-parallel"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(self.counts)

    def value(self, goal: Goal) -> float:
        """What is minimised; infinite where it is not known."""
        cost = self.cost
        if goal == "time":
            return cost.duration_s.median
        if goal == "energy":
            return cost.energy_j.median if cost.energy_j else math.inf
        if goal == "cost":
            return cost.cost.median if cost.cost else math.inf
        return cost.upper_duration_s if goal == "upper_time" else cost.upper_cost

    def available_s(self) -> float:
        """For how long all its devices are there."""
        return min(share.kind.available_s for share in self.shares)

    def excess(self, limits: Limits) -> float:
        """By how much limits and windows are missed, as a share; 0 where they are kept."""
        over = (
            self.cost.upper_duration_s / limits.deadline_s - 1
            if limits.deadline_s < math.inf
            else 0.0
        )
        if limits.budget < math.inf:
            over = max(over, self.cost.upper_cost / limits.budget - 1)
        window = self.available_s()
        if window < math.inf:
            over = max(over, self.cost.upper_duration_s / window - 1 if window > 0 else math.inf)
        return max(0.0, over)

    def devices(self) -> list[tuple[Device, int]]:
        """Devices and shares, in the order of the pool."""
        seats = self.layout.seats(self.counts, self.seating)
        batches: dict[int, Iterator[int]] = {}
        for kind in {share.kind.index for share in self.shares}:
            batches[kind] = iter(
                [
                    share.batch
                    for share in self.shares
                    if share.kind.index == kind
                    for _ in range(share.ranks)
                ]
            )
        return [(device, next(batches[self.layout.model.kind(device).index])) for device in seats]


@dataclass(frozen=True)
class Found:
    """The best that was found, and what anything else takes at least."""

    best: Configuration | None
    bound: float
    nodes: int
    seen: list[Configuration] = field(default_factory=list)

    def improved(self, other: Found, goal: Goal) -> Found:
        """What both searches say together."""
        kept = min(
            (one for one in (self.best, other.best) if one is not None),
            key=lambda one: one.value(goal),
            default=None,
        )
        bound = max(self.bound, other.bound)
        if kept is not None:
            bound = min(bound, kept.value(goal))
        return Found(kept, bound, self.nodes + other.nodes, self.seen + other.seen)

    def gap(self, goal: Goal) -> float:
        """By how much, relatively, anything else can be better."""
        if self.best is None:
            return 0.0 if math.isinf(self.bound) else math.inf
        value = self.best.value(goal)
        return (
            max(0.0, 1 - self.bound / value)
            if value > 0 and self.bound < value * (1 - EXACT)
            else 0.0
        )


class Space:
    """The configurations of a layout for one global batch."""

    def __init__(
        self, layout: Layout, batch: int, least: int, most: int, most_accumulation: int = 1
    ) -> None:
        self.layout, self.batch, self.least = layout, batch, least
        self.most = min(most, batch, sum(group.count for group in layout.groups))
        self.model: CostModel = layout.model
        self.accumulations: list[int] = []
        self.tables: dict[int, dict[int, Any]] = {}
        self.levels: dict[int, Any] = {}
        accumulation = 1
        while accumulation <= min(most_accumulation, batch):
            tables = {
                kind.index: self.model.times(kind, batch, accumulation) for kind in layout.kinds
            }
            self.tables[accumulation] = tables
            self.levels[accumulation] = levels_of(
                [table for table in tables.values() if len(table)]
            )
            self.accumulations.append(accumulation)
            shared = any(kind.shares_memory for kind in layout.kinds)
            if not shared and all(len(table) == batch for table in tables.values()):
                break  # memory binds nowhere: more would only take longer
            accumulation *= 2

    def configure(self, counts: Sequence[int], accumulation: int) -> list[Configuration]:
        """These counts with each way to seat them; none where they do not fit."""
        if not self.least <= sum(counts) <= self.most:
            return []
        by_kind: dict[int, int] = {}
        for group, count in zip(self.layout.groups, counts, strict=True):
            if count:
                by_kind[group.kind.index] = by_kind.get(group.kind.index, 0) + count
        kinds = [kind for kind in self.layout.kinds if kind.index in by_kind]
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
        return [
            Configuration(
                self.layout,
                tuple(counts),
                seating,
                shares,
                self.batch,
                accumulation,
                self.model.cost(
                    shares, self.layout.collectives(seating.ranks), self.batch, accumulation
                ),
            )
            for seating in self.layout.choices(
                counts, self._most_on_machines(counts, largest, accumulation)
            )
        ]

    def _most_on_machines(
        self, counts: Sequence[int], largest: dict[int, int], accumulation: int
    ) -> dict[int, int]:
        """By site in use, how many ranks of a kind one machine's memory holds, each at the largest share of its kind."""
        found = {}
        for number, places in self.layout.in_use(counts).items():
            site = self.layout.sites[number]
            kinds = [(self.layout.groups[place].kind, counts[place]) for place in places]
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
                    most = int(min(most, sharing[0][0].together(needs[0])))
                elif needed > limit * len(site.machines):
                    most = 0  # one machine (see Layout), and together they do not fit
            found[number] = most
        return found
