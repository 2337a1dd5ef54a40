"""What a plan with pipelines costs: time, energy and money, from the simulated step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from trainwright.tasks.allocate.actions.step_simulator import SimulatedStep
from trainwright.tasks.allocate.plan.confidence import Triple
from trainwright.tasks.allocate.plan.configuration import Configuration
from trainwright.tasks.allocate.plan.cost import CollectiveTime, Cost
from trainwright.tasks.allocate.plan.kinds import Share
from trainwright.tasks.allocate.plan.placement import placements
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.spec.pool import Device

_NOTHING = Triple(0.0, 0.0, 0.0)
_NO_COLLECTIVES = CollectiveTime(_NOTHING, _NOTHING)


def configured(
    problem: PlanningProblem,
    layout: Layout,
    placed: Sequence[tuple[Device, int]],
    step: SimulatedStep,
    parts: int,
) -> Configuration:
    """The configuration of a layout with stages, of which a step takes as long as simulated.

    `placed`: its devices with their samples of a step; `parts`: the most micro-batches.
    """
    model, topology = problem.model, problem.topology
    devices = [device for device, _ in placed]
    batch = sum(sum(one.micro_batches) for one in layout.pipelines)
    kinds = [model.kind(device) for device in devices]
    loop_s = max(
        kind.curve.loop_part_s(size) or 0.0 for kind, (_, size) in zip(kinds, placed, strict=True)
    )
    counts = topology.counts_of(devices)
    ranks = Counter((kind.index, size) for kind, (_, size) in zip(kinds, placed, strict=True))
    of_index = {kind.index: kind for kind in kinds}
    shares = tuple(Share(of_index[index], size, count) for (index, size), count in ranks.items())
    costs = model.ranks_cost(
        [(share.kind, share.ranks) for share in shares], _NO_COLLECTIVES, batch
    )
    work_j = sum(
        kind.extra_w * seconds
        for kind, seconds in zip(kinds, step.computed_s, strict=True)
        if math.isfinite(kind.extra_w)
    )
    step_s = step.step_s + loop_s

    def figures(z: float) -> tuple[float, ...]:
        factor = max(kind.factor(z) for kind in kinds)
        return tuple(map(float, costs.figures(z, step_s * factor, work_j)))

    steps, durations, energies, prices = (
        Triple(*values) for values in zip(*(figures(z) for z in (0.0, -1.0, 1.0)), strict=True)
    )
    upper = figures(model.z)
    known = all(kind.idle_w is not None and kind.load_w is not None for kind in kinds)
    cost = Cost(
        steps,
        durations,
        energies if known and math.isfinite(energies.median) else None,
        prices if math.isfinite(prices.median) else None,
        upper[1],
        upper[3],
    )
    placement = placements(topology, counts)[0]
    return Configuration(
        topology,
        tuple(counts),
        placement,
        shares,
        batch,
        parts,
        cost,
        layout.name,
        layout,
        tuple(placed),
    )
