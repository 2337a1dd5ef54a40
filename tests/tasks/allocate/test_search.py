"""The search against plain enumeration, and the bounds of a truncated search."""

from __future__ import annotations

import math

import pytest
from exactness import Tally, compare
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner_cases import NOW, Case, data_of, small_cases
from scale import estimate_for, gpu_pool, job_of, typed_pool

from trainwright.tasks.allocate.batch_choice import choose_batch
from trainwright.tasks.allocate.plan.configuration import Configuration
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.plan.search_request import MAX_NODES
from trainwright.tasks.allocate.plan.search_space import SearchSpace
from trainwright.tasks.allocate.plan.topology import Topology, machine_of
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.allocate.search.branch_and_bound import BranchAndBound
from trainwright.tasks.spec.eligibility import usable
from trainwright.tasks.spec.pool import Pool

QUIET = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@QUIET
@given(small_cases(), st.floats(0, 1))
def test_no_configuration_is_better_than_the_plan(case: Case, pick: float) -> None:
    tally = Tally()
    compare(case, pick, tally)
    assert not tally.different


@QUIET
@given(small_cases(), st.integers(1, 8))
def test_the_search_uses_the_times_of_the_curves(case: Case, accumulation: int) -> None:
    model = CostModel(case.job, case.pool, case.estimate, case.data, NOW)
    devices = usable(case.pool, case.job)
    space = SearchSpace(Topology(model, devices), 40, 1, len(devices))
    for device in devices:
        kind = model.kind(device)
        found = space.times((accumulation, accumulation))[kind.index].seconds
        expected = [kind.curve.median_s(batch, accumulation) for batch in range(1, len(found) + 1)]
        assert found.tolist() == pytest.approx(expected, rel=1e-12)


@QUIET
@given(small_cases())
def test_a_plan_splits_the_whole_batch_among_its_devices_within_their_memory(
    case: Case,
) -> None:
    model = CostModel(case.job, case.pool, case.estimate, case.data, NOW)
    devices = usable(case.pool, case.job)
    found, _ = choose_batch(PlanningProblem.of(case.job, model, devices, case.most_accumulation))
    if found is None or found.best is None:
        return
    placed = found.best.devices()
    assert len({device.id for device, _ in placed}) == len(placed) == found.best.size
    assert sum(batch for _, batch in placed) == found.best.batch
    held: dict[str, float] = {}
    for device, batch in placed:
        kind = model.kind(device)
        limit = kind.curve.memory_limit_bytes or math.inf
        need = model.memory_bytes(kind, batch, found.best.accumulation)
        assert need <= limit
        if kind.shares_memory:
            held[machine_of(device)] = held.get(machine_of(device), 0.0) + need
            assert held[machine_of(device)] <= limit
    machines = [machine_of(device) for device, _ in placed]
    assert len(set(machines)) == found.best.placement.ring.machines
    there = [machines.count(name) for name in set(machines) if name != "this machine"]
    assert max(there, default=0) == found.best.placement.ring.widest


def search(pool: Pool, types: int, goal: str, nodes: int) -> tuple[Configuration, float]:
    devices, job = pool.devices(), job_of(goal, 512, None)
    model = CostModel(job, pool, estimate_for(devices, types, seed=types), data_of(100_000))
    problem = PlanningProblem.of(job, model, devices)
    space = problem.request(512).space()
    found = BranchAndBound(space, problem.goal, problem.limits).run(nodes)
    assert found.best is not None
    return found.best, found.gap(problem.goal)


@pytest.mark.parametrize("goal", ["energy", "time"])
def test_a_truncated_search_bounds_the_gap_to_the_optimum(goal: str) -> None:
    pool = typed_pool(12, 20)
    short, gap = search(pool, 12, goal, 3)
    long, rest = search(pool, 12, goal, 3000)
    assert 0 <= rest <= gap < 1
    assert long.value(goal) >= short.value(goal) * (1 - gap) * (1 - 1e-9)  # type: ignore[arg-type]


def test_the_same_pool_gives_the_same_plan_every_time() -> None:
    first, second = (search(gpu_pool(64, mixed=True), 8, "energy", 500)[0] for _ in range(2))
    assert [(device.id, batch) for device, batch in first.devices()] == [
        (device.id, batch) for device, batch in second.devices()
    ]


@pytest.mark.parametrize("hours", [None, 1 / 6, 8 / 60])
def test_a_pool_of_a_hundred_types_is_planned_almost_exactly_with_tight_and_loose_deadlines(
    hours: float | None,
) -> None:
    pool, job = typed_pool(100, 100), job_of("energy", 4096, hours)
    model = CostModel(job, pool, estimate_for(pool.devices(), 100, seed=100), data_of(1_200_000))
    problem = PlanningProblem.of(job, model, pool.devices())
    found, _ = choose_batch(problem)
    assert found is not None
    assert found.best is not None
    assert found.gap(problem.goal) <= 1e-3
    assert found.nodes < MAX_NODES
    assert found.best.excess(problem.limits) == 0
