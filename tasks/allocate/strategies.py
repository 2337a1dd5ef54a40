"""How a step is divided among ranks: an open list. Data parallel is built in; others register themselves with a cost function.

    @strategy("pipeline")
    def cost(layout: Layout, counts: Sequence[int], seating: Seating, batch: int) -> Configuration | None: ...

The function is asked for every count of every group, with every way to seat it, where there are few enough of them, and for those
of one group alone otherwise; the plan is the best of all strategies. One that has bounds of its own registers a `Solver`.

A package that is installed beside trainwright brings its strategies by entry points, each a module that registers them:

    [project.entry-points."trainwright.strategies"]
    pipeline = "my_package.pipeline"
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from trainwright.tasks.allocate.plan.configuration import Configuration, Found, Goal, Limits, Space
from trainwright.tasks.allocate.plan.placement import Layout, Seating
from trainwright.tasks.allocate.search.branch_and_bound import MOST_NODES, Search
from trainwright.tasks.errors import BadInput

CostFunction = Callable[[Layout, Sequence[int], Seating, int], Configuration | None]
_MOST_TRIED = 20_000
DATA_PARALLEL = "data-parallel"
ENTRY_POINTS = "trainwright.strategies"


@dataclass(frozen=True)
class Request:
    """What is asked of a strategy: the best configuration for a global batch that is better than `cutoff`."""

    layout: Layout
    batch: int
    least: int
    """Fewest ranks."""
    most: int
    """Most ranks."""
    goal: Goal
    limits: Limits
    cutoff: float = math.inf
    most_accumulation: int = 1
    most_nodes: int = MOST_NODES


class Solver(Protocol):
    """Answers a request; `Found.bound` says how good anything that it did not look at can be (0: unknown)."""

    def __call__(self, request: Request, /) -> Found: ...


def data_parallel(request: Request) -> Found:
    """Every rank has the whole model and a share of the batch; gradients are summed by ring all-reduce. Exact."""
    space = Space(
        request.layout, request.batch, request.least, request.most, request.most_accumulation
    )
    return Search(space, request.goal, request.limits, request.cutoff).run(request.most_nodes)


STRATEGIES: dict[str, Solver] = {DATA_PARALLEL: data_parallel}


def strategy(name: str) -> Callable[[CostFunction], CostFunction]:
    """Register a strategy by its cost function. Raises ValueError for a name that is taken."""
    if name in STRATEGIES:
        raise ValueError(f"strategy {name!r} is registered already")

    def add(cost: CostFunction) -> CostFunction:
        STRATEGIES[name] = lambda request: _tried(name, cost, request)
        return cost

    return add


@functools.cache
def load_installed() -> None:
    """Have the strategies of installed packages register themselves, once. Raises BadInput naming the package that fails."""
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:
            package = point.dist.name if point.dist else point.value
            raise BadInput(
                f"strategy {point.name} of {package}: can't be loaded: {type(error).__name__}: {error}"
            ) from error


def best(request: Request) -> Found:
    """The best of all strategies; ties go to the one that was registered first. Raises BadInput as `load_installed` does."""
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
    return Found(chosen, bound, nodes, seen)


def _tried(name: str, cost: CostFunction, request: Request) -> Found:
    rooms = [group.count for group in request.layout.groups]
    complete = math.prod(room + 1 for room in rooms) <= _MOST_TRIED
    rooms_of_sites = {number: site.size for number, site in enumerate(request.layout.sites)}
    seen: list[Configuration] = []
    for counts in _every(rooms) if complete else _alone(rooms):
        if request.least <= sum(counts) <= request.most:
            for seating in request.layout.choices(counts, rooms_of_sites):
                one = cost(request.layout, counts, seating, request.batch)
                if one is not None:
                    seen.append(replace(one, strategy=name))
    kept = [
        one
        for one in seen
        if one.excess(request.limits) <= 0 and one.value(request.goal) < request.cutoff
    ]
    best = min(kept, key=lambda one: (one.value(request.goal), one.size), default=None)
    return Found(
        best, (best.value(request.goal) if best else math.inf) if complete else 0.0, len(seen), seen
    )


def _every(rooms: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(room + 1) for room in rooms))


def _alone(rooms: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for place, room in enumerate(rooms):
        for count in range(1, min(room, _MOST_TRIED // len(rooms)) + 1):
            yield tuple(count if one == place else 0 for one in range(len(rooms)))
