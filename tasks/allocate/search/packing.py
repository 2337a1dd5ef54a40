"""Ranks of several kinds onto machines that kinds share: counts by group from counts by kind, on few machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainwright.tasks.allocate.search.collective_floor import CollectiveFloor


def pack(by_kind: Any, low: Any, high: Any, floor: CollectiveFloor) -> Any | None:
    """Counts by group, between `low` and `high`, that sum up to these by kind and fit on the sites. None where there are none.

    `floor` says how many ranks a site holds. Sites are filled one after the other, those first whose machines hold most of what
    is asked for, and with the scarcest kinds first, so that few machines are used; where that strands a rank, a maximum flow
    decides.
    """
    import numpy as np

    holds, site_of, kind_of = floor.holds, floor.layout.site_of, floor.layout.kind_of
    counts = low.copy()
    left = by_kind - np.bincount(kind_of, low, len(by_kind))
    if (left < 0).any() or (np.bincount(kind_of, high - low, len(by_kind)) < left).any():
        return None
    spare = holds - np.bincount(site_of, low, len(holds))
    groups = np.flatnonzero((high > low) & (left[kind_of] > 0) & (spare[site_of] > 0))
    room = (high - low)[groups]
    wanted = np.minimum(room, left[kind_of[groups]])
    fits = np.minimum(np.bincount(site_of[groups], wanted, len(holds)), spare) / floor.machines
    slack = np.bincount(kind_of[groups], room, len(by_kind)) - left
    order = groups[
        np.lexsort((groups, slack[kind_of[groups]], site_of[groups], -fits[site_of[groups]]))
    ]
    waiting, places = left.tolist(), spare.tolist()
    missing = sum(waiting)
    columns = (order, kind_of[order], site_of[order], (high - low)[order])
    for group, kind, site, most in zip(*(column.tolist() for column in columns), strict=True):
        taken = min(waiting[kind], most, places[site])
        if taken > 0:
            counts[group] += taken
            waiting[kind] -= taken
            places[site] -= taken
            missing -= taken
            if not missing:
                return counts
    return _flow(by_kind, low, high, floor) if missing else counts


def _flow(by_kind: Any, low: Any, high: Any, floor: CollectiveFloor) -> Any | None:
    """The same by a maximum flow: source, kinds, sites, sink."""
    import numpy as np
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    site_of, kind_of = floor.layout.site_of, floor.layout.kind_of
    kinds, sites = len(by_kind), len(floor.holds)
    left = by_kind - np.bincount(kind_of, low, kinds)
    spare = floor.holds - np.bincount(site_of, low, sites)
    if (spare < 0).any():
        return None
    source, sink, first = 0, kinds + sites + 1, kinds + 1

    def edges(*parts: Sequence[int] | Any) -> Any:
        return np.concatenate(
            [
                np.broadcast_to(part, size)
                for part, size in zip(parts, (kinds, len(low), sites), strict=True)
            ]
        )

    graph = csr_array(
        (
            edges(left, high - low, spare).astype(np.int32),
            (
                edges([source], 1 + kind_of, first + np.arange(sites)),
                edges(1 + np.arange(kinds), first + site_of, [sink]),
            ),
        ),
        shape=(sink + 1, sink + 1),
    )
    found = maximum_flow(graph, source, sink)
    if found.flow_value < int(left.sum()):
        return None
    return low + np.asarray(found.flow[1 + kind_of, first + site_of]).ravel()
