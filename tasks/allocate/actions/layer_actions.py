"""What a rank does for one layer and micro-batch: the parts of all lists of actions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.actions.action import Action
from trainwright.tasks.allocate.actions.chunks import GradientChunk
from trainwright.tasks.runs.artefacts.layout import Layout


def forward(
    layout: Layout, layer: LayerFacts, part: int, group: tuple[int, ...]
) -> Iterator[Action]:
    """The layer's outputs; `group` are the ranks that hold the layer, empty if only one does."""
    name, sharded = layer.name, _is_sharded(layout, layer, group)
    if sharded:
        yield Action("gather", f"inputs {name} {part}", name, part, group)
    yield Action("forward", f"forward {name} {part}", name, part, joint=sharded)
    if sharded:
        yield Action("exchange", f"outputs {name} {part}", name, part, group)


def backward(
    layout: Layout,
    layer: LayerFacts,
    part: int,
    group: tuple[int, ...],
    *,
    weights: bool = True,
    wanted: bool = True,
) -> Iterator[Action]:
    """The gradients of the layer's inputs, if they are wanted, and of its weights."""
    name, sharded = layer.name, _is_sharded(layout, layer, group)
    if sharded:
        yield Action("exchange", f"output gradients {name} {part}", name, part, group)
    yield Action("input-gradient", f"input gradient {name} {part}", name, part, joint=sharded)
    if sharded and wanted:
        yield Action("scatter-sum", f"input gradients {name} {part}", name, part, group)
    if weights:
        yield from weight_gradient(layout, layer, part, group)


def weight_gradient(
    layout: Layout, layer: LayerFacts, part: int, group: tuple[int, ...]
) -> Iterator[Action]:
    """The gradients of the layer's weights, unless they are multiplied late."""
    if way_of(layout, layer) != "factors" or not group:
        sharded = _is_sharded(layout, layer, group)
        name = f"weight gradient {layer.name} {part}"
        yield Action("weight-gradient", name, layer.name, part, joint=sharded)


def late_weight_gradient(gathered: Action) -> Action:
    """The weight gradient of the joint batch, from factors that were gathered."""
    name = f"weight gradient {gathered.layer}"
    return Action("weight-gradient", name, gathered.layer, gathered.micro_batch, joint=True)


def updates(layers: Sequence[LayerFacts], part: int) -> Iterator[Action]:
    """The optimizer's work."""
    for layer in layers:
        if layer.parameters:
            yield Action("update", f"update {layer.name} {part}", layer.name, part)


def gather_of_factors(layer: LayerFacts, part: int, group: tuple[int, ...]) -> Action:
    """The start of a gather of inputs and output gradients."""
    return Action("gather", f"factors {layer.name}", layer.name, part, group, started=True)


def sum_of(chunk: GradientChunk, part: int, group: tuple[int, ...]) -> Action:
    """The start of a sum of gradients."""
    return Action("sum", chunk_name(chunk), chunk.layers[-1], part, group, True, chunk)


def chunk_name(chunk: GradientChunk) -> str:
    """The name of a sum."""
    part = f" part {chunk.part + 1}" if chunk.part else ""
    return f"sum {chunk.parameters[0]}{part}"


def way_of(layout: Layout, layer: LayerFacts) -> str:
    """How copies of a layer are kept equal; `sum` without parameters."""
    return layout.how(layer.name) if layer.parameters else "sum"


def _is_sharded(layout: Layout, layer: LayerFacts, group: tuple[int, ...]) -> bool:
    return bool(group) and way_of(layout, layer) == "rows"
