"""Learns from whole steps how far the costs of separately timed operations are off within a step.

Loads no torch. With t̂ the corrected sum of a step's operations i, of T_i seconds each, and c the
correction's scale,

    ln t − ln t̂ = Σ_i s_i δ(x_i) + ε        s_i = c T_i / t̂

δ is a Gaussian process over each family's operations, with the kernel of `predict.op_cost` at its
own amplitude. Its values are found at some of the family's points (Quiñonero-Candela and Rasmussen,
A unifying view of sparse approximate Gaussian process regression, 2005, section 4: subset of
regressors). Its mean is a sum of kernels at these points, as the cost's own mean is, so it is added
to their weights. Steps with large errors, such as those that another program disturbed, count less
(Huber's weights).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.estimator.predict.op_cost import FamilyCost, alike
from trainwright.estimator.predict.step_work import FamilyWork

_SIGMA = 0.3  # of δ
_NOISE = 0.08  # of ε, besides the error of a step's measurement
_PLACES = 60  # of a family
_SURE = 1.5  # deviations of ε beyond which a step counts less
_ROUNDS = 5
_JITTER = 1e-4


@dataclass(frozen=True)
class _Family:
    """The places of δ's values, and the factor of its kernel."""

    places: Any  # numbers of the family's points
    points: Any
    kinds: tuple[str, ...]
    factor: float


class WholeSteps:
    """The places of δ for given costs, and how to fit δ to steps."""

    def __init__(self, costs: Mapping[str, FamilyCost]) -> None:
        import numpy as np
        from scipy.linalg import block_diag

        self._costs = costs
        self._families = {name: _known(cost) for name, cost in costs.items() if cost.points}
        self._inverse = block_diag(
            *(
                np.linalg.inv(
                    self._kernel(name, one.points, one.kinds)
                    + _JITTER * _SIGMA**2 * np.eye(len(one.kinds))
                )
                for name, one in self._families.items()
            )
        )

    def row(self, work: Mapping[str, FamilyWork], seconds: Mapping[str, Any]) -> Any:
        """Σ_i s_i k(x_i, places) of a step; `seconds` are the s_i. Shape: (places,)."""
        import numpy as np

        parts = []
        for name, one in self._families.items():
            if name in work:
                points = work[name].points(self._costs[name].dims)
                parts.append(seconds[name] @ self._kernel(name, points, work[name].kinds))
            else:
                parts.append(np.zeros(len(one.kinds)))
        return np.concatenate(parts)

    def learn(self, rows: Any, off: Any, noise: Any) -> Any:
        """The weights of δ at its places, from the steps' rows, ln t − ln t̂, and noise.

        Shapes: (steps, places), (steps,), (steps,); (places,).
        """
        import numpy as np

        half = self._inverse @ rows.T
        covariance = rows @ half
        variance = _NOISE**2 + np.asarray(noise) ** 2
        trust = np.ones(len(off))
        for _ in range(_ROUNDS):
            alpha = np.linalg.solve(covariance + np.diag(variance / trust), off)
            left = np.abs(off - covariance @ alpha) / np.sqrt(variance)
            trust = np.minimum(1.0, _SURE / np.maximum(left, 1e-9))
        return half @ alpha

    def taught(self, weights: Any) -> dict[str, FamilyCost]:
        """The costs with δ added."""
        import numpy as np

        found, start = dict(self._costs), 0
        for name, one in self._families.items():
            cost = self._costs[name]
            own = np.array(cost.weights)
            own[one.places] += one.factor * weights[start : start + len(one.kinds)]
            found[name] = FamilyCost(
                roofline=cost.roofline,
                dims=cost.dims,
                kernel=cost.kernel,
                kinds=cost.kinds,
                points=cost.points,
                weights=tuple(own.tolist()),
            )
            start += len(one.kinds)
        return found

    def _kernel(self, name: str, points: Any, kinds: Sequence[str]) -> Any:
        one = self._families[name]
        return one.factor * self._costs[name].kernel(points, one.points, alike(kinds, one.kinds))


def _known(cost: FamilyCost) -> _Family:
    import numpy as np

    places = np.arange(0, len(cost.points), math.ceil(len(cost.points) / _PLACES))
    prior = cost.kernel.family_sigma**2 + cost.kernel.kind_sigma**2
    return _Family(
        places=places,
        points=np.array(cost.points)[places],
        kinds=tuple(cost.kinds[place] for place in places),
        factor=_SIGMA**2 / prior,
    )
