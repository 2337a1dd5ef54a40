"""Which layouts a model and its devices permit. A layout is refused, never silently replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainwright.estimator.memory.recompute_names import covered
from trainwright.estimator.structure import LayerFacts, Unit
from trainwright.tasks.allocate.layouts.stage_rules import require_stages
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.layout import DATA_PARALLEL, Layout, Pipeline, Sync
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.train_spec import LayoutSpec, TrainSpec

_DENSE_ONLY: tuple[Sync, ...] = ("factors", "rows")


def why_not(layer: LayerFacts, sync: Sync) -> str | None:
    """Why a layer can't be kept equal in this way; None if it can."""
    if sync not in _DENSE_ONLY:
        return None
    if not layer.parameters:
        return "it has no parameters of its own"
    if layer.dense is None:
        return f"{layer.kind} is not a plain product with one weight"
    if layer.shared:
        return "another layer uses its weight too"
    if sync == "rows" and layer.calls != 1:
        return f"it runs {layer.calls} times in a forward pass"
    return None


def require_permitted(
    layout: Layout,
    layers: Sequence[LayerFacts],
    batches: Mapping[str, int],
    units: Sequence[Unit] = (),
) -> None:
    """Raise BadInput if a model with these layers can't be trained so on these devices.

    `batches` has the samples of a step for each of the plan's devices, by id: those that it
    computes. `units` are the model's, for pipelines of several stages.
    """
    known = {one.name: one for one in layers if one.parameters}
    if sorted(layout.devices) != sorted(batches):
        raise BadInput(
            f"layout: is of the devices {', '.join(sorted(layout.devices))}; the plan's are "
            f"{', '.join(sorted(batches))}"
        )
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
    if layout.has_stages:
        require_stages(layout, layers, units, batches)
    else:
        for pipeline in layout.pipelines:
            _require_one_stage(pipeline, batches)
        _require_recomputed(layout, [one.name for one in layers])
    for name, sync in layout.sync.items():
        if sync == "rows":
            _require_cuts(layout, known[name])
    if extra := layout.rows.keys() - {one for one, sync in layout.sync.items() if sync == "rows"}:
        raise BadInput(f"layout.rows: has {min(extra)!r}, whose sync is not rows")


def require_effect(train: TrainSpec, layout: Layout, batches: Sequence[int]) -> None:
    """Raise BadInput if something that the job fixes changes nothing in the layout of its plan.

    `batches` are the devices' samples of a step.
    """
    spec = train.layout
    if not isinstance(spec, LayoutSpec):
        return
    if train.averages == "mixed" and train.dense and train.dense not in layout.sync.values():
        raise BadInput(
            f"train.layout.dense: got {train.dense!r}; allowed: auto or sum: all layers that "
            f"permit {train.dense} are averaged by mixed"
        )
    if spec.local_batch is not None and spec.local_batch > max(batches):
        raise BadInput(
            f"train.layout.local_batch: got {spec.local_batch}; allowed: 1 to {max(batches)}, the "
            "largest part of a device in the global batch"
        )


def overrides(layout: Layout | None, train: TrainSpec) -> bool:
    """Whether a given plan's layout is another than the job asks for. None: of one device."""
    wanted = train.layout
    name = DATA_PARALLEL if layout is None else layout.name
    ways = set() if layout is None else set(layout.sync.values())
    if train.pipeline is not None or train.averages is not None:
        return _others(layout, wanted) or name != (train.averages or "pipeline")
    if train.dense is not None:
        return _others(layout, wanted) or ways != {train.dense}
    if wanted == "hybrid":
        return name != "hybrid"
    summed = wanted == DATA_PARALLEL or (isinstance(wanted, LayoutSpec) and wanted.dense == "sum")
    return _others(layout, wanted) or (summed and name != DATA_PARALLEL)


def _others(layout: Layout | None, wanted: LayoutSpec | str) -> bool:
    """Whether a field that the job sets has another value in the layout."""
    if layout is None or not isinstance(wanted, LayoutSpec):
        return False
    names = {"chunk_bytes", "factor_type", "average_every", "local_batch", "outer"}
    given = {name: getattr(wanted, name) for name in names & wanted.model_fields_set}
    return any(one not in (None, getattr(layout, name)) for name, one in given.items())


def require_trained(plan: Plan) -> None:
    """Raise BadInput if ranks can't train by a plan: no device, or a layout of no use for them."""
    if not plan.devices:
        raise BadInput("plan: has no device; allowed: one or more")
    if plan.layout is not None:
        batches = {device.id: device.batch_size for device in plan.devices}
        require_permitted(plan.layout, plan.layers, batches, plan.units)
    elif (name := plan.strategy.get("name", DATA_PARALLEL)) != DATA_PARALLEL:
        raise BadInput(
            f"plan.strategy: got {name!r}, without a layout; trainwright can only train plans "
            f"with a layout, and {DATA_PARALLEL} ones"
        )


def _require_one_stage(pipeline: Pipeline, batches: Mapping[str, int]) -> None:
    """A pipeline must be one device with its batch."""
    if len(pipeline.stages) != 1:
        raise BadInput("layout.pipelines: got a pipeline without stages; allowed: 1 or more")
    (stage,) = pipeline.stages
    samples = sum(pipeline.micro_batches)
    if samples != (batch := batches[stage.device]) or any(
        one < 0 for one in pipeline.micro_batches
    ):
        raise BadInput(
            f"layout.pipelines: {stage.device}: the micro-batches {pipeline.micro_batches} have "
            f"{samples} samples; its batch in the plan has {batch}"
        )


def _require_recomputed(layout: Layout, layers: Sequence[str]) -> None:
    """A layer that sends in its passes can't be recomputed: it would send again."""
    apart = [name for name, sync in layout.sync.items() if sync in _DENSE_ONLY]
    for pipeline in layout.pipelines:
        for stage in pipeline.stages:
            for module in stage.recompute:
                again = covered([module], layers)
                inside = [one for one in apart if one in again]
                if inside:
                    raise BadInput(
                        f"layout.pipelines: {stage.device}: recompute: got {module}; allowed: a "
                        f"module without layers that are factors or rows, as {inside[0]} is"
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
