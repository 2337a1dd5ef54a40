"""Partition of chains of units among unlike devices: how good, and how long it takes.

Random chains of up to 8 units on up to 4 devices against brute force; devices of speeds 4:2:1:1
against brute force over all divisions of 24 blocks; 100 units on 16 devices. No device computes:
steps are simulated.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tasks/allocate/layouts"))

from chain_cases import all_divisions, brute_force, drawn_chain, random_chain

from trainwright.tasks.allocate.pipelines.partition import Partition, partition
from trainwright.tasks.allocate.pipelines.pass_times import step_seconds
from trainwright.tasks.allocate.pipelines.stage_chain import StageChain
from trainwright.tasks.allocate.pipelines.stage_cost import StageCost
from trainwright.tasks.runs.artefacts.layout import StageSchedule

SCHEDULES: tuple[StageSchedule, ...] = ("gpipe", "1f1b", "zero-bubble")
SPEEDS = [4.0, 2.0, 1.0, 1.0]


def main() -> None:
    """Print one line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chains", type=int, default=200, help="random chains")
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    given = parser.parse_args()
    _random_chains(given.seed, given.chains)
    for schedule in SCHEDULES:
        _four_unlike(schedule, 8)
        _four_unlike(schedule, 32)
    for name, kinds in (("one kind", 1), ("four kinds", 4), ("all unlike", 16)):
        for capped in (False, True):
            _large(name, kinds, capped=capped)


def _random_chains(seed: int, count: int) -> None:
    ratios, begun = [], time.process_time()
    brute_s = 0.0
    for number in range(seed, seed + count):
        chain, schedule = drawn_chain(number)
        started = time.process_time()
        best = brute_force(chain, schedule)
        brute_s += time.process_time() - started
        found = partition(chain, schedule)
        if (found is None) != math.isinf(best):
            ratios.append(math.inf)
        elif found is not None:
            ratios.append(found.step_s / best)
    same = sum(one < 1 + 1e-9 for one in ratios) / len(ratios)
    own_s = time.process_time() - begun - brute_s
    print(
        f"random chains: {len(ratios)} that fit of {count}: optimum in {100 * same:.1f} %, worst "
        f"{100 * (max(ratios) - 1):.1f} % longer, {1e3 * own_s / count:.0f} ms each"
    )


def _four_unlike(schedule: StageSchedule, parts: int) -> None:
    """Blocks of a like cost: the speed of all devices, less the bubble, can nearly be reached."""
    draw = np.random.default_rng(1)
    chain = random_chain(1, 24, SPEEDS, parts, alike=(0, 1, 2, 2))
    blocks = draw.uniform(0.95, 1.05, 24)
    each = (blocks / np.array(SPEEDS)[:, None])[None]
    chain = StageChain(**{**_fields(chain), "forward": each, "input_gradient": each})
    none = StageCost.of(None, [None] * 4)  # type: ignore[list-item]
    chain = StageChain(**{**_fields(chain), "weight_gradient": each, "own": none})
    found = partition(chain, schedule)
    assert found is not None
    best = min(
        float(step_seconds(chain, schedule, all_divisions(chain, stages)).min())
        for stages in range(1, 5)
    )
    alone_s = 3 * parts * blocks.sum()  # at speed 1
    ideal_s = alone_s / sum(SPEEDS) * (parts + found.division.stages - 1) / parts
    print(
        f"4:2:1:1, {schedule}, {parts} micro-batches: {100 * best / found.step_s:.1f} % of the "
        f"best division's speed; {100 * ideal_s / found.step_s:.1f} % of the devices' speeds less "
        f"the ideal bubble; bound {100 * found.bound_s / found.step_s:.0f} % of the step"
    )


def _fields(chain: StageChain) -> dict[str, object]:
    return {name: getattr(chain, name) for name in StageChain.__dataclass_fields__}


def _large(name: str, kinds: int, *, capped: bool) -> None:
    draw = np.random.default_rng(3)
    speeds = draw.uniform(1, 4, 16)
    alike = tuple(number * kinds // 16 for number in range(16))
    speeds = [float(speeds[alike.index(kind)]) for kind in alike]
    chain = random_chain(3, 100, speeds, 32, capped=capped, alike=alike)
    for schedule in SCHEDULES:
        started = time.process_time()
        found: Partition | None = partition(chain, schedule)
        spent_s = time.process_time() - started
        gap = "does not fit" if found is None else f"gap {100 * found.gap:.0f} %"
        print(
            f"100 units, 16 devices, {name}{', capped' if capped else ''}, {schedule}: "
            f"{spent_s:.1f} s, {gap}"
        )


if __name__ == "__main__":
    main()
