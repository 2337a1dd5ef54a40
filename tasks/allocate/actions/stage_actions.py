"""The lists of actions of a layout in which some pipelines have several stages.

A stage takes its micro-batches in the order of its schedule (`schedules`). Before a forward pass it
receives what crosses the cut before it, afterwards it sends what crosses the cut behind it; a
backward pass does the reverse with gradients. A send is started when the pass has ended, and the
rank goes on; the receive of the same name waits for it.

What several pipelines hold is kept equal by layer, among the ranks that hold it: one rank of each
pipeline, and all that use a tied parameter. Sums and gathers are started in one order, the same on
all ranks: backward through the model, each as soon as the rank's last micro-batch has made all its
gradients and those of the transfers before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainwright.estimator.structure import LayerFacts, Unit
from trainwright.tasks.allocate.actions.action import (
    ACTIVATIONS,
    COMPUTE,
    GRADIENTS,
    Action,
    PointToPoint,
)
from trainwright.tasks.allocate.actions.chunks import chunks_of_bytes
from trainwright.tasks.allocate.actions.layer_actions import (
    backward,
    forward,
    gather_of_factors,
    late_weight_gradient,
    sum_of,
    updates,
    way_of,
    weight_gradient,
)
from trainwright.tasks.allocate.actions.schedules import StagePass, passes_of
from trainwright.tasks.allocate.actions.stage_parts import StagePart, holders_of, stage_parts
from trainwright.tasks.runs.artefacts.layout import Layout

Groups = dict[str, tuple[int, ...]]
"""By layer: the ranks that hold it, if they are several, else none."""


def stage_actions(
    layout: Layout, layers: Sequence[LayerFacts], units: Sequence[Unit]
) -> list[list[Action]]:
    """The actions of each rank. Raises BadInput for stages that name no units of the model."""
    parts = stage_parts(layout, layers, units)
    holders = holders_of(parts, layers)
    groups = {
        layer.name: _several(
            rank for rank, part in enumerate(parts) if layer.name in part.layer_names
        )
        for layer in layers
    }
    joint = _joint_transfers(layout, layers, groups, holders)
    return [
        _StageActions(layout, parts[rank], rank, groups, joint).actions(layers, holders, len(parts))
        for rank in range(len(parts))
    ]


def _several(ranks: Iterator[int]) -> tuple[int, ...]:
    found = tuple(ranks)
    return found if len(found) > 1 else ()


def _joint_transfers(
    layout: Layout,
    layers: Sequence[LayerFacts],
    groups: Groups,
    holders: dict[str, tuple[int, ...]],
) -> list[Action]:
    """All sums of gradients and gathers of factors, in the order in which ranks start them."""
    place = {layer.name: number for number, layer in enumerate(layers)}
    found = [
        gather_of_factors(layer, 0, groups[layer.name])
        for layer in layers
        if groups[layer.name] and way_of(layout, layer) == "factors"
    ]
    summed: dict[tuple[int, ...], list[LayerFacts]] = {}
    for layer in layers:
        if way_of(layout, layer) != "sum":
            continue
        by_group: dict[tuple[int, ...], dict[str, int]] = {}
        for name, elements in layer.parameters.items():
            by_group.setdefault(holders[name], {})[name] = elements
        for group, own in by_group.items():
            if len(group) > 1:
                held = layer.model_copy(update={"parameters": own})
                summed.setdefault(group, []).append(held)
    for group, some in summed.items():
        for chunk in chunks_of_bytes(some, layout.chunk_bytes):
            found.append(sum_of(chunk, 0, group))
    return sorted(found, key=lambda one: -place[one.layer])


def _marked(actions: Iterator[Action]) -> Iterator[Action]:
    """The actions of a pass, its first computation marked."""
    begun = False
    for one in actions:
        first = not begun and one.kind in COMPUTE
        begun = begun or first
        yield replace(one, begins=True) if first else one


class _StageActions:
    """Makes the actions of one rank."""

    def __init__(
        self,
        layout: Layout,
        part: StagePart,
        rank: int,
        groups: Groups,
        joint: Sequence[Action],
    ) -> None:
        self._layout, self._part, self._rank, self._groups = layout, part, rank, groups
        self._place = {layer.name: number for number, layer in enumerate(part.layers)}
        last = len(part.micro_batches) - 1
        self._waiting = [replace(one, micro_batch=last) for one in joint if rank in one.group]
        self._started: list[Action] = []

    def actions(
        self, layers: Sequence[LayerFacts], holders: dict[str, tuple[int, ...]], ranks: int
    ) -> list[Action]:
        """All actions of a step."""
        part, found = self._part, list[Action]()
        for one_pass in passes_of(
            self._layout.schedule, part.stages, part.stage, len(part.micro_batches)
        ):
            found += _marked(self._pass(one_pass))
        if ranks > 1:
            found.append(Action("agree", "agree", group=tuple(range(ranks))))
        for one in self._started:
            found.append(replace(one, kind="wait", started=False))
            if one.kind == "gather":
                found.append(late_weight_gradient(one))
        held = [
            one for one in layers if any(self._rank in holders[name] for name in one.parameters)
        ]
        return [*found, *updates(held, 0)]

    def _pass(self, one_pass: StagePass) -> Iterator[Action]:
        """One pass over a micro-batch, with what it receives and sends."""
        part, number = self._part, one_pass.micro_batch
        last = number == len(part.micro_batches) - 1
        if one_pass.kind == "forward":
            if part.before is not None:
                yield self._message("receive", ACTIVATIONS, part.stage - 1, number)
            for layer in part.layers:
                yield from forward(self._layout, layer, number, self._groups[layer.name])
            if part.after is not None:
                yield self._message("send", ACTIVATIONS, part.stage, number)
        elif one_pass.kind == "weight-gradient":
            for layer in reversed(part.layers):
                group = self._groups[layer.name]
                yield from weight_gradient(self._layout, layer, number, group)
                yield from self._starts(layer if last else None)
        else:
            yield from self._backward(number, fused=one_pass.kind == "backward", last=last)
        if last and one_pass.kind in ("backward", "weight-gradient"):
            yield from self._starts_all()

    def _backward(self, number: int, *, fused: bool, last: bool) -> Iterator[Action]:
        """Gradients of inputs, and if `fused` of weights."""
        part = self._part
        if part.after is not None:
            yield self._message("receive", GRADIENTS, part.stage, number)
        for unit_layers in self._units_backward():
            for layer in unit_layers:
                if layer.name in part.recomputed:
                    name = f"recompute {layer.name} {number}"
                    yield Action("recompute", name, layer.name, number)
            for layer in reversed(unit_layers):
                group = self._groups[layer.name]
                yield from backward(self._layout, layer, number, group, weights=fused)
                yield from self._starts(layer if last and fused else None)
        if part.before is not None:
            yield self._message("send", GRADIENTS, part.stage - 1, number)

    def _units_backward(self) -> Iterator[list[LayerFacts]]:
        """The layers of each unit, the last unit first."""
        own = list(self._part.layers)
        for unit in reversed(self._part.units):
            names = set(unit.layers)
            begin = next(
                (place for place, layer in enumerate(own) if layer.name in names), len(own)
            )
            yield own[begin:]
            del own[begin:]
        yield own

    def _message(self, kind: PointToPoint, what: str, cut: int, number: int) -> Action:
        """A message over the cut behind stage number `cut`."""
        part = self._part
        other = part.after if cut == part.stage else part.before
        assert other is not None
        group = (self._rank, other) if kind == "send" else (other, self._rank)
        name = f"{what} of pipeline {part.pipeline} cut {cut} micro-batch {number}"
        unit = part.cut_after if cut == part.stage else part.cut_before
        return Action(kind, name, unit, number, group, started=kind == "send")

    def _starts(self, layer: LayerFacts | None) -> Iterator[Action]:
        """The joint transfers that are ready after the last weight gradient of a layer."""
        if layer is None:
            return
        at = self._place[layer.name]
        while self._waiting and self._place.get(self._waiting[0].layer, -1) >= at:
            self._started.append(self._waiting.pop(0))
            yield self._started[-1]

    def _starts_all(self) -> Iterator[Action]:
        """The rest: of tied parameters that another stage is the first to use."""
        self._started += self._waiting
        yield from self._waiting
        self._waiting = []
