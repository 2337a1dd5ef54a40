"""A planning problem in which no layout's transfers cost anything: it guides the choice of devices.

In it, the gradients of layers that could be late-multiplied or sharded are sent for nothing, and
sharded layers take no memory. Its best configuration is a good choice of devices for a layout
other than data parallel. `layout_bound` has a problem that bounds the value of every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainwright.estimator.curves import DeviceCurve, Knots
from trainwright.tasks.allocate.layouts.layout_bound import may_be
from trainwright.tasks.allocate.layouts.memory import state_tensors
from trainwright.tasks.allocate.layouts.permitted import why_not
from trainwright.tasks.allocate.plan.configuration import Configuration
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.plan.kinds import Share
from trainwright.tasks.allocate.plan.topology import Topology, machine_of
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.runs.artefacts.layout import Sync

MOST_DEVICES = 1024
"""Pools of more devices are searched for data parallel only, unless the job names a layout."""


def relaxed(
    problem: PlanningProblem, syncs: Sequence[Sync], *, on_one_machine: bool = False
) -> PlanningProblem | None:
    """The relaxed problem, if dense layers may be kept equal in these ways.

    None if no layer permits one of them, or if all devices are on one machine and this matters.
    """
    model = problem.model
    estimate = model.estimate
    apart = [one for one in estimate.layers if may_be(one, syncs)]
    machines = {machine_of(device) for device in problem.devices}
    if not apart or (len(machines) < 2 and not on_one_machine):
        return None
    total = sum(one.parameter_bytes for one in estimate.layers)
    free = sum(one.parameter_bytes for one in apart)
    saved = 0.0
    if "rows" in syncs:
        cut = sum(one.parameter_bytes for one in apart if why_not(one, "rows") is None)
        saved = state_tensors(problem.job.train.optimizer) * cut
    lighter = estimate.model_copy(
        update={
            "gradient_bytes": estimate.gradient_bytes * (1 - free / total),
            "curves": [_with_less(curve, saved) for curve in estimate.curves],
        }
    )
    eased = model.with_estimate(lighter)
    return replace(problem, model=eased, topology=Topology(eased, problem.devices))


def as_planned(problem: PlanningProblem, one: Configuration) -> Configuration:
    """A relaxed problem's configuration in the problem itself: the same ranks, at their cost."""
    model: CostModel = problem.model
    kinds = {kind.index: kind for kind in problem.topology.kinds}
    shares = tuple(Share(kinds[share.kind.index], share.batch, share.ranks) for share in one.shares)
    collectives = problem.topology.collectives.time(one.placement.ring)
    cost = model.cost(shares, collectives, one.batch, one.accumulation)
    return replace(one, topology=problem.topology, shares=shares, cost=cost)


def _with_less(curve: DeviceCurve, saved_bytes: float) -> DeviceCurve:
    """A device's curve with less memory in a step."""

    def lower(knots: Knots | None) -> Knots | None:
        if knots is None:
            return None
        values = tuple(max(0.0, value - saved_bytes) for value in knots.values)
        return knots.model_copy(update={"values": values})

    line = curve.peak_memory_bytes
    return curve.model_copy(
        update={
            "peak_memory_bytes": line.model_copy(update={"fixed": line.fixed - saved_bytes}),
            "memory_knots": lower(curve.memory_knots),
            "safe_memory_knots": lower(curve.safe_memory_knots),
        }
    )
