"""What one operation costs on a device: a roofline for each family, and what was seen to differ from it. Loads no torch.

    t = roofline(flops, bytes) · exp(r(x))        roofline = a + max(flops / F, bytes / B)

r is the mean of a Gaussian process over x, the logarithms of FLOPs, bytes and the operation's sizes: where calibration has seen alike
operations r follows them, far from all of them it goes to zero and the roofline alone remains. Its kernel has two parts, one for the
family and one for the kind (`aten.exp` and `aten.add` are both elementwise):

    k(x, y) = σ² exp(−|x − y|² / 2ℓ²) + σ² [same kind] exp(−|x − y|² / 8ℓ²)

(Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, eq. 2.23 and 5.8.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

_UNBOUND = 1e18  # a rate that no operation of the family is bound by, per second
_SIGMA2 = 0.25
_LENGTHS, _NOISES = (1.0, 2.0, 4.0), (0.05, 0.15, 0.4)
_MOST_POINTS = 400


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


class FamilyCost(_Value):
    """The cost of a family's operations. `weights` are those of the process at its `points`, K⁻¹ r."""

    roofline: Roofline
    dims: tuple[str, ...]
    length: float
    noise: float
    kinds: tuple[str, ...]
    points: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]

    def seconds(self, kinds: Sequence[str], flops: Any, moved: Any, points: Any) -> Any:
        """Seconds of each operation. Shapes: (n,), (n,), (n,), (n, 2 + dims) as `log_point` makes them."""
        import numpy as np

        base = self.roofline(flops, moved)
        if not self.points:
            return base
        known = np.array(self.points)
        kernel = _kernel(points, known, _alike(kinds, self.kinds), self.length)
        return base * np.exp(np.clip(kernel @ np.array(self.weights), -2.5, 2.5))


def log_point(flops: float, moved: float, dims: Mapping[str, float], names: Sequence[str]) -> list[float]:
    """Where an operation lies among others of its family."""
    return [math.log1p(flops), math.log1p(moved), *(math.log1p(dims.get(name, 0.0)) for name in names)]


def _alike(left: Sequence[str], right: Sequence[str]) -> Any:
    import numpy as np

    return np.array(left)[:, None] == np.array(right)[None, :]


def _kernel(left: Any, right: Any, alike: Any, length: float) -> Any:
    import numpy as np

    distance2 = (left**2).sum(1)[:, None] + (right**2).sum(1)[None, :] - 2 * left @ right.T
    near = np.exp(-np.maximum(distance2, 0.0) / (2 * length**2))
    return _SIGMA2 * (near + alike * np.sqrt(np.sqrt(near)))


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


def fit_family(samples: Sequence[OpSample]) -> FamilyCost:
    """The cost of a family from its samples; the process's length and noise are those of highest marginal likelihood."""
    import numpy as np

    names = tuple(sorted({name for one in samples for name in one.dims}))
    if len(samples) > _MOST_POINTS:  # the cheap ones matter least
        keep = np.random.default_rng(0).permutation(len(samples))[: _MOST_POINTS // 2]
        dear = sorted(range(len(samples)), key=lambda place: -samples[place].seconds * samples[place].count)
        chosen = dict.fromkeys([*dear[: _MOST_POINTS // 2], *keep.tolist()])
        samples = [samples[place] for place in chosen]
    flops = np.array([one.flops for one in samples])
    moved = np.array([one.bytes for one in samples])
    seconds = np.array([one.seconds for one in samples])
    roofline = fit_roofline(flops, moved, seconds, np.sqrt(seconds / seconds.mean()))
    points = np.array([log_point(one.flops, one.bytes, one.dims, names) for one in samples])
    residual = np.log(seconds / roofline(flops, moved))
    kinds = tuple(one.kind for one in samples)
    alike = _alike(kinds, kinds)
    best: tuple[float, float, float, Any] | None = None
    for length in _LENGTHS:
        kernel = _kernel(points, points, alike, length)
        for noise in _NOISES:
            try:
                lower = np.linalg.cholesky(kernel + noise**2 * np.eye(len(samples)))
            except np.linalg.LinAlgError:
                continue
            whitened = np.linalg.solve(lower, residual)
            likelihood = -0.5 * float(whitened @ whitened) - float(np.log(np.diag(lower)).sum())
            if best is None or likelihood > best[0]:
                best = (likelihood, length, noise, np.linalg.solve(lower.T, whitened))
    if best is None:
        return FamilyCost(roofline=roofline, dims=names, length=1.0, noise=1.0, kinds=(), points=(), weights=())
    return FamilyCost(
        roofline=roofline,
        dims=names,
        length=best[1],
        noise=best[2],
        kinds=kinds,
        points=tuple(tuple(round(float(value), 6) for value in row) for row in points),
        weights=tuple(float(value) for value in best[3]),
    )


def fit_families(samples: Sequence[OpSample]) -> dict[str, FamilyCost]:
    """A cost for every family in the samples."""
    by_family: dict[str, list[OpSample]] = {}
    for one in samples:
        by_family.setdefault(one.family, []).append(one)
    return {family: fit_family(members) for family, members in sorted(by_family.items())}


class Work(_Value):
    """The operations of one family in a step, for one batch size, ready for `FamilyCost.seconds`."""

    kinds: tuple[str, ...]
    counts: tuple[int, ...]
    flops: tuple[float, ...]
    bytes: tuple[float, ...]
    dims: tuple[dict[str, float], ...]


def times(costs: Mapping[str, FamilyCost], family: str, work: Work, flops_factor: float = 1.0) -> Any:
    """Seconds of each group of alike operations; an unknown family costs what elementwise operations do by their roofline."""
    import numpy as np

    counts = np.array(work.counts, dtype=float)
    flops, moved = flops_factor * np.array(work.flops), np.array(work.bytes)
    cost = costs.get(family)
    if cost is None:
        other = costs.get("elementwise") or next(iter(costs.values()))
        return counts * other.roofline(flops, moved)
    points = np.array([log_point(f, b, d, cost.dims) for f, b, d in zip(flops, moved, work.dims, strict=True)])
    return counts * cost.seconds(work.kinds, flops, moved, points)
