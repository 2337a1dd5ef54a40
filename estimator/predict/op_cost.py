"""The cost of an operation on a device: its family's roofline and measured deviations from it.

Arithmetic; loads no torch.

    t = roofline(flops, bytes) · exp(r(x))        roofline = a + max(flops / F, bytes / B)

r is the mean of a Gaussian process over x, the logarithms of FLOPs, bytes and the operation's
sizes. Near operations that calibration has measured it follows these; far from all of them it is
zero, and the roofline remains. Its kernel is Matérn's of order 3/2, M, over the distance d with a
length for each size. It has a part for the family and a part for the kind (`aten.exp` and
`aten.add` are both elementwise). Lengths, amplitudes and noise maximise the marginal likelihood.

    k(x, y) = σ₁² M(d) + σ₂² [same kind] M(d / 2)        M(d) = (1 + √3 d) exp(−√3 d)

`fit.cost_fit` finds all of it. Source: Rasmussen and Williams, Gaussian Processes for Machine
Learning, 2006, equations 2.23, 4.17 and 5.8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from pydantic import model_validator

from trainwright.estimator.frozen_model import FrozenModel
from trainwright.estimator.predict.step_work import FamilyWork

_MOST_S, _LEAST_RATE, _MOST_DEVIATION = 1e6, 1e-6, 1e3  # far beyond any device
_FURTHEST = 2.5  # largest |r|: a cost differs from its roofline by at most a factor of e^2.5


class OpSample(FrozenModel):
    """A timed operation of a step: `seconds` of one call, the mean over `count` similar calls."""

    kind: str
    family: str
    dtype: str
    flops: float
    bytes: float
    dims: dict[str, float]
    count: int
    seconds: float

    @cached_property
    def nearly(self) -> tuple[int, ...]:
        """A key that operations of nearly the same sizes share."""
        sizes = (self.flops, self.bytes, *(self.dims[name] for name in sorted(self.dims)))
        return tuple(round(4 * math.log1p(size)) for size in sizes)


class Roofline(FrozenModel):
    """t = latency_s + max(flops / flops_per_s, bytes / bytes_per_s)."""

    latency_s: float
    flops_per_s: float
    bytes_per_s: float

    def __call__(self, flops: Any, moved: Any) -> Any:
        """Seconds, for numbers or arrays."""
        import numpy as np

        return self.latency_s + np.maximum(flops / self.flops_per_s, moved / self.bytes_per_s)


class Kernel(FrozenModel):
    """The process's parameters: a length for each coordinate, two amplitudes, and the noise.

    A coordinate that does not vary has the length None.
    """

    lengths: tuple[float | None, ...]
    family_sigma: float
    kind_sigma: float
    noise: float

    def __call__(self, left: Any, right: Any, alike: Any) -> Any:
        """k between two sets of points. Shapes: (n, d), (m, d), (n, m); (n, m).

        `alike` says whether two points have the same kind.
        """
        import numpy as np

        used = [place for place, length in enumerate(self.lengths) if length is not None]
        scale = np.array([1 / (self.lengths[place] or 1.0) for place in used])
        one, two = left[:, used] * scale, right[:, used] * scale
        # √3 d, computed in one array: a large step's elementwise operations need half a million
        # places.
        distance = one @ (-6 * two.T)
        distance += 3 * (one**2).sum(1)[:, None]
        distance += 3 * (two**2).sum(1)[None, :]
        np.sqrt(np.maximum(distance, 0.0, out=distance), out=distance)
        half = np.exp(-0.5 * distance)
        near = self.family_sigma**2 * half**2
        near *= 1 + distance  # M(d)
        half *= 1 + 0.5 * distance  # M(d / 2)
        half *= self.kind_sigma**2 * alike
        near += half
        return near


class FamilyCost(FrozenModel):
    """The cost of a family's operations.

    `weights` are the process's weights at its `points`: K⁻¹ r.
    """

    roofline: Roofline
    dims: tuple[str, ...]
    kernel: Kernel
    kinds: tuple[str, ...]
    points: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]

    @model_validator(mode="after")
    def _can_be(self) -> FamilyCost:
        """Rooflines and kernels are checked here, because a fit also tries impossible ones."""
        line, kernel = self.roofline, self.kernel
        deviations = (kernel.family_sigma, kernel.kind_sigma, kernel.noise)
        possible = (
            0 <= line.latency_s <= _MOST_S
            and min(line.flops_per_s, line.bytes_per_s) >= _LEAST_RATE
        )
        if not possible or not all(0 <= one <= _MOST_DEVIATION for one in deviations):
            raise ValueError("latency, rates and deviations of a possible device")
        return self

    @cached_property
    def _arrays(self) -> tuple[Any, Any, dict[str, int], Any]:
        """`points`, `weights`, a number for each kind, and the number of each point's kind."""
        import numpy as np

        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(self.kinds))}
        places = np.array([numbers[kind] for kind in self.kinds])
        return np.array(self.points), np.array(self.weights), numbers, places

    def predict(self, kinds: Sequence[str], flops: Any, moved: Any, points: Any) -> tuple[Any, Any]:
        """Seconds of each operation, and the standard deviation of the logarithm.

        Shapes: (n,), (n,), (n,), (n, 2 + dims) as `log_point` makes them; (n,), (n,). The deviation
        is zero for operations that were measured. It is the process's, given only the nearest
        point: k(x, x) − k(x, p)² / (k(p, p) + noise²), which is never too small.
        """
        import numpy as np

        prior = self.kernel.family_sigma**2 + self.kernel.kind_sigma**2
        if not self.points:
            return self.roofline(flops, moved), np.full(len(kinds), math.sqrt(prior))
        seen, weights, numbers, places = self._arrays
        alike = np.array([numbers.get(kind, -1) for kind in kinds])[:, None] == places[None, :]
        near = self.kernel(points, seen, alike)
        seconds = self.roofline(flops, moved) * np.exp(
            np.clip(near @ weights, -_FURTHEST, _FURTHEST)
        )
        left = prior - near.max(axis=1) ** 2 / (prior + self.kernel.noise**2)
        return seconds, np.sqrt(np.maximum(left, 0.0))


def log_point(
    flops: float, moved: float, dims: Mapping[str, float], names: Sequence[str]
) -> list[float]:
    """The coordinates of an operation within its family."""
    return [
        math.log1p(flops),
        math.log1p(moved),
        *(math.log1p(dims.get(name, 0.0)) for name in names),
    ]


def alike(left: Sequence[str], right: Sequence[str]) -> Any:
    """Whether kinds are equal, shape (left, right). Numbers compare faster than words."""
    import numpy as np

    numbers = {kind: number for number, kind in enumerate({*left, *right})}
    one, two = (np.array([numbers[kind] for kind in kinds]) for kinds in (left, right))
    return one[:, None] == two[None, :]


def times(
    costs: Mapping[str, FamilyCost], family: str, work: FamilyWork, flops_factor: float = 1.0
) -> tuple[Any, Any]:
    """Seconds of each group of similar operations, and the deviation of the logarithm.

    See `FamilyCost.predict`. An unknown family costs the same as elementwise operations by their
    roofline, with a deviation of 1, a factor of e.
    """
    import numpy as np

    flops = flops_factor * work.flops
    cost = costs.get(family)
    if cost is None:
        other = costs.get("elementwise") or next(iter(costs.values()))
        return work.counts * other.roofline(flops, work.bytes), np.ones(len(work.kinds))
    seconds, deviation = cost.predict(
        work.kinds, flops, work.bytes, work.points(cost.dims, flops_factor)
    )
    return work.counts * seconds, deviation
