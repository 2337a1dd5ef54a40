"""Which layouts a model and its devices permit. A layout is refused, never silently replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline, Sync

_DENSE_ONLY: tuple[Sync, ...] = ("factors", "rows")


def why_not(layer: LayerFacts, sync: Sync) -> str | None:
    """Why a layer can't be kept equal in this way; None if it can."""
    if sync not in _DENSE_ONLY:
        return None
    if not layer.parameters:
        return "it has no parameters of its own"
    if layer.dense is None:
        return f"a {layer.kind} is not a plain product with one weight"
    if layer.shared:
        return "another layer uses its weight too"
    if sync == "rows" and layer.calls != 1:
        return f"it runs {layer.calls} times in a forward pass"
    return None


def require_permitted(
    layout: Layout, layers: Sequence[LayerFacts], batches: Mapping[str, int]
) -> None:
    """Raise BadInput if a model with these layers can't be trained so on these devices.

    `batches` has the samples of a step for each of the plan's devices, by id.
    """
    known = {one.name: one for one in layers if one.parameters}
    if sorted(layout.devices) != sorted(batches):
        raise BadInput(
            f"layout: is of the devices {', '.join(sorted(layout.devices))}; the plan's are "
            f"{', '.join(sorted(batches))}"
        )
    for pipeline in layout.pipelines:
        _require_one_stage(pipeline, batches)
    for name, sync in layout.sync.items():
        if name not in known:
            raise BadInput(
                f"layout.sync: got the layer {name!r}; allowed: a layer with parameters: "
                f"{_some(list(known))}"
            )
        if (reason := why_not(known[name], sync)) is not None:
            raise BadInput(f"layout: {name} can't be {sync}: {reason}")
        if sync == "average" and layout.average_every is None:
            raise BadInput(f"layout: {name} is averaged, but average_every is not set")
    for name, sync in layout.sync.items():
        if sync == "rows":
            _require_cuts(layout, known[name])
    if extra := layout.rows.keys() - {one for one, sync in layout.sync.items() if sync == "rows"}:
        raise BadInput(f"layout.rows: has {min(extra)!r}, whose sync is not rows")


def _require_one_stage(pipeline: Pipeline, batches: Mapping[str, int]) -> None:
    """A pipeline must be one device with its batch, without recomputing."""
    if len(pipeline.stages) != 1:
        devices = ", ".join(stage.device for stage in pipeline.stages) or "no device"
        raise BadInput(
            f"layout.pipelines: {devices}: got {len(pipeline.stages)} stages; allowed: 1; "
            "pipelines of several stages can't be trained yet"
        )
    (stage,) = pipeline.stages
    if stage.recompute:
        raise BadInput(
            f"layout.pipelines: {stage.device}: recompute: got {_some(stage.recompute)}; allowed: "
            "no layer; a forward pass can't be done again yet"
        )
    samples = sum(pipeline.micro_batches)
    if samples != (batch := batches[stage.device]) or any(
        one < 0 for one in pipeline.micro_batches
    ):
        raise BadInput(
            f"layout.pipelines: {stage.device}: the micro-batches {pipeline.micro_batches} have "
            f"{samples} samples; its batch in the plan has {batch}"
        )


def _require_cuts(layout: Layout, layer: LayerFacts) -> None:
    """The devices' rows must be those of the weight, each once, in the order of the devices."""
    dense, cuts = layer.dense, layout.rows.get(layer.name, {})
    assert dense is not None
    total = dense.inputs if dense.kind == "embedding" else dense.outputs
    at = 0
    for device in layout.devices:
        begin, end = cuts.get(device, (at, at))
        if begin != at or end < begin:
            raise BadInput(
                f"layout.rows: {layer.name}: {device} holds rows {begin} to {end}; expected: from "
                f"{at} on"
            )
        at = end
    if at != total or not cuts.keys() <= set(layout.devices):
        raise BadInput(
            f"layout.rows: {layer.name}: the devices hold {at} rows; its weight has {total}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
