"""Mixed-integer linear programs of the choice of what to recompute, solved by HiGHS."""

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
