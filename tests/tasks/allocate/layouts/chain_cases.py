"""Random chains of units on unlike devices, and the best division of each by brute force."""

from __future__ import annotations

import itertools
import random

import numpy as np

from trainwright.tasks.allocate.pipelines.pass_times import Division, step_seconds
from trainwright.tasks.allocate.pipelines.stage_chain import StageChain
from trainwright.tasks.allocate.pipelines.stage_cost import StageCost
from trainwright.tasks.runs.artefacts.layout import StageSchedule


def random_chain(
    seed: int,
    units: int,
    speeds: list[float],
    micro_batches: int,
    *,
    capped: bool = False,
    alike: tuple[int, ...] | None = None,
) -> StageChain:
    """Units of random costs on devices of these speeds, which suit each unit more or less.

    Devices with one number in `alike` do not differ. `capped`: no device can hold the whole model.
    """
    draw = np.random.default_rng(seed)
    count, kinds = len(speeds), alike or tuple(range(len(speeds)))
    first = [kinds.index(kind) for kind in kinds]
    work = draw.lognormal(0.0, 0.7, units)
    suits = draw.lognormal(0.0, 0.15, (count, units))[first]
    each = work * suits / np.array(speeds)[:, None]
    passes = np.stack([each, draw.uniform(0.8, 1.2) * each, draw.uniform(0.7, 1.2) * each])
    state = draw.lognormal(0.0, 1.0, units)
    kept = draw.lognormal(0.0, 0.5, units) / micro_batches
    whole = state.sum() + kept.sum() * min(count, micro_batches)
    room = np.full(count, np.inf)
    if capped:
        room = (draw.uniform(0.5, 0.9, count) * whole)[first]
    scale = draw.uniform(0.02, 0.3) * each.mean()
    own = draw.choice([0.0, 0.1, 1.0]) * each.mean()
    costs = draw.lognormal(0.0, 0.5, (4, count))[:, first] * own
    is_part = (draw.random(count) < 0.5)[first]
    links = draw.lognormal(0.0, 0.5, (count, count))
    links = (links + links.T)[np.ix_(first, first)]
    return StageChain(
        sizes=(0,) * micro_batches,
        forward=passes[:1],
        input_gradient=passes[1:2],
        weight_gradient=passes[2:],
        update=0 * each,
        crossing_bytes=draw.lognormal(0.0, 0.8, (1, units)),
        latency_s=0.1 * scale * links,
        s_per_byte=scale * links,
        state_bytes=state,
        kept_bytes=kept,
        room_bytes=room,
        alike=kinds,
        own=StageCost(
            costs[0], 0.5 * costs[1], 0.1 * costs[2], 0.2 * costs[3] * is_part, is_part, 0.3 * own
        ),
        layers=draw.integers(1, 5, units),
    )


def all_divisions(chain: StageChain, stages: int) -> list[Division]:
    """Every division in so many stages."""
    cuts = list(itertools.combinations(range(1, chain.units), stages - 1))
    orders = itertools.permutations(range(chain.devices), stages)
    return [Division(order, cut) for order in orders for cut in cuts]


def brute_force(chain: StageChain, schedule: StageSchedule) -> float:
    """The least step of all divisions; infinite if none fits."""
    return min(
        float(step_seconds(chain, schedule, all_divisions(chain, stages)).min())
        for stages in range(1, min(chain.units, chain.devices) + 1)
    )


def drawn_chain(seed: int) -> tuple[StageChain, StageSchedule]:
    """A small chain that brute force can divide, and a schedule."""
    draw = random.Random(seed)
    speeds = [draw.choice([1.0, 1.0, 2.0, 3.0, 4.0]) for _ in range(draw.randint(2, 4))]
    schedule = draw.choice(["gpipe", "1f1b", "zero-bubble"])
    parts = draw.choice([2, 4, 8])
    units = draw.randint(2, 8)
    chain = random_chain(seed, units, speeds, parts, capped=draw.random() < 0.5)
    return chain, schedule
