"""Which rows of a sharded layer each rank holds. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.train.batch.sampling import shares


def cuts_among(
    layout: Layout, layer: str, total: int, devices: Sequence[str]
) -> list[tuple[int, int]]:
    """The rows [begin, end) of each device, in their order, in proportion to the planned ones.

    `devices` are the ids of the devices that are there. If all of the layout are, each holds what
    is planned; if none of them was to hold rows, they hold equal parts.
    """
    planned = [layout.rows[layer].get(device, (0, 0)) for device in devices]
    counts = [end - begin for begin, end in planned]
    if sum(counts) != total:
        counts = shares(total, counts if sum(counts) else [1] * len(counts))
    ends = [sum(counts[: place + 1]) for place in range(len(counts))]
    return [(end - count, end) for count, end in zip(counts, ends, strict=True)]
