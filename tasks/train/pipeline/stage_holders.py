"""Which rank of a layout with stages holds which tensors of a model, and which rows of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.allocate.actions.stage_parts import units_named
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.train.layouts.cut_tensors import Cuts, CutTensors
from trainwright.tasks.train.pipeline.stage_model import StageModel

if TYPE_CHECKING:
    from trainwright.estimator.trace.cuts.model_cuts import CutModel

Holders = Mapping[str, tuple[int, ...]]
"""By name of a tensor: the ranks that hold it, in ascending order."""


def stages_of(
    layout: Layout, model: torch.nn.Module, cut_model: CutModel, own: str = ""
) -> list[list[StageModel]]:
    """The stages of each pipeline. Raises BadInput for one without units.

    That of the device `own` recomputes what the layout says.
    """
    units = cut_model.units
    place = {one.name: number for number, one in enumerate(units)}
    found = []
    for pipeline in layout.pipelines:
        stages = []
        for stage in pipeline.stages:
            named = units_named(stage.layers, units) if len(pipeline.stages) > 1 else units
            if not named:
                raise BadInput(f"layout.pipelines: the stage on {stage.device} has no units")
            first, end = place[named[0].name], place[named[-1].name] + 1
            again = stage.recompute if stage.device == own else ()
            stages.append(StageModel(model, cut_model, first, end, again))
        found.append(stages)
    return found


def holders_of_tensors(
    layout: Layout,
    devices: Sequence[str],
    stages: Sequence[Sequence[StageModel]],
    everywhere: Collection[str],
) -> Holders:
    """The ranks that hold each tensor; `everywhere` are those that all hold.

    `devices` are in the order of ranks, `stages` as of `stages_of`.
    """
    rank_of = {one: rank for rank, one in enumerate(devices)}
    found: dict[str, set[int]] = {}
    for pipeline, own in zip(layout.pipelines, stages, strict=True):
        for stage, model in zip(pipeline.stages, own, strict=True):
            for name in (*model.parameters, *model.buffers):
                found.setdefault(name, set()).add(rank_of[stage.device])
    everyone = set(range(len(devices)))
    return {
        name: tuple(sorted(everyone if name in everywhere else ranks))
        for name, ranks in found.items()
    }


def cuts_of_tensors(
    layout: Layout, devices: Sequence[str], tensors: Sequence[CutTensors], holders: Holders
) -> dict[str, Cuts]:
    """By name, the rows of each rank: of a sharded layer those that the layout says, else all."""
    divided = {
        f"{layer}.{own}": rows for layer, rows in layout.rows.items() for own in ("weight", "bias")
    }
    found: dict[str, Cuts] = {}
    for one in tensors:
        rows = divided.get(one.name)
        found[one.name] = [
            (rows.get(device, (0, 0)) if rows is not None else (0, one.total))
            if rank in holders[one.name]
            else (0, 0)
            for rank, device in enumerate(devices)
        ]
    return found
