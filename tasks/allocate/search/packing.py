"""Packs ranks of several kinds onto machines that the kinds share, using few machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainwright.tasks.allocate.search.collective_bound import CollectiveBound


def pack(by_kind: Any, low: Any, high: Any, room: CollectiveBound) -> Any | None:
    """Ranks by group, from `low` to `high`, that add up to `by_kind` and fit on the sites.

    `room` says how many ranks a site holds. Returns None if there are no such numbers. Sites are
    filled greedily: first those whose machines hold the most of the requested ranks, with the
    scarcest kinds first, so that few machines are used. If a rank is left over, a maximum flow
    decides.
    """
    import numpy as np

    holds, site_of, kind_of = room.holds, room.topology.site_of, room.topology.kind_of
    counts = low.copy()
    left = by_kind - np.bincount(kind_of, low, len(by_kind))
    if (left < 0).any() or (np.bincount(kind_of, high - low, len(by_kind)) < left).any():
        return None
    spare = holds - np.bincount(site_of, low, len(holds))
    groups = np.flatnonzero((high > low) & (left[kind_of] > 0) & (spare[site_of] > 0))
    free = (high - low)[groups]
    wanted = np.minimum(free, left[kind_of[groups]])
    fits = np.minimum(np.bincount(site_of[groups], wanted, len(holds)), spare) / room.machines
    slack = np.bincount(kind_of[groups], free, len(by_kind)) - left
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
    return _flow(by_kind, low, high, room) if missing else counts


def _flow(by_kind: Any, low: Any, high: Any, room: CollectiveBound) -> Any | None:
    """The same, by a maximum flow from source through kinds and sites to sink."""
    import numpy as np
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    site_of, kind_of = room.topology.site_of, room.topology.kind_of
    kinds, sites = len(by_kind), len(room.holds)
    left = by_kind - np.bincount(kind_of, low, kinds)
    spare = room.holds - np.bincount(site_of, low, sites)
    if (spare < 0).any():
        return None
    source, sink, first = 0, kinds + sites + 1, kinds + 1

    def edges(*parts: Sequence[int] | Any) -> Any:
        """From source to kinds, from kinds to sites (a group each), from sites to sink."""
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
