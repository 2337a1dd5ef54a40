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
    parts = StepParts(layout, layers)
    work = [action for part in range(parts.count) for action in parts.of(part)]
    own = [*work, *parts.finish()]
    return [own for _ in layout.pipelines]


class StepParts:
    """The actions of every rank of a layout without stages, by micro-batch."""

    def __init__(self, layout: Layout, layers: Sequence[LayerFacts]) -> None:
        self._layout, self._layers = layout, layers
        self._ranks = len(layout.pipelines)
        self._group = tuple(range(self._ranks)) if self._ranks > 1 else ()
        self.count = max(len(pipeline.micro_batches) for pipeline in layout.pipelines)
        """of micro-batches"""
        trained = [one for one in layers if one.parameters]
        summed = [one for one in trained if layout.how(one.name) == "sum"]
        self._ends = _ends(chunks_of_bytes(summed, layout.chunk_bytes))

    def of(self, part: int) -> list[Action]:
        """The actions of one micro-batch; those of the last one start what ranks do together."""
        ends = self._ends if part == self.count - 1 else {}
        return [*_micro_batch(self._layout, self._layers, part, self._group, ends)]

    def alike_after(self, part: int) -> int:
        """How many micro-batches after this one have as many samples, without the last one."""
        sizes = [one.micro_batches for one in self._layout.pipelines]
        end = part + 1
        while end < self.count - 1 and all(
            own[part : part + 1] == own[end : end + 1] for own in sizes
        ):
            end += 1
        return end - part - 1

    def finish(self) -> list[Action]:
        """What follows the last micro-batch."""
        work = self.of(self.count - 1)
        return [*_finish(self._layout, self._layers, work, self._group)]


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
