"""From a layout, what each rank does in a step: one list of actions for each rank.

The lists are simulated (`step_simulator`) and checked (`action_check`). Ranks do the same, but
driven by autograd and not by the list (`trainwright.tasks.train.layouts`). They are numbered as the
layout's devices.

A rank first runs its micro-batches forward and backward. A layer with sync `rows` gathers its
inputs from all ranks, multiplies them by its own rows of the weight, and exchanges the results; its
backward pass does the reverse. The last micro-batch's backward pass starts the sums of gradients
and the gathers of factors, in the order in which they become ready. Then the rank waits for each of
them, multiplies the factors, and updates its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.layouts.chunks import GradientChunk, chunks_of
from trainwright.tasks.runs.artefacts.layout import Layout

Compute = Literal["forward", "input-gradient", "weight-gradient", "update"]
Transfer = Literal["gather", "exchange", "scatter-sum", "sum", "average", "agree"]
ActionKind = Compute | Transfer | Literal["wait"]
COMPUTE: tuple[Compute, ...] = ("forward", "input-gradient", "weight-gradient", "update")
TRANSFERS: tuple[Transfer, ...] = (
    "gather",
    "exchange",
    "scatter-sum",
    "sum",
    "average",
    "agree",
)
FLOAT_BYTES = 4


@dataclass(frozen=True)
class Action:
    """One thing that a rank does.

    A transfer is matched with those of the other ranks of its `group` by `name`. If it is
    `started`, the rank goes on at once, and a later `wait` of the same name ends it.
    """

    kind: ActionKind
    name: str
    layer: str = ""
    micro_batch: int = 0
    group: tuple[int, ...] = ()
    started: bool = False
    chunk: GradientChunk | None = None
    """of a sum: the gradients"""
    joint: bool = False
    """of a computation: whether it is of the joint batch, not of the rank's own samples"""


def actions_of(layout: Layout, layers: Sequence[LayerFacts]) -> list[list[Action]]:
    """The actions of each rank in a step that averages, if the layout averages.

    `layers` are the model's, in the order of the forward pass, the loss last. Every rank has the
    same number of micro-batches: one without samples still takes part in transfers. If devices
    train alone, each micro-batch is a local step, and one without samples takes no time.
    """
    ranks = len(layout.pipelines)
    group = tuple(range(ranks)) if ranks > 1 else ()
    parts = max(len(pipeline.micro_batches) for pipeline in layout.pipelines)
    trained = [one for one in layers if one.parameters]
    summed = [one for one in trained if layout.how(one.name) == "sum"]
    ends = _ends(chunks_of(summed, max(1, layout.chunk_bytes // FLOAT_BYTES)))
    work = [
        action
        for part in range(parts)
        for action in _micro_batch(layout, layers, part, group, ends if part == parts - 1 else {})
    ]
    own = [*work, *_finish(layout, layers, work, group)]
    return [own for _ in range(ranks)]


def _updates(layers: Sequence[LayerFacts], part: int) -> Iterator[Action]:
    for layer in layers:
        if layer.parameters:
            yield Action("update", f"update {layer.name} {part}", layer.name, part)


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
    for layer in layers:
        yield from _forward(layout, layer, part, group)
    for layer in reversed(layers):
        how = layout.how(layer.name) if layer.parameters else "sum"
        yield from _backward(layer, how, part, group)
        if not last or not group:
            continue
        if how == "factors":
            yield Action("gather", f"factors {layer.name}", layer.name, part, group, started=True)
        for chunk in ends.get(layer.name, []):
            yield Action("sum", _chunk_name(chunk), layer.name, part, group, True, chunk)
    if layout.alone:
        yield from _updates(layers, part)


def _chunk_name(chunk: GradientChunk) -> str:
    part = f" part {chunk.part + 1}" if chunk.part else ""
    return f"sum {chunk.parameters[0]}{part}"


def _is_sharded(layout: Layout, layer: LayerFacts, group: tuple[int, ...]) -> bool:
    return bool(group) and bool(layer.parameters) and layout.how(layer.name) == "rows"


def _forward(
    layout: Layout, layer: LayerFacts, part: int, group: tuple[int, ...]
) -> Iterator[Action]:
    name, sharded = layer.name, _is_sharded(layout, layer, group)
    if sharded:
        yield Action("gather", f"inputs {name} {part}", name, part, group)
    yield Action("forward", f"forward {name} {part}", name, part, joint=sharded)
    if sharded:
        yield Action("exchange", f"outputs {name} {part}", name, part, group)


def _backward(layer: LayerFacts, how: str, part: int, group: tuple[int, ...]) -> Iterator[Action]:
    name, sharded = layer.name, how == "rows" and bool(group)
    if sharded:
        yield Action("exchange", f"output gradients {name} {part}", name, part, group)
    yield Action("input-gradient", f"input gradient {name} {part}", name, part, joint=sharded)
    if sharded:
        yield Action("scatter-sum", f"input gradients {name} {part}", name, part, group)
    if how != "factors" or not group:
        weight = f"weight gradient {name} {part}"
        yield Action("weight-gradient", weight, name, part, joint=sharded)


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
            name = f"weight gradient {action.layer}"
            yield Action("weight-gradient", name, action.layer, action.micro_batch, joint=True)
    if not layout.alone:
        yield from _updates(layers, 0)
    averaged = [one for one in layers if one.parameters and layout.how(one.name) == "average"]
    if averaged and group:
        for chunk in chunks_of(averaged, max(1, layout.chunk_bytes // FLOAT_BYTES)):
            name = _chunk_name(chunk).replace("sum", "average", 1)
            yield Action("average", name, chunk.layers[-1], 0, group, chunk=chunk)
