"""Why each layer that several pipelines hold has its sync: layers with one reason are one group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainwright.estimator.structure import LayerFacts, Unit
from trainwright.tasks.allocate.actions.action import TRANSFERS
from trainwright.tasks.allocate.actions.number_sizes import gradient_number_bytes
from trainwright.tasks.allocate.actions.stage_actions import stage_actions
from trainwright.tasks.allocate.actions.stage_parts import holders_of, stage_parts
from trainwright.tasks.allocate.actions.transfer_sizes import TransferSizes
from trainwright.tasks.allocate.layouts.layer_groups import group_of
from trainwright.tasks.allocate.layouts.stage_syncs import WAYS, StageSyncs
from trainwright.tasks.runs.artefacts.layout import Layout, Sync
from trainwright.tasks.runs.artefacts.plan import LayerGroup


def stage_groups(
    layout: Layout, layers: Sequence[LayerFacts], units: Sequence[Unit], *, given: bool
) -> list[LayerGroup]:
    """The layers with parameters that several ranks hold, in the order of the forward pass.

    `given`: the job says how dense layers are kept equal. Raises BadInput for stages that name no
    units of the model.
    """
    holders = holders_of(stage_parts(layout, layers, units), layers)
    ranks = {
        one.name: max((len(holders[name]) for name in one.parameters), default=1) for one in layers
    }
    held = [one for one in layers if one.parameters and ranks[one.name] > 1]
    if not held:
        return []
    plain = layout.model_copy(update={"sync": {}, "rows": {}})
    speeds = dict.fromkeys(layout.devices, 1.0)
    syncs = StageSyncs(plain, layers, units, lambda _: 0.0, speeds)
    sent: dict[Sync, dict[str, float]] = {
        "sum": {one.name: _summed(one, ranks[one.name]) for one in held}
    }
    for way in WAYS:
        if permitted := syncs.permitted(way):
            sent[way] = _sent(syncs.with_ways(permitted), permitted, layers, units)
    used = {name: how for name, how in layout.sync.items() if how != "sum"}
    for name, value in _sent(layout, used, layers, units).items():
        sent[used[name]][name] = value  # with the layout's own rows
    refused = {one.name: _refused(one, syncs) for one in held}
    groups: dict[object, list[LayerFacts]] = {}
    for one in held:
        alike = refused[one.name] or (one.dense, one.parameter_bytes)
        groups.setdefault((layout.how(one.name), ranks[one.name], alike), []).append(one)
    return [
        group_of(layout, some, sent, refused[some[0].name], given=given) for some in groups.values()
    ]


def _summed(layer: LayerFacts, ranks: int) -> float:
    """What a rank sends to sum a layer's gradients."""
    return 2 * (ranks - 1) / ranks * gradient_number_bytes(layer) * sum(layer.parameters.values())


def _refused(layer: LayerFacts, syncs: StageSyncs) -> str:
    """Why a layer can only be summed; empty if it need not be."""
    reasons = [syncs.why_not(layer, way) for way in WAYS]
    if None in reasons:
        return ""
    return "no plain product with one weight" if layer.dense is None else str(reasons[0])


def _sent(
    layout: Layout,
    names: Mapping[str, Sync],
    layers: Sequence[LayerFacts],
    units: Sequence[Unit],
) -> dict[str, float]:
    """By name: the bytes that a rank sends in a step for a layer that is not summed, at most."""
    if not names:
        return {}
    sizes, count = TransferSizes(layout, layers, units), len(layout.devices)
    by_rank: dict[str, list[float]] = {name: [0.0] * count for name in names}
    for rank, actions in enumerate(stage_actions(layout, layers, units)):
        for action in actions:
            if action.kind in TRANSFERS and action.layer in names and action.chunk is None:
                by_rank[action.layer][rank] += float(sizes.of(action).sent_bytes(count)[rank])
    return {name: max(values) for name, values in by_rank.items()}
