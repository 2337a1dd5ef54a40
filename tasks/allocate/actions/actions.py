"""From a layout, what each rank is predicted to do in a step: one list of actions for each rank.

The lists are simulated (`step_simulator`); tests check them (`action_check`). Ranks do not execute
them: autograd drives their work (`trainwright.tasks.train.layouts`), and only the order of a
pipeline's passes comes from the same `schedules`. Ranks are numbered as the layout's devices.

A rank first runs its micro-batches forward and backward. A layer with sync `rows` gathers its
inputs from all ranks, multiplies them by its own rows of the weight, and exchanges the results; its
backward pass does the reverse. The last micro-batch's backward pass starts the sums of gradients
and the gathers of factors, in the order in which they become ready. Then the rank waits for each of
them, multiplies the factors, and updates its parameters. Ranks that are stages of pipelines:
`stage_actions`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainwright.estimator.structure import LayerFacts, Unit
from trainwright.tasks.allocate.actions.action import Action
from trainwright.tasks.allocate.actions.chunks import GradientChunk, chunks_of_bytes
from trainwright.tasks.allocate.actions.layer_actions import (
    backward,
    chunk_name,
    forward,
    gather_of_factors,
    late_weight_gradient,
    sum_of,
    updates,
    way_of,
)
from trainwright.tasks.allocate.actions.stage_actions import stage_actions
from trainwright.tasks.runs.artefacts.layout import Layout


def actions_of(
    layout: Layout, layers: Sequence[LayerFacts], units: Sequence[Unit] = ()
) -> list[list[Action]]:
    """The actions of each rank in a step that averages, if the layout averages.

    `layers` are the model's, in the order of the forward pass, the loss last; `units` are needed
    for pipelines of several stages. Without such pipelines, every rank has the same number of
    micro-batches: one without samples still takes part in transfers. If devices train alone, each
    micro-batch is a local step, and one without samples takes no time. Raises BadInput for stages
    that name no units.
    """
    if layout.has_stages:
        return stage_actions(layout, layers, units)
    ranks = len(layout.pipelines)
    group = tuple(range(ranks)) if ranks > 1 else ()
    parts = max(len(pipeline.micro_batches) for pipeline in layout.pipelines)
    trained = [one for one in layers if one.parameters]
    summed = [one for one in trained if layout.how(one.name) == "sum"]
    ends = _ends(chunks_of_bytes(summed, layout.chunk_bytes))
    work = [
        action
        for part in range(parts)
        for action in _micro_batch(layout, layers, part, group, ends if part == parts - 1 else {})
    ]
    own = [*work, *_finish(layout, layers, work, group)]
    return [own for _ in range(ranks)]


def _ends(chunks: Sequence[GradientChunk]) -> dict[str, list[GradientChunk]]:
    """The chunks by the layer that completes each: the last one that the backward pass reaches."""
    found: dict[str, list[GradientChunk]] = {}
    for chunk in chunks:
        found.setdefault(chunk.layers[-1], []).append(chunk)
    return found


def _micro_batch(
    layout: Layout,
    layers: Sequence[LayerFacts],
    part: int,
    group: tuple[int, ...],
    ends: dict[str, list[GradientChunk]],
) -> Iterator[Action]:
    """One forward and backward pass. `ends` is empty unless it is the last one of the step."""
    last = part == max(len(one.micro_batches) for one in layout.pipelines) - 1
    first = next((one.name for one in layers if one.parameters), "")
    for layer in layers:
        yield from forward(layout, layer, part, group)
    for layer in reversed(layers):
        # Nothing before the first layer with parameters needs a gradient.
        yield from backward(layout, layer, part, group, wanted=layer.name != first)
        if not last or not group:
            continue
        if way_of(layout, layer) == "factors":
            yield gather_of_factors(layer, part, group)
        for chunk in ends.get(layer.name, []):
            yield sum_of(chunk, part, group)
    if layout.alone:
        yield from updates(layers, part)


def _finish(
    layout: Layout,
    layers: Sequence[LayerFacts],
    work: Sequence[Action],
    group: tuple[int, ...],
) -> Iterator[Action]:
    """Wait for what the backward passes started, and update."""
    if group:
        yield Action("agree", "agree", group=group)
    for action in work:
        if not action.started:
            continue
        yield replace(action, kind="wait", started=False)
        if action.kind == "gather":
            yield late_weight_gradient(action)
    if not layout.alone:
        yield from updates(layers, 0)
    averaged = [one for one in layers if one.parameters and layout.how(one.name) == "average"]
    if averaged and group:
        for chunk in chunks_of_bytes(averaged, layout.chunk_bytes):
            name = chunk_name(chunk).replace("sum", "average", 1)
            yield Action("average", name, chunk.layers[-1], 0, group, chunk=chunk)
