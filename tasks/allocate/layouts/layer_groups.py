"""Why each layer of a layout has its sync: layers with one reason are one group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.actions.action import TRANSFERS
from trainwright.tasks.allocate.actions.actions import actions_of
from trainwright.tasks.allocate.actions.number_sizes import gradient_number_bytes
from trainwright.tasks.allocate.actions.transfer_sizes import TransferSizes
from trainwright.tasks.allocate.layouts.averages import AverageTimes
from trainwright.tasks.allocate.layouts.permitted import why_not
from trainwright.tasks.runs.artefacts.layout import Layout, Outer, Sync
from trainwright.tasks.runs.artefacts.plan import LayerGroup
from trainwright.tasks.units import size

_OUTER: dict[Outer, str] = {
    "block-momentum": "add block momentum",
    "nesterov": "take an outer Nesterov step",
}
_WAYS: dict[Sync, str] = {"sum": "summed", "factors": "as factors", "rows": "by rows"}


def layer_groups(
    layout: Layout, layers: Sequence[LayerFacts], times: AverageTimes, *, given: bool = False
) -> list[LayerGroup]:
    """The layers with parameters, in the order of the forward pass.

    `times` says how many steps average. `given`: the job chose the layout.
    """
    trained = [one for one in layers if one.parameters]
    sent = _sent_by_way(layout, trained, layers)
    groups: dict[object, list[LayerFacts]] = {}
    for one in trained:
        how, refused = layout.how(one.name), _refused(one)
        key: object = refused or (one.dense, one.parameter_bytes)
        groups.setdefault((how, None if how == "average" else key), []).append(one)
    return [_group(layout, some, sent, times, given) for some in groups.values()]


def _group(
    layout: Layout,
    some: Sequence[LayerFacts],
    sent: dict[Sync, dict[str, float]],
    times: AverageTimes,
    given: bool,
) -> LayerGroup:
    found = group_of(layout, some, sent, _refused(some[0]), given=given)
    if found.sync != "average":
        return found
    summed = sum(sent["sum"][one.name] for one in some)
    averaged = {
        "sent_bytes": summed * times.in_a_step_of(layout)[1],
        "why": _averaged(layout, times),
    }
    return found.model_copy(update=averaged)


def group_of(
    layout: Layout,
    some: Sequence[LayerFacts],
    sent: dict[Sync, dict[str, float]],
    refused: str | None,
    *,
    given: bool,
) -> LayerGroup:
    """Layers with one sync. `sent`: bytes by way and layer; `refused`: why they can only be summed.

    `given`: the job says how dense layers are kept equal.
    """
    how = layout.how(some[0].name)
    ways = {
        way: sum(by_layer[one.name] for one in some)
        for way, by_layer in sent.items()
        if all(one.name in by_layer for one in some)
    }
    return LayerGroup(
        layers=[one.name for one in some],
        kinds=list(dict.fromkeys(one.kind for one in some)),
        sync=how,
        sent_bytes=ways.get(how, 0.0),
        why=refused or _compared(how, ways, given),
    )


def _averaged(layout: Layout, times: AverageTimes) -> str:
    alone = "devices train alone" if layout.alone else "devices use their own gradients"
    then = "" if layout.outer == "none" else f", then {_OUTER[layout.outer]}"
    often = times.in_words(layout.average_every or 1)
    return f"as train.layout says: {alone}, and average {often}{then}"


def _refused(layer: LayerFacts) -> str | None:
    """Why a layer can only be summed; None if it need not be."""
    reasons = [why_not(layer, "factors"), why_not(layer, "rows")]
    if None in reasons:
        return None
    return "no plain product with one weight" if layer.dense is None else reasons[0]


def _compared(how: Sync, ways: dict[Sync, float], given: bool) -> str:
    """The bytes of the ways that a layer permits."""
    figures = ", ".join(f"{size(value)} {_WAYS[way]}" for way, value in ways.items())
    if given:
        return f"as train.layout says: {figures}"
    least = ways.get(how, 0.0) <= min(ways.values())
    return f"{'fewest bytes' if least else 'shortest step'}: {figures}"


def _sent_by_way(
    layout: Layout, trained: Sequence[LayerFacts], layers: Sequence[LayerFacts]
) -> dict[Sync, dict[str, float]]:
    """By way and layer: the bytes that a device sends in a step, at most."""
    ranks = len(layout.pipelines)
    around = 2 * (ranks - 1) / ranks
    found: dict[Sync, dict[str, float]] = {
        "sum": {
            one.name: around * gradient_number_bytes(one) * sum(one.parameters.values())
            for one in trained
        }
    }
    for way in ("factors", "rows"):
        those = [one for one in trained if why_not(one, way) is None]
        found[way] = _sent(_with(layout, those, way), those, layers)
    return found


def _with(layout: Layout, those: Sequence[LayerFacts], way: Sync) -> Layout:
    """The layout with this way for these layers; with its own rows, else with even ones."""
    rows = {one.name: layout.rows.get(one.name) or _even(layout, one) for one in those}
    return layout.model_copy(
        update={
            "sync": dict.fromkeys(rows, way),
            "rows": rows if way == "rows" else {},
        }
    )


def _even(layout: Layout, layer: LayerFacts) -> dict[str, tuple[int, int]]:
    dense, devices = layer.dense, layout.devices
    assert dense is not None
    total = dense.inputs if dense.kind == "embedding" else dense.outputs
    ends = [total * number // len(devices) for number in range(len(devices) + 1)]
    return dict(zip(devices, itertools.pairwise(ends), strict=True))


def _sent(
    layout: Layout, those: Sequence[LayerFacts], layers: Sequence[LayerFacts]
) -> dict[str, float]:
    names = {one.name for one in those}
    ranks = len(layout.pipelines)
    sizes, found = TransferSizes(layout, layers), dict.fromkeys(names, 0.0)
    for action in actions_of(layout, layers)[0]:
        if action.kind in TRANSFERS and action.layer in names and action.chunk is None:
            found[action.layer] += float(sizes.of(action).sent_bytes(ranks).max())
    return found
