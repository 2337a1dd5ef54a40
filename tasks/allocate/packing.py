"""Ranks of several kinds onto machines that kinds share: counts by group from counts by kind, on few machines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def pack(by_kind: Any, low: Any, high: Any, holds: Any, site_of: Any, kind_of: Any) -> Any | None:
    """Counts by group, between `low` and `high`, that sum up to these by kind and fit on the sites. None where there are none.

    `holds` is how many ranks a site holds; `site_of` and `kind_of` are those of each group. Sites are filled one after the other,
    the roomiest first and with the scarcest kinds first, so that few machines are part empty; where that strands a rank, a
    maximum flow decides.
    """
    import numpy as np

    counts = low.copy()
    left = by_kind - np.bincount(kind_of, low, len(by_kind))
    if (left < 0).any():
        return None
    spare = holds - np.bincount(site_of, low, len(holds))
    groups = np.flatnonzero((high > low) & (left[kind_of] > 0) & (spare[site_of] > 0))
    room = (high - low)[groups]
    wanted = np.minimum(room, left[kind_of[groups]])
    fits = np.minimum(np.bincount(site_of[groups], wanted, len(holds)), spare)
    slack = np.bincount(kind_of[groups], room, len(by_kind)) - left
    order = groups[np.lexsort((groups, slack[kind_of[groups]], site_of[groups], -fits[site_of[groups]]))]
    for place in order.tolist():
        kind, site = kind_of[place], site_of[place]
        taken = min(left[kind], high[place] - counts[place], spare[site])
        if taken > 0:
            counts[place] += taken
            left[kind] -= taken
            spare[site] -= taken
            if not left.any():
                break
    return counts if not left.any() else _flow(by_kind, low, high, holds, site_of, kind_of)


def _flow(by_kind: Any, low: Any, high: Any, holds: Any, site_of: Any, kind_of: Any) -> Any | None:
    """The same by a maximum flow: source, kinds, sites, sink."""
    import numpy as np
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    kinds, sites = len(by_kind), len(holds)
    left = by_kind - np.bincount(kind_of, low, kinds)
    spare = holds - np.bincount(site_of, low, sites)
    if (spare < 0).any():
        return None
    source, sink, first = 0, kinds + sites + 1, kinds + 1

    def edges(*parts: Sequence[int] | Any) -> Any:
        return np.concatenate([np.broadcast_to(part, size) for part, size in zip(parts, (kinds, len(low), sites), strict=True)])

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
