"""Requests whose plans have pipelines of several stages."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from layout_ranks import structure_of

from trainwright.estimator.memory.recompute_names import run_of
from trainwright.tasks.allocate.actions.stage_parts import stage_parts
from trainwright.tasks.allocate.layouts.permitted import require_trained, why_not
from trainwright.tasks.allocate.layouts.stage_rules import why_not_between
from trainwright.tasks.runs.artefacts.layout import Layout, Pipeline, Stage, StageSchedule, Sync
from trainwright.tasks.train import TrainRequest

_DROPOUT = re.compile(r"(?i)(dropout\w*)([(=])0\.\d+")


def with_stages(
    asked: TrainRequest,
    pipelines: Sequence[tuple[list[int], list[float]]],
    schedule: StageSchedule = "1f1b",
    **fields: Any,
) -> TrainRequest:
    """The request with pipelines on its plan's devices.

    Each has micro-batches, and the shares of the model's units before each cut. `fields` are more
    of the layout's.
    """
    structure = structure_of(asked)
    units = [one.name for one in structure.units]
    devices, made = iter(asked.plan.devices), []
    planned = []
    for sizes, shares in pipelines:
        places = [0, *(round(share * len(units)) for share in shares), len(units)]
        stages = []
        for begin, end in itertools.pairwise(places):
            device = next(devices).model_copy(update={"batch_size": sum(sizes)})
            planned.append(device)
            stages.append(Stage(device=device.id, layers=units[begin:end]))
        made.append(Pipeline(micro_batches=sizes, stages=stages))
    plan = asked.plan.model_copy(
        update={
            "layout": Layout(name="pipeline", schedule=schedule, pipelines=made, **fields),
            "devices": planned,
            "layers": [one.facts() for one in structure.layer_work],
            "units": structure.units,
        }
    )
    return asked.model_copy(update={"plan": plan})


def with_dense(asked: TrainRequest, ways: Sequence[Sync]) -> TrainRequest:
    """The request with its dense layers kept equal between pipelines in these ways, in turn.

    As far as the layout permits; rows are uneven, and one rank may hold none.
    """
    layout, layers, units = asked.plan.layout, asked.plan.layers, asked.plan.units
    assert layout is not None
    parts = stage_parts(layout, layers, units)
    sync: dict[str, Sync] = {}
    rows: dict[str, dict[str, tuple[int, int]]] = {}
    for one in layers:
        way = ways[len(sync) % len(ways)]
        if not one.parameters or why_not(one, way):
            continue
        if why_not_between(one, way, layout, layers, units, parts):
            continue
        sync[one.name] = way
        if way == "rows":
            dense = one.dense
            assert dense is not None
            total = dense.inputs if dense.kind == "embedding" else dense.outputs
            held = [
                device
                for device, part in zip(layout.devices, parts, strict=True)
                if one in part.layers
            ]
            ends = [0, *(total * 2 // 3 for _ in held[1:]), total]
            rows[one.name] = dict(zip(held, itertools.pairwise(ends), strict=True))
    layout = layout.model_copy(update={"sync": sync, "rows": rows, "name": "mixed"})
    plan = asked.plan.model_copy(update={"layout": layout})
    require_trained(plan)
    return asked.model_copy(update={"plan": plan})


def recomputing(asked: TrainRequest, parts: int = 1, layout: Layout | None = None) -> TrainRequest:
    """The request with all units of each stage recomputed, in so many runs.

    `layout`: instead of the plan's.
    """
    layout = layout or asked.plan.layout
    assert layout is not None
    units = {one.name: one for one in asked.plan.units}

    def runs(names: Sequence[str]) -> list[str]:
        ends = [round(number * len(names) / parts) for number in range(parts + 1)]
        some = [names[begin:end] for begin, end in itertools.pairwise(ends) if begin < end]
        return [run_of(units[one[0]].modules[0], units[one[-1]].modules[-1]) for one in some]

    pipelines = [
        one.model_copy(
            update={
                "stages": [
                    stage.model_copy(update={"recompute": runs(stage.layers)})
                    for stage in one.stages
                ]
            }
        )
        for one in layout.pipelines
    ]
    layout = layout.model_copy(update={"pipelines": pipelines})
    return asked.model_copy(update={"plan": asked.plan.model_copy(update={"layout": layout})})


def without_dropout(source: str) -> str:
    """A model's source with a rate of 0: threads share the random numbers that recomputing sets."""
    return _DROPOUT.sub(r"\1\g<2>0.0", source)
