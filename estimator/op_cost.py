"""What one operation costs on a device: a roofline for each family, and what was seen to differ from it. Loads no torch.

    t = roofline(flops, bytes) · exp(r(x))        roofline = a + max(flops / F, bytes / B)

r is the mean of a Gaussian process over x, the logarithms of FLOPs, bytes and the operation's sizes: where calibration has seen
alike operations r follows them, far from all of them it goes to zero and the roofline alone remains. Its kernel is Matérn's of
order 3/2, M, over the distance d with a length for each size, in two parts: one for the family and one for the kind (`aten.exp`
and `aten.add` are both elementwise). Lengths, amplitudes and noise are those of highest marginal likelihood.

    k(x, y) = σ₁² M(d) + σ₂² [same kind] M(d / 2)        M(d) = (1 + √3 d) exp(−√3 d)

Source: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, equations 2.23, 4.17, 5.8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from trainwright.estimator.work import Work, cost_family

_UNBOUND = 1e18  # a rate that no operation of the family is bound by, per second
_MOST_POINTS = 800
_MOST_FOR_LIKELIHOOD = 120
_MOST_S, _LEAST_RATE, _MOST_DEVIATION = 1e6, 1e-6, 1e3  # far beyond any device
_FURTHEST = 2.5  # of r: a cost is never told to be more than e^2.5 off its roofline


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class OpSample(_Value):
    """An operation as it was timed within a step: seconds of one call, the mean of `count` alike calls."""

    kind: str
    family: str
    dtype: str
    flops: float
    bytes: float
    dims: dict[str, float]
    count: int
    seconds: float


class Roofline(_Value):
    """t = latency_s + max(flops / flops_per_s, bytes / bytes_per_s)."""

    latency_s: float
    flops_per_s: float
    bytes_per_s: float

    def __call__(self, flops: Any, moved: Any) -> Any:
        """Seconds; of numbers or of arrays."""
        import numpy as np

        return self.latency_s + np.maximum(flops / self.flops_per_s, moved / self.bytes_per_s)


class Kernel(_Value):
    """The process's parameters: a length for each coordinate (None: it does not vary), two amplitudes, the noise."""

    lengths: tuple[float | None, ...]
    family_sigma: float
    kind_sigma: float
    noise: float

    def __call__(self, left: Any, right: Any, alike: Any) -> Any:
        """Shapes: (n, d), (m, d), (n, m) whether two are of one kind; (n, m)."""
        import numpy as np

        used = [place for place, length in enumerate(self.lengths) if length is not None]
        scale = np.array([1 / (self.lengths[place] or 1.0) for place in used])
        one, two = left[:, used] * scale, right[:, used] * scale
        # √3 d, in one array: that of a large step's elementwise operations has half a million places.
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


class FamilyCost(_Value):
    """The cost of a family's operations. `weights` are those of the process at its `points`, K⁻¹ r."""

    roofline: Roofline
    dims: tuple[str, ...]
    kernel: Kernel
    kinds: tuple[str, ...]
    points: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]

    @model_validator(mode="after")
    def _can_be(self) -> FamilyCost:
        """Not of the roofline or the kernel themselves: a fit tries such on its way that nobody measures."""
        line, kernel = self.roofline, self.kernel
        deviations = (kernel.family_sigma, kernel.kind_sigma, kernel.noise)
        possible = 0 <= line.latency_s <= _MOST_S and min(line.flops_per_s, line.bytes_per_s) >= _LEAST_RATE
        if not possible or not all(0 <= one <= _MOST_DEVIATION for one in deviations):
            raise ValueError("latency, rates and deviations of a device that can be")
        return self

    @cached_property
    def _arrays(self) -> tuple[Any, Any, dict[str, int], Any]:
        """`points`, `weights`, a number for each kind, and the points' kinds by number."""
        import numpy as np

        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(self.kinds))}
        places = np.array([numbers[kind] for kind in self.kinds])
        return np.array(self.points), np.array(self.weights), numbers, places

    def predict(self, kinds: Sequence[str], flops: Any, moved: Any, points: Any) -> tuple[Any, Any]:
        """Seconds of each operation, and the standard deviation of their logarithm that comes of not having seen it.

        Shapes: (n,), (n,), (n,), (n, 2 + dims) as `log_point` makes them; (n,), (n,). The deviation is the process's, given only
        the nearest point that was seen: k(x, x) − k(x, p)² / (k(p, p) + noise²), which is never too small.
        """
        import numpy as np

        prior = self.kernel.family_sigma**2 + self.kernel.kind_sigma**2
        if not self.points:
            return self.roofline(flops, moved), np.full(len(kinds), math.sqrt(prior))
        seen, weights, numbers, places = self._arrays
        alike = np.array([numbers.get(kind, -1) for kind in kinds])[:, None] == places[None, :]
        near = self.kernel(points, seen, alike)
        seconds = self.roofline(flops, moved) * np.exp(np.clip(near @ weights, -_FURTHEST, _FURTHEST))
        left = prior - near.max(axis=1) ** 2 / (prior + self.kernel.noise**2)
        return seconds, np.sqrt(np.maximum(left, 0.0))


def log_point(flops: float, moved: float, dims: Mapping[str, float], names: Sequence[str]) -> list[float]:
    """Where an operation lies among others of its family."""
    return [math.log1p(flops), math.log1p(moved), *(math.log1p(dims.get(name, 0.0)) for name in names)]


def alike(left: Sequence[str], right: Sequence[str]) -> Any:
    import numpy as np

    numbers = {kind: number for number, kind in enumerate({*left, *right})}  # compared quicker than words
    one, two = (np.array([numbers[kind] for kind in kinds]) for kinds in (left, right))
    return one[:, None] == two[None, :]


def fit_roofline(flops: Any, moved: Any, seconds: Any, weights: Any) -> Roofline:
    """Latency and rates of least absolute logarithmic error, searched from the best that was seen."""
    import numpy as np
    from scipy.optimize import minimize

    flops_rate, bytes_rate = float((flops / seconds).max()), float((moved / seconds).max())

    def made(logs: Any) -> Roofline:
        a, f, b = (math.exp(min(max(value, -40.0), 42.0)) for value in logs)
        return Roofline(
            latency_s=a, flops_per_s=f if flops_rate else _UNBOUND, bytes_per_s=b if bytes_rate else _UNBOUND
        )

    def loss(logs: Any) -> float:
        return float((weights * np.abs(np.log(made(logs)(flops, moved) / seconds))).sum())

    start = [math.log(float(np.quantile(seconds, 0.05))), math.log(flops_rate or 1.0), math.log(bytes_rate or 1.0)]
    found = minimize(loss, start, method="Nelder-Mead", options={"maxiter": 300, "xatol": 1e-3, "fatol": 1e-3})
    return made(found.x)


def _gathered(samples: Sequence[OpSample]) -> list[OpSample]:
    """Samples of the same operation at nearly the same sizes as one, their mean; at most so many.

    Of kinds that are seen often some are left out, dear ones and cheap ones: of a rare kind nothing else tells.
    """
    groups: dict[tuple[str, tuple[int, ...]], list[OpSample]] = {}
    for one in samples:
        names = sorted(one.dims)
        sizes = tuple(round(4 * math.log1p(one.dims[name])) for name in names)
        groups.setdefault(
            (one.kind, (round(4 * math.log1p(one.flops)), round(4 * math.log1p(one.bytes)), *sizes)), []
        ).append(one)
    kinds: dict[str, list[OpSample]] = {}
    for members in groups.values():
        count = sum(one.count for one in members)
        seconds = math.exp(sum(one.count * math.log(one.seconds) for one in members) / count)
        kinds.setdefault(members[0].kind, []).append(members[0].model_copy(update={"seconds": seconds, "count": count}))
    most = max(map(len, kinds.values()))
    while most > 1 and sum(min(len(made), most) for made in kinds.values()) > _MOST_POINTS:
        most -= 1
    return [one for made in kinds.values() for one in _thinned(made, most)]


def _thinned(samples: list[OpSample], most: int) -> list[OpSample]:
    """So many of the samples at most, evenly from the dearest to the cheapest."""
    ordered = sorted(samples, key=lambda one: -one.seconds * one.count)
    kept = min(most, len(ordered))
    return [ordered[place * len(ordered) // kept] for place in range(kept)]


def fit_family(samples: Sequence[OpSample], kernel: Kernel | None = None) -> FamilyCost:
    """The cost of a family from its samples, with a kernel that is given or found."""
    import numpy as np

    names = tuple(sorted({name for one in samples for name in one.dims}))
    gathered = _gathered(samples)
    flops = np.array([one.flops for one in gathered])
    moved = np.array([one.bytes for one in gathered])
    seconds = np.array([one.seconds for one in gathered])
    roofline = fit_roofline(flops, moved, seconds, np.sqrt(seconds / seconds.mean()))
    points = np.array([log_point(one.flops, one.bytes, one.dims, names) for one in gathered])
    off = np.log(seconds / roofline(flops, moved))
    kinds = tuple(one.kind for one in gathered)
    if kernel is None or len(kernel.lengths) != points.shape[1]:
        kernel = _likeliest(points, off, alike(kinds, kinds))
    matrix = kernel(points, points, alike(kinds, kinds)) + (kernel.noise**2 + 1e-6) * np.eye(len(off))
    return FamilyCost(
        roofline=roofline,
        dims=names,
        kernel=kernel,
        kinds=kinds,
        points=tuple(tuple(round(float(value), 5) for value in row) for row in points),
        weights=tuple(float(value) for value in np.linalg.solve(matrix, off)),
    )


def _likeliest(points: Any, off: Any, alike: Any) -> Kernel:
    """The kernel of highest marginal likelihood on a part of the points, with a weak prior: lengths about e, noise about 0.14."""
    import numpy as np
    from scipy.optimize import minimize

    varies = points.std(0) > 1e-6
    part = np.random.default_rng(0).permutation(len(off))[:_MOST_FOR_LIKELIHOOD]
    points, off, alike = points[part], off[part], alike[np.ix_(part, part)]

    def made(logs: Any) -> Kernel:
        values = np.exp(np.clip(logs, -6, 6))
        lengths = iter(values[:-3].tolist())
        return Kernel(
            lengths=tuple(next(lengths) if one else None for one in varies),
            family_sigma=float(values[-3]), kind_sigma=float(values[-2]), noise=float(values[-1]),
        )  # fmt: skip

    def loss(logs: Any) -> float:
        kernel = made(logs)
        matrix = kernel(points, points, alike) + (kernel.noise**2 + 1e-6) * np.eye(len(off))
        try:
            lower = np.linalg.cholesky(matrix)
        except np.linalg.LinAlgError:
            return 1e9
        whitened = np.linalg.solve(lower, off)
        prior = ((logs[:-3] - 1) ** 2).sum() / 8 + ((logs[-3:] - np.array([-0.7, -0.7, -2.0])) ** 2).sum() / 8
        return float(0.5 * whitened @ whitened + np.log(np.diag(lower)).sum() + prior)

    start = np.array([*np.ones(int(varies.sum())), -0.7, -0.7, -2.0])
    return made(minimize(loss, start, method="L-BFGS-B", options={"maxiter": 15}).x)


def fit_families(samples: Sequence[OpSample], like: Mapping[str, FamilyCost] | None = None) -> dict[str, FamilyCost]:
    """A cost for every family in the samples, with the kernels of another fit where one is given."""
    by_family: dict[str, list[OpSample]] = {}
    for one in samples:
        by_family.setdefault(cost_family(one.family, one.dims), []).append(one)
    kernels = {family: cost.kernel for family, cost in (like or {}).items()}
    return {family: fit_family(members, kernels.get(family)) for family, members in sorted(by_family.items())}


def times(costs: Mapping[str, FamilyCost], family: str, work: Work, flops_factor: float = 1.0) -> tuple[Any, Any]:
    """Seconds of each group of alike operations, and the deviation of their logarithm (see `FamilyCost.predict`).

    An unknown family costs what elementwise operations do by their roofline, with a deviation of one: a factor of e.
    """
    import numpy as np

    flops = flops_factor * work.flops
    cost = costs.get(family)
    if cost is None:
        other = costs.get("elementwise") or next(iter(costs.values()))
        return work.counts * other.roofline(flops, work.bytes), np.ones(len(work.kinds))
    seconds, deviation = cost.predict(work.kinds, flops, work.bytes, work.points(cost.dims, flops_factor))
    return work.counts * seconds, deviation
