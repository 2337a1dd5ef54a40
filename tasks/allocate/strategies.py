"""How a step is divided among ranks: an open list of strategies.

Data parallel is built in. Others register with a cost function:

    @strategy("pipeline")
    def cost(
        topology: Topology, counts: Sequence[int], placement: Placement, batch: int
    ) -> Configuration | None: ...

The planner calls the function for all numbers of ranks per group, with every placement, if there
are few enough; otherwise for one group at a time. The plan is the best of all strategies. A
strategy with its own lower bounds registers a `Solver` in `STRATEGIES` instead.

Another package adds strategies by entry points. Each is a module that registers them on import:

    [project.entry-points."trainwright.strategies"]
    pipeline = "my_package.pipeline"
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from trainwright.tasks.allocate.plan.configuration import Configuration
from trainwright.tasks.allocate.plan.placement import Placement, placements
from trainwright.tasks.allocate.plan.search_request import SearchRequest, SearchResult
from trainwright.tasks.allocate.plan.topology import Topology
from trainwright.tasks.allocate.search.branch_and_bound import BranchAndBound
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.layout import DATA_PARALLEL

CostFunction = Callable[[Topology, Sequence[int], Placement, int], Configuration | None]
ENTRY_POINTS = "trainwright.strategies"
_MAX_TRIED = 20_000


class Solver(Protocol):
    """Solves a request. `SearchResult.bound` covers all that it did not search (0: unknown)."""

    def __call__(self, request: SearchRequest, /) -> SearchResult: ...


def data_parallel(request: SearchRequest) -> SearchResult:
    """Each rank has the whole model and a part of the batch; a ring all-reduce sums gradients."""
    search = BranchAndBound(request.space(), request.goal, request.limits, request.cutoff)
    return search.run(request.max_nodes)


STRATEGIES: dict[str, Solver] = {DATA_PARALLEL: data_parallel}
"""Strategies by name. Imports fill it, planning never does."""


def strategy(name: str) -> Callable[[CostFunction], CostFunction]:
    """Register a strategy by its cost function. Raises ValueError if the name is taken."""
    if name in STRATEGIES:
        raise ValueError(f"strategy {name!r} is registered already")

    def add(cost: CostFunction) -> CostFunction:
        STRATEGIES[name] = lambda request: _enumerate(name, cost, request)
        return cost

    return add


@functools.cache
def load_installed() -> None:
    """Import the strategies of installed packages, once. Raises BadInput naming a broken one."""
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:
            package = point.dist.name if point.dist else point.value
            raise BadInput(
                f"strategy {point.name} of {package}: can't be loaded: "
                f"{type(error).__name__}: {error}; update the package or uninstall it"
            ) from error


def best(request: SearchRequest) -> SearchResult:
    """The best of all strategies; ties go to the one registered first.

    Raises BadInput as `load_installed` does.
    """
    load_installed()
    chosen: Configuration | None = None
    bound, nodes = math.inf, 0
    seen: list[Configuration] = []
    for solve in STRATEGIES.values():
        cutoff = min(request.cutoff, chosen.value(request.goal) if chosen else math.inf)
        found = solve(replace(request, cutoff=cutoff))
        nodes, bound, seen = nodes + found.nodes, min(bound, found.bound), seen + found.seen
        if found.best is not None and (
            chosen is None or found.best.value(request.goal) < chosen.value(request.goal)
        ):
            chosen = found.best
    return SearchResult(chosen, bound, nodes, seen)


def _enumerate(name: str, cost: CostFunction, request: SearchRequest) -> SearchResult:
    """Call a cost function for all numbers of ranks, or for one group at a time if too many."""
    topology, goal = request.topology, request.goal
    rooms = [group.count for group in topology.groups]
    complete = math.prod(room + 1 for room in rooms) <= _MAX_TRIED
    seen: list[Configuration] = []
    for counts in _all_counts(rooms) if complete else _one_group(rooms):
        if request.min_ranks <= sum(counts) <= request.max_ranks:
            for placement in placements(topology, counts):
                one = cost(topology, counts, placement, request.batch)
                if one is not None:
                    seen.append(replace(one, strategy=name))
    kept = [
        one for one in seen if one.excess(request.limits) <= 0 and one.value(goal) < request.cutoff
    ]
    chosen = min(kept, key=lambda one: (one.value(goal), one.size), default=None)
    bound = (chosen.value(goal) if chosen else math.inf) if complete else 0.0
    return SearchResult(chosen, bound, len(seen), seen)


def _all_counts(rooms: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(room + 1) for room in rooms))


def _one_group(rooms: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for place, room in enumerate(rooms):
        for count in range(1, min(room, _MAX_TRIED // len(rooms)) + 1):
            yield tuple(count if one == place else 0 for one in range(len(rooms)))
