"""Which pipelines of several stages a model and its devices permit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from trainwright.estimator.structure import LayerFacts, Unit
from trainwright.tasks.allocate.actions.schedules import passes_of
from trainwright.tasks.allocate.actions.stage_parts import (
    StagePart,
    holders_of,
    layers_of_units,
    stage_parts,
    units_named,
)
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline, Stage, Sync


def require_stages(
    layout: Layout,
    layers: Sequence[LayerFacts],
    units: Sequence[Unit],
    batches: Mapping[str, int],
) -> None:
    """Raise BadInput if a model of these units can't be trained in the layout's stages.

    `batches` has the samples of a step that each of the plan's devices computes, by id.
    """
    layers_of_units(layers, units)  # raises BadInput without units
    twice = [device for device, count in Counter(layout.devices).items() if count > 1]
    if twice:
        raise BadInput(f"layout.pipelines: {twice[0]} has two stages; allowed: one for each device")
    for number, pipeline in enumerate(layout.pipelines):
        _require_micro_batches(layout, pipeline, batches, units)
        if len(pipeline.stages) > 1:
            _require_units(f"layout.pipelines[{number}]", pipeline, units)
    parts = stage_parts(layout, layers, units)
    for name, sync in layout.sync.items():
        if sync == "average" or layout.average_every is not None:
            raise BadInput(
                f"layout: {name} is averaged; with pipelines of several stages, layers are summed, "
                "late-multiplied or sharded by rows"
            )
        if sync in ("factors", "rows"):
            layer = next(one for one in layers if one.name == name)
            if reason := why_not_between(layer, sync, layout, layers, units, parts):
                raise BadInput(f"layout: {name} can't be {sync}: {reason}")
        if sync == "rows":
            _require_holders(layout, name, units)


def why_not_between(
    layer: LayerFacts,
    sync: Sync,
    layout: Layout,
    layers: Sequence[LayerFacts],
    units: Sequence[Unit],
    parts: Sequence[StagePart],
) -> str | None:
    """Why pipelines can't late-multiply (factors) or share (rows) a dense layer; None if they can.

    `parts` are the stages of the layout.
    """
    if len(layout.pipelines) == 1:
        return "only one pipeline holds it"
    alike = [one for one in layers if one.parameters.keys() & layer.parameters.keys()]
    held = holders_of(parts, alike)
    for rank in sorted({rank for name in layer.parameters for rank in held[name]}):
        part, device = parts[rank], layout.devices[rank]
        if layer.name not in part.layer_names:
            return f"the stage of {device} uses its weight, and another one of its pipeline has it"
        if layer.name in part.recomputed:
            return f"{device} computes it again in the backward pass, which would send again"
    return _why_not_in_one_order(layout, layer.name, units) if sync == "rows" else None


def _require_micro_batches(
    layout: Layout, pipeline: Pipeline, batches: Mapping[str, int], units: Sequence[Unit]
) -> None:
    first, parts = pipeline.stages[0].device, pipeline.micro_batches
    samples = sum(parts)
    for stage in pipeline.stages:
        if samples != (batch := batches[stage.device]) or min(parts, default=-1) < 0:
            raise BadInput(
                f"layout.pipelines: {stage.device}: the micro-batches {parts} have {samples} "
                f"samples; its batch in the plan has {batch}"
            )
    joint = [one.name for one in units if one.batch_statistics]
    if joint and len(parts) > 1 and layout.batch_norm == "joint":
        raise BadInput(
            f"layout.pipelines: {first}: got {len(parts)} micro-batches; allowed: 1: {joint[0]} "
            "normalises by statistics of the whole batch; more with batch_norm: micro-batch"
        )


def _require_units(where: str, pipeline: Pipeline, units: Sequence[Unit]) -> None:
    """Every unit must be in one stage, and the stages in the order of the model."""
    count, known = len(pipeline.stages), {one.name: place for place, one in enumerate(units)}
    if count > len(units):
        raise BadInput(
            f"{where}: got {count} stages; the model has {len(units)} units: at most one stage each"
        )
    at, held = 0, dict[str, str]()
    for stage in pipeline.stages:
        own = _units_of(where, stage, units)
        for one in own:
            if one in held:
                raise BadInput(
                    f"{where}: the unit {one} is in two stages, of {held[one]} and {stage.device}"
                )
            held[one] = stage.device
        if [known[one] for one in own] != list(range(at, at + len(own))):
            due = units[at].name if at < len(units) else "none"
            raise BadInput(
                f"{where}: the stage of {stage.device} begins with {own[0]}; expected: {due}, as "
                "each stage has the units that follow those of the stage before"
            )
        at += len(own)
    if at < len(units):
        raise BadInput(f"{where}: no stage has the unit {units[at].name}")


def _units_of(where: str, stage: Stage, units: Sequence[Unit]) -> list[str]:
    own = [one.name for one in units_named(stage.layers, units)]
    if not own:
        raise BadInput(f"{where}: the stage of {stage.device} has no unit of the model")
    return own


def _orders(layout: Layout, layer: str, units: Sequence[Unit]) -> dict[str, object]:
    """The order of passes of each device that computes a layer, by id."""
    unit = next((one.name for one in units if layer in one.layers), "")
    return {
        stage.device: passes_of(layout.schedule, len(one.stages), place, len(one.micro_batches))
        for one in layout.pipelines
        for place, stage in enumerate(one.stages)
        if len(one.stages) == 1 or unit in {each.name for each in units_named(stage.layers, units)}
    }


def _why_not_in_one_order(layout: Layout, layer: str, units: Sequence[Unit]) -> str | None:
    """Why ranks that hold rows of a layer do not compute their micro-batches in one order."""
    orders = _orders(layout, layer, units)
    first = next(iter(orders))
    for device, order in orders.items():
        if order != orders[first]:
            return (
                f"{first} and {device} hold it, and do not compute their micro-batches in one "
                "order; allowed: as many micro-batches, and stages cut alike"
            )
    return None


def _require_holders(layout: Layout, layer: str, units: Sequence[Unit]) -> None:
    orders = _orders(layout, layer, units)
    if set(layout.rows.get(layer, {})) - set(orders):
        raise BadInput(f"layout.rows: {layer}: only {', '.join(orders)} compute it")
