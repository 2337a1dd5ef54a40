"""A simulated step, by device and kind of action."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.estimator.structure import LayerFacts, Unit
from trainwright.tasks.allocate.actions.action import COMPUTE, TRANSFERS, Action
from trainwright.tasks.allocate.actions.actions import actions_of
from trainwright.tasks.allocate.actions.step_simulator import SimulatedStep
from trainwright.tasks.allocate.actions.transfer_sizes import TransferSizes
from trainwright.tasks.allocate.layouts.averages import AverageTimes
from trainwright.tasks.allocate.layouts.choose import MOST_COMPARED, LayoutChoice
from trainwright.tasks.allocate.plan.configuration import Configuration
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.runs.artefacts.step_kinds import (
    ComputeKind,
    SentKind,
    StepByKind,
    WaitKind,
)


def predicted_by_kind(result: Configuration) -> list[StepByKind]:
    """The step of a configuration, simulated; empty if the layers are not known.

    The step time of a plan knows more of sums than the simulation, such as what they cost between
    processes of a machine. That is waiting too: what devices compute and wait is the step time.
    """
    devices, model = result.devices(), result.topology.model
    choice = LayoutChoice(result)
    if not choice.layers or len(devices) > MOST_COMPARED:
        return []
    layout = result.layout or choice.layout({})
    parts = 1 if layout.has_stages else result.accumulation
    loops = [model.kind(device).curve.loop_part_s(batch, parts) or 0.0 for device, batch in devices]
    times = AverageTimes.of(model.job.train, model.data.train_rows, result.batch)
    units = model.estimate.units
    found = by_kind(choice.simulated(layout), layout, choice.layers, times, units)
    found = [
        one.model_copy(update={"compute_s": {**one.compute_s, "loop": loop_s}})
        for one, loop_s in zip(found, loops, strict=True)
    ]
    if layout.has_stages or layout.recomputes:
        return found
    return [_as_long_as(one, result.cost.step_s.median) for one in found]


def _as_long_as(one: StepByKind, step_s: float) -> StepByKind:
    """The device's step with waits by which it takes as long as the plan says."""
    waits = dict(one.wait_s)
    idle_s, waited_s = max(0.0, step_s - sum(one.compute_s.values())), sum(waits.values())
    if waited_s > idle_s:
        waits = {kind: seconds * idle_s / waited_s for kind, seconds in waits.items()}
    elif waits:
        kind: WaitKind = "sum" if "sum" in waits else "agree"
        waits[kind] = waits.get(kind, 0.0) + idle_s - waited_s
    return one.model_copy(update={"wait_s": waits})


def by_kind(
    step: SimulatedStep,
    layout: Layout,
    layers: Sequence[LayerFacts],
    times: AverageTimes,
    units: Sequence[Unit] = (),
) -> list[StepByKind]:
    """What each device does in a step; of averages, the part that falls on a step.

    `step` is one that averages; `times` says how many do.
    """
    averages, averages_sent = times.in_a_step_of(layout)
    sizes = TransferSizes(layout, layers, units)
    found = []
    for rank, (device, actions) in enumerate(
        zip(layout.devices, actions_of(layout, layers, units), strict=True)
    ):
        compute: dict[ComputeKind, float] = {
            "forward": 0.0,
            "backward": 0.0,
            "late gradient": 0.0,
            "update": 0.0,
        }
        wait: dict[WaitKind, float] = {}
        sent: dict[SentKind, float] = {"sum": 0.0, "transfer": 0.0}
        for span in step.spans(rank):
            seconds, action = span.end_s - span.begin_s, span.action
            if action.kind in COMPUTE:
                compute[_computed(action, layout)] += seconds
            elif not action.started:
                kind = _waited(action)
                each_s = seconds * averages if kind == "average" else seconds
                wait[kind] = wait.get(kind, 0.0) + each_s
        for action in actions:
            if action.kind in TRANSFERS or action.kind == "send":
                size = float(sizes.of(action).sent_bytes(len(layout.devices))[rank])
                summed = action.chunk is not None or action.kind == "agree"
                sent["sum" if summed else "transfer"] += (
                    size * averages_sent if action.kind == "average" else size
                )
        found.append(StepByKind(device=device, compute_s=compute, wait_s=wait, sent_bytes=sent))
    return found


def _computed(action: Action, layout: Layout) -> ComputeKind:
    if action.kind == "forward" or action.kind == "update":
        return action.kind
    late = action.kind == "weight-gradient" and layout.how(action.layer) == "factors"
    return "late gradient" if late and action.joint else "backward"


def _waited(action: Action) -> WaitKind:
    """What a rank waits for: a `wait` ends a started sum or gather."""
    if action.kind == "agree" or action.kind == "average":
        return action.kind
    if action.chunk is not None:
        return "sum"
    return "gather" if action.kind == "wait" else "exchange"
