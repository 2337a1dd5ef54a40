"""Simulates the step of a stored plan again, from plan and estimate."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.tasks.allocate.actions.network import RankNetwork
from trainwright.tasks.allocate.actions.step_simulator import SimulatedStep, StepSimulator
from trainwright.tasks.allocate.actions.transfer_sizes import TransferSizes
from trainwright.tasks.allocate.layouts.choose import micro_batches, tops
from trainwright.tasks.allocate.recompute.recomputing_curves import with_time
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline, Stage
from trainwright.tasks.runs.artefacts.plan import Plan


@dataclass(frozen=True)
class SimulatedPlan:
    """A plan's step, played again. Ranks are numbered as the plan's devices."""

    plan: Plan
    layout: Layout
    step: SimulatedStep
    sizes: TransferSizes
    memory_bytes: tuple[float | None, ...] = ()
    """of each rank's device; None: not known"""


def simulated_plan(plan: Plan, estimate: Estimate) -> SimulatedPlan:
    """Play a plan's step. Raises BadInput if the plan or the estimate do not have what it takes."""
    layers = estimate.layers
    curves = [estimate.find(device) for device in plan.devices]
    known = [one for one in curves if one is not None and len(one.layers) == len(layers)]
    if not layers or len(known) < len(curves):
        raise BadInput(
            "timeline: none, as the estimate does not say what each layer costs; an estimate from "
            "the model's code does"
        )
    if len(plan.devices) > 1 and not plan.links:
        raise BadInput(
            "timeline: none, as the plan does not have the links between its devices; plan again"
        )
    layout = plan.layout or _data_parallel(plan, tops(layers))
    network = RankNetwork.of(plan.devices, plan.links)
    units = plan.units or estimate.units
    # Stages have actions for it.
    as_planned = [
        curve if layout.has_stages else with_time(curve, layout.recomputed(device.id))
        for curve, device in zip(known, plan.devices, strict=True)
    ]
    step = StepSimulator(layers, as_planned, network, units, estimate.pass_cost)(layout)
    memory = tuple(curve.memory_limit_bytes for curve in known)
    return SimulatedPlan(plan, layout, step, TransferSizes(layout, layers, units), memory)


def _data_parallel(plan: Plan, layers: list[str]) -> Layout:
    """The layout of a plan that has none, such as one for a single device."""
    return Layout(
        pipelines=[
            Pipeline(
                micro_batches=micro_batches(device.batch_size, plan.accumulation),
                stages=[Stage(device=device.id, layers=layers)],
            )
            for device in plan.devices
        ]
    )
