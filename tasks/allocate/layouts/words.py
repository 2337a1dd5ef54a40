"""A layout in words."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.runs.artefacts.layout import Layout, Sync
from trainwright.tasks.runs.artefacts.plan import LayerGroup
from trainwright.tasks.units import plain

SYNC_WORDS: dict[Sync, str] = {
    "sum": "data parallel",
    "factors": "late-multiply",
    "rows": "sharded by rows",
    "average": "averaged",
}
ALL_SUMMED = "all layers data parallel"
_MOST_NAMED = 4


def in_words(
    layout: Layout,
    layers: Sequence[LayerFacts],
    sent_bytes: float,
    summed_bytes: float,
    averaged: str = "",
) -> str:
    """What is done with which layers, and how the bytes compare with those of data parallel.

    Bytes are what a device sends in a step; `summed_bytes` are those of data parallel. `averaged`
    says how often parameters are averaged, if some are.
    """
    count = len(layout.pipelines)
    where = f"on {count} devices" if count > 1 else "on one device"
    by_way: dict[Sync, list[LayerFacts]] = {}
    for one in layers:
        if one.parameters:
            by_way.setdefault(layout.how(one.name), []).append(one)
    if set(by_way) <= {"sum"}:
        return f"{ALL_SUMMED} {where}"
    parts = [f"{_layers(some, by_way)} {_way(way, averaged)}" for way, some in by_way.items()]
    parts[0] += f" {where}"
    fewer = ""
    if sent_bytes > 0 and summed_bytes > 0:
        ratio = summed_bytes / sent_bytes
        fewer = (
            f": {plain(ratio)} times fewer bytes than summed gradients"
            if ratio >= 1
            else f": {plain(1 / ratio)} times the bytes of summed gradients"
        )
    return f"{'; '.join(parts)}{_local_steps(layout)}{fewer}"


def layers_text(group: LayerGroup) -> str:
    """The layers of a group with their kinds; if they are many, only their number."""
    kinds = ", ".join(group.kinds[:_MOST_NAMED]) + (", …" if len(group.kinds) > _MOST_NAMED else "")
    few = len(group.layers) <= _MOST_NAMED
    names = (
        ", ".join(group.layers) if few else f"{group.layers[0]} and {len(group.layers) - 1} more"
    )
    return f"{names} ({kinds})"


def _way(way: Sync, averaged: str) -> str:
    return f"{SYNC_WORDS[way]} {averaged}".rstrip() if way == "average" else SYNC_WORDS[way]


def _local_steps(layout: Layout) -> str:
    """How many steps each device does between the steps of all, if not all do one."""
    counts = [len(one.micro_batches) for one in layout.pipelines]
    if not layout.alone or max(counts) == 1:
        return ""
    return f", in local steps of about {layout.local_batch} samples"


def _layers(some: Sequence[LayerFacts], by_way: dict[Sync, list[LayerFacts]]) -> str:
    """Names of layers; if they are many, how many of which kind."""
    if len(by_way) == 1:
        return "all layers"
    if len(some) <= _MOST_NAMED:
        return ", ".join(one.name for one in some)
    kinds = dict.fromkeys(one.kind for one in some)
    if all(kind.startswith("Conv") for kind in kinds):
        return f"{len(some)} convolutions"
    return f"{len(some)} layers ({', '.join(list(kinds)[:_MOST_NAMED])})"
