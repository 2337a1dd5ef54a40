"""Which part of the model each rank of a layout with stages computes, and which ranks hold what."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.estimator.memory.recompute_names import covered
from trainwright.estimator.structure import LayerFacts, Unit
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.layout import Layout


@dataclass(frozen=True)
class StagePart:
    """A rank's stage."""

    pipeline: int
    stage: int
    stages: int
    """of its pipeline"""
    micro_batches: tuple[int, ...]
    units: tuple[Unit, ...]
    layers: tuple[LayerFacts, ...]
    recomputed: frozenset[str]
    """names of layers"""
    before: int | None
    """the rank of the stage before; None: it is the first"""
    after: int | None
    cut_before: str
    """the last unit of the stage before"""

    @functools.cached_property
    def layer_names(self) -> frozenset[str]:
        """Of `layers`."""
        return frozenset(layer.name for layer in self.layers)

    @property
    def cut_after(self) -> str:
        """The last unit: what is alive after it crosses to the next stage."""
        return self.units[-1].name


def stage_parts(
    layout: Layout, layers: Sequence[LayerFacts], units: Sequence[Unit]
) -> list[StagePart]:
    """The part of each rank. Raises BadInput for a stage that names no units of the model."""
    by_unit = layers_of_units(layers, units)
    found: list[StagePart] = []
    for number, pipeline in enumerate(layout.pipelines):
        count, first = len(pipeline.stages), len(found)
        for place, stage in enumerate(pipeline.stages):
            own = units_named(stage.layers, units) if count > 1 else list(units)
            held = [layer for one in own for layer in by_unit[one.name]]
            found.append(
                StagePart(
                    number,
                    place,
                    count,
                    tuple(pipeline.micro_batches),
                    tuple(own),
                    tuple(held),
                    frozenset(covered(stage.recompute, [layer.name for layer in held])),
                    first + place - 1 if place else None,
                    first + place + 1 if place + 1 < count else None,
                    found[-1].cut_after if place else "",
                )
            )
    return found


def layers_of_units(
    layers: Sequence[LayerFacts], units: Sequence[Unit]
) -> dict[str, list[LayerFacts]]:
    """The layers of each unit; one that is in no unit, as the loss, is in that of the one before.

    Raises BadInput if there are no units.
    """
    if not units:
        raise BadInput("layout: has pipelines of several stages; the model can't be cut into units")
    unit_of: dict[str, str] = {}
    for one in units:
        for name in one.layers:
            unit_of.setdefault(name, one.name)
    found: dict[str, list[LayerFacts]] = {one.name: [] for one in units}
    at = units[0].name
    for layer in layers:
        if layer.kind == "loss":
            at = units[-1].name
        at = unit_of.get(layer.name, at)
        found[at].append(layer)
    return found


def units_named(names: Sequence[str], units: Sequence[Unit]) -> list[Unit]:
    """The units of these names, in the order of the model.

    A name that is no unit's stands for all units whose modules are all inside that module. Raises
    BadInput for a name without units.
    """
    known = {one.name for one in units}
    found: set[str] = set()
    for name in names:
        inside = {name} & known or {one.name for one in units if _is_inside(one, name)}
        if not inside:
            shown = ", ".join(list(known)[:5]) + (", …" if len(known) > 5 else "")
            raise BadInput(
                f"layout.pipelines: got the unit {name!r}; allowed: a unit of the model, or a "
                f"module that contains whole units: {shown}"
            )
        found |= inside
    return [one for one in units if one.name in found]


def _is_inside(unit: Unit, module: str) -> bool:
    inside = [one == module or one.startswith(f"{module}.") for one in unit.modules]
    return bool(inside) and all(inside)


def holders_of(
    parts: Sequence[StagePart], layers: Sequence[LayerFacts]
) -> dict[str, tuple[int, ...]]:
    """The ranks that hold each trained parameter, by its name.

    One that several units use is held by all ranks that compute one of them.
    """
    used = [
        {name for unit in part.units for name in unit.layers} | part.layer_names for part in parts
    ]
    tied = [{name for unit in part.units for name in unit.tied} for part in parts]
    return {
        name: tuple(
            rank for rank in range(len(parts)) if layer.name in used[rank] or name in tied[rank]
        )
        for layer in layers
        for name in layer.parameters
    }
