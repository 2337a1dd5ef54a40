"""Compares the planner with brute force.

    python tests/benchmarks/planner/exactness.py [--cases N] [--seed N]

Random small pools and jobs (`planner_cases`) are planned without limits, and with tight limits:
deadline and budget exactly as one of the configurations needs them. The comparison is of the
objective's value, or of the nearest deadline if no plan is feasible. Prints the number of
differences, the largest one, and the sizes of the search spaces.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass, field

import numpy as np
from brute_force import Tried, every_configuration
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from planner_cases import NOW, Case, small_cases

from trainwright.tasks.allocate.batch_choice import GOOD_ENOUGH, choose_batch
from trainwright.tasks.allocate.plan.confidence import TOLERANCE
from trainwright.tasks.allocate.plan.configuration import Limits
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.spec.eligibility import MOST_BATCH, usable


@dataclass
class Tally:
    """The comparisons so far."""

    cases: int = 0
    infeasible: int = 0
    gaps: int = 0
    configurations: int = 0
    worst: float = 0.0
    different: list[str] = field(default_factory=list)
    planner_s: float = 0.0
    brute_s: float = 0.0


def by_size(case: Case, model: CostModel) -> dict[int, list[Tried]]:
    """Every configuration, by global batch."""
    devices, train, chosen = usable(case.pool, case.job), case.job.train, case.job.devices
    if train.global_batch_size != "auto":
        sizes = {train.global_batch_size}
    else:
        low, high = (min(bound, case.data.train_rows) for bound in train.batch_bounds)
        sizes = {low, high} | {
            2**power for power in range(MOST_BATCH.bit_length()) if low <= 2**power <= high
        }
    return {
        size: list(
            every_configuration(
                model,
                devices,
                size,
                chosen.min_count,
                chosen.max_count or len(devices),
                case.most_accumulation,
            )
        )
        for size in sorted(sizes)
    }


def brute(case: Case, tried: dict[int, list[Tried]], deadline_s: float, budget: float) -> float:
    """The objective's value at the global batch of the rule; infinite if nothing is feasible."""
    goal, noise = case.job.objective.minimize, case.job.train.noise_scale
    least = {}
    for size, found in tried.items():
        value = min((one.least(goal, deadline_s, budget) for one in found), default=math.inf)
        if value < math.inf:
            least[size] = value
    if not least:
        return math.inf
    if noise is not None:
        first = min(tried)
        return least[
            min(least, key=lambda size: least[size] * (1 + size / noise) / (1 + first / noise))
        ]
    allowed = min(least.values()) / (GOOD_ENOUGH if len(tried) > 1 else 1.0)
    return least[min(size for size, value in least.items() if value <= allowed)]


def compare(case: Case, pick: float, tally: Tally) -> None:
    """Compare one case without limits, and four with limits."""
    model = CostModel(case.job, case.pool, case.estimate, case.data, NOW)
    began = time.perf_counter()
    tried = by_size(case, model)
    tally.brute_s += time.perf_counter() - began
    everything = [one for found in tried.values() for one in found]
    tally.configurations += sum(len(one.batches) for one in everything)
    limits = [(math.inf, math.inf)]
    if everything:
        upper_s, upper_cost = (
            np.concatenate([one.values[name] for one in everything])
            for name in ("upper_time", "upper_cost")
        )
        slack = int(np.argsort(upper_s)[int(pick * (len(upper_s) - 1))])
        limits += [
            (float(upper_s[slack]), math.inf),
            (float(upper_s[slack]), float(upper_cost[slack]) or math.inf),
            (float(upper_s.min()) * 0.9, math.inf),
            (math.inf, float(upper_cost.min()) * 1.0001 or math.inf),
        ]
    for deadline_s, budget in limits:
        tally.cases += 1
        limited = case.within(deadline_s, budget)
        began = time.perf_counter()
        problem = PlanningProblem.of(
            limited.job,
            CostModel(limited.job, case.pool, case.estimate, case.data, NOW),
            usable(case.pool, case.job),
            case.most_accumulation,
        )
        found, _ = choose_batch(problem)
        nearest = problem.least("upper_time", Limits()) if found is None else None
        tally.planner_s += time.perf_counter() - began
        expected = brute(limited, tried, deadline_s, budget)
        best = None if found is None else found.best
        tally.gaps += found is not None and found.gap(problem.goal) > 0
        got = math.inf if best is None else best.value(problem.goal)
        # Limits may be exceeded by rounding, so that a plan may be one beyond them by as much.
        loose = brute(limited, tried, deadline_s * (1 + TOLERANCE), budget * (1 + TOLERANCE))
        if math.isclose(got, loose, rel_tol=TOLERANCE):
            expected = loose
        if math.isinf(expected):
            tally.infeasible += 1
            expected = min((one.least("upper_time") for one in everything), default=math.inf)
            if nearest is not None:
                got = nearest.cost.upper_duration_s
            elif not math.isinf(got):
                got = -1.0  # a plan, although no configuration is feasible
        off = 0.0 if expected == got else math.inf
        if off and 0 < expected < math.inf:
            off = abs(got / expected - 1)
        tally.worst = max(tally.worst, off)
        if off > 1e-9:
            tally.different.append(f"{got} instead of {expected}: {limited}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    tally = Tally()

    @seed(chosen.seed)
    @settings(
        max_examples=-(-chosen.cases // 3),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(small_cases(), st.floats(0, 1))
    def run(case: Case, pick: float) -> None:
        compare(case, pick, tally)

    run()
    print(f"planned                         {tally.cases}, of which {tally.infeasible} infeasible")
    print(f"different objective value       {len(tally.different)}")
    print(f"plans that are not exact        {tally.gaps}")
    print(f"worst relative difference       {tally.worst:.1e}  (rounding: about 1e-15)")
    print(f"configurations enumerated       {tally.configurations} in {tally.brute_s:.1f} s")
    print(f"planner                         {tally.planner_s:.1f} s")
    for line in tally.different[:3]:
        print(line)
    return 1 if tally.different else 0


if __name__ == "__main__":
    sys.exit(main())
