"""Integer programs of the choice of what to recompute: solved by HiGHS, or greedily."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

GAP = 5e-3
"""The relative gap within which HiGHS proves a choice to be the best."""
SLOPE = 0.01
"""Of modules that cost the same, the first ones are chosen: the last cost so much more."""


def solved(
    costs: Any, whole: Any, bounds: Any, constraints: Sequence[Any], most_nodes: int
) -> NDArray[Any] | None:
    """The variables for which costs · x is least; None: none were found within `most_nodes`.

    `whole`: 1 for each variable that is an integer.
    """
    from scipy.optimize import milp

    found = milp(
        costs,
        integrality=whole,
        bounds=bounds,
        constraints=constraints,
        options={"mip_rel_gap": GAP, "node_limit": most_nodes},
    )
    x: NDArray[Any] | None = found.x
    return x


def greedy(
    costs: Any, rows: Any, limits: Any, exclusive: Sequence[Sequence[int]]
) -> list[int] | None:
    """The variables that are 1 in a good solution of rows · x <= limits; None: none was found.

    Takes the variable that removes most of what exceeds the limits for its cost, until nothing
    does; then drops the dearest ones that are not needed. `exclusive`: sets of variables of which
    only one may be 1.
    """
    import numpy as np

    free = np.ones(len(costs), dtype=bool)
    chosen: list[int] = []
    excess = -np.asarray(limits, dtype=float)
    while (over := np.maximum(excess, 0.0)).any():
        after = np.maximum(excess[:, None] + rows, 0.0).sum(axis=0)
        worth = np.where(free, (over.sum() - after) / costs, -np.inf)
        best = int(worth.argmax())
        if worth[best] <= 0:
            return None
        chosen.append(best)
        excess = excess + rows[:, best]
        for own in exclusive:
            if best in own:
                free[list(own)] = False
        free[best] = False
    by_cost = sorted(chosen, key=lambda place: -costs[place])
    while (needless := _first_needless(by_cost, rows, excess)) is not None:
        by_cost.remove(needless)
        excess = excess - rows[:, needless]
    return sorted(by_cost)


def _first_needless(chosen: Sequence[int], rows: Any, excess: Any) -> int | None:
    """The first of these variables without which the limits hold too."""
    return next((place for place in chosen if (excess <= rows[:, place]).all()), None)
