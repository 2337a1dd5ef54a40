"""Fits the costs of operations (`predict.op_cost`) to measured times. Loads no torch.

The datasheet is the prior of a family's roofline (`roofline_fit`). The lengths, amplitudes and
noise of its kernel maximise the marginal likelihood. If there are many points, only some are kept,
with weights that all points determine.

A family may instead take its cost from a reference, a machine that was measured for much longer
(`predict.reference`): the reference's cost times a factor.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainwright.estimator.fit.roofline_fit import DevicePrior, fit_roofline, sample_arrays
from trainwright.estimator.predict.datasheet import FAMILIES
from trainwright.estimator.predict.op_cost import (
    FamilyCost,
    Kernel,
    OpSample,
    Roofline,
    alike,
    log_point,
)
from trainwright.estimator.predict.step_work import cost_family

_MOST_POINTS = 800
_JITTER = 1e-6
LIKELIHOOD_POINTS = 120
"""Number of points for finding a kernel. More find a better one, but take time in n³."""


def _gathered(samples: Sequence[OpSample]) -> list[OpSample]:
    """Merge samples of the same operation at nearly the same sizes into their mean."""
    groups: dict[tuple[str, tuple[int, ...]], list[OpSample]] = {}
    for one in samples:
        groups.setdefault((one.kind, one.nearly), []).append(one)
    made = []
    for members in groups.values():
        if len(members) == 1:
            made.append(members[0])
            continue
        count = sum(one.count for one in members)
        seconds = math.exp(sum(one.count * math.log(one.seconds) for one in members) / count)
        made.append(members[0].model_copy(update={"seconds": seconds, "count": count}))
    return made


def _spread(samples: Sequence[OpSample]) -> list[int]:
    """The indices of at most _MOST_POINTS samples, evenly from expensive to cheap in each kind.

    Frequent kinds lose samples; a rare kind keeps all, because nothing else describes it.
    """
    kinds: dict[str, list[int]] = {}
    for place, one in enumerate(samples):
        kinds.setdefault(one.kind, []).append(place)
    most = max(map(len, kinds.values()))
    while most > 1 and sum(min(len(places), most) for places in kinds.values()) > _MOST_POINTS:
        most -= 1
    found = []
    for places in kinds.values():
        ordered = sorted(places, key=lambda place: -samples[place].seconds * samples[place].count)
        kept = min(most, len(ordered))
        found += [ordered[number * len(ordered) // kept] for number in range(kept)]
    return found


def fit_family(
    samples: Sequence[OpSample],
    center: Any,
    kernel: Kernel | None = None,
    likelihood_points: int = LIKELIHOOD_POINTS,
) -> FamilyCost:
    """The cost of a family from its samples, with the given kernel or the best one.

    `center` is the mean of its roofline's prior (`DevicePrior.center`).
    """
    import numpy as np

    names = tuple(sorted({name for one in samples for name in one.dims}))
    gathered = _gathered(samples)
    flops, moved, seconds, points = _arrays(gathered, names)
    roofline = fit_roofline(flops, moved, seconds, center)
    off = np.log(seconds / roofline(flops, moved))
    kinds = tuple(one.kind for one in gathered)
    if kernel is None or len(kernel.lengths) != points.shape[1]:
        kernel = _likeliest(points, off, alike(kinds, kinds), likelihood_points)
    places = _spread(gathered)
    return FamilyCost(
        roofline=roofline,
        dims=names,
        kernel=kernel,
        kinds=tuple(kinds[place] for place in places),
        points=tuple(tuple(round(float(value), 5) for value in points[place]) for place in places),
        weights=tuple(_weights(kernel, points, kinds, off, places).tolist()),
    )


def _weights(
    kernel: Kernel, points: Any, kinds: Sequence[str], off: Any, places: Sequence[int]
) -> Any:
    """The process's weights at `places`, from its values `off` at all points: shape (places,).

    They minimise |off − K w|² / noise² + wᵀ K' w, with K between all points and the places, and K'
    among the places. If the places are all points, (K' + noise²) w = off. Source: Rasmussen and
    Williams, 2006, section 8.3.1 (subset of regressors).
    """
    import numpy as np

    kept, kept_kinds = points[places], tuple(kinds[place] for place in places)
    variance = kernel.noise**2 + _JITTER
    among = kernel(kept, kept, alike(kept_kinds, kept_kinds))
    if len(places) == len(off):
        return np.linalg.solve(among + variance * np.eye(len(off)), off[places])
    rows = kernel(points, kept, alike(kinds, kept_kinds))
    penalty = variance * (among + _JITTER * np.trace(among) * np.eye(len(places)))
    return np.linalg.solve(rows.T @ rows + penalty, rows.T @ off)


class ScaledReference:
    """A reference's costs, scaled to this machine by its samples."""

    def __init__(self, reference: Mapping[str, FamilyCost], samples: Sequence[OpSample]) -> None:
        self._reference = reference
        self._of_it: dict[int, float] = {}
        for family, members in _by_family(samples).items():
            if family in reference:
                cost = reference[family]
                flops, moved, seconds, points = _arrays(members, cost.dims)
                predicted = cost.predict([one.kind for one in members], flops, moved, points)[0]
                self._of_it |= dict(
                    zip(map(id, members), (seconds / predicted).tolist(), strict=True)
                )

    def __contains__(self, family: str) -> bool:
        return family in self._reference

    def cost(self, family: str, samples: Sequence[OpSample]) -> FamilyCost:
        """The reference's cost times the median ratio of these samples to it.

        Expensive samples count more. They must be among the samples given at construction.
        """
        ordered = sorted((self._of_it[id(one)], math.sqrt(one.seconds)) for one in samples)
        below = list(itertools.accumulate(weight for _, weight in ordered))
        factor = ordered[bisect.bisect_left(below, below[-1] / 2)][0]
        known = self._reference[family]
        slower = Roofline(
            latency_s=factor * known.roofline.latency_s,
            flops_per_s=known.roofline.flops_per_s / factor,
            bytes_per_s=known.roofline.bytes_per_s / factor,
        )
        return known.model_copy(update={"roofline": slower})


def _by_family(samples: Sequence[OpSample]) -> dict[str, list[OpSample]]:
    found: dict[str, list[OpSample]] = {}
    for one in samples:
        found.setdefault(cost_family(one.family, one.dims), []).append(one)
    return found


def _arrays(samples: Sequence[OpSample], names: Sequence[str]) -> tuple[Any, Any, Any, Any]:
    """FLOPs, bytes and seconds, shape (n,), and the points, shape (n, 2 + names)."""
    import numpy as np

    points = np.array([log_point(one.flops, one.bytes, one.dims, names) for one in samples])
    return *sample_arrays(samples), points


def _likeliest(points: Any, off: Any, alike: Any, most: int) -> Kernel:
    """The kernel with the highest marginal likelihood on some of the points.

    Its weak prior has lengths about e and noise about 0.14.
    """
    import numpy as np
    from scipy.optimize import minimize

    varies = points.std(0) > 1e-6
    part = np.random.default_rng(0).permutation(len(off))[:most]
    points, off, alike = points[part], off[part], alike[np.ix_(part, part)]

    def made(logs: Any) -> Kernel:
        values = np.exp(np.clip(logs, -6, 6))
        lengths = iter(values[:-3].tolist())
        return Kernel(
            lengths=tuple(next(lengths) if one else None for one in varies),
            family_sigma=float(values[-3]),
            kind_sigma=float(values[-2]),
            noise=float(values[-1]),
        )

    def loss(logs: Any) -> float:
        kernel = made(logs)
        matrix = kernel(points, points, alike) + (kernel.noise**2 + _JITTER) * np.eye(len(off))
        try:
            lower = np.linalg.cholesky(matrix)
        except np.linalg.LinAlgError:
            return 1e9
        whitened = np.linalg.solve(lower, off)
        prior = ((logs[:-3] - 1) ** 2).sum() / 8 + (
            (logs[-3:] - np.array([-0.7, -0.7, -2.0])) ** 2
        ).sum() / 8
        return float(0.5 * whitened @ whitened + np.log(np.diag(lower)).sum() + prior)

    start = np.array([*np.ones(int(varies.sum())), -0.7, -0.7, -2.0])
    return made(minimize(loss, start, method="L-BFGS-B", options={"maxiter": 15}).x)


def device_prior(samples: Sequence[OpSample], device_type: str, threads: int) -> DevicePrior:
    """The prior of every family's roofline on a device, updated by samples."""
    return DevicePrior(device_type, threads).given(_by_family(samples))


def fit_families(
    samples: Sequence[OpSample],
    prior: DevicePrior,
    like: Mapping[str, FamilyCost] | None = None,
    scaled: ScaledReference | None = None,
    likelihood_points: int = LIKELIHOOD_POINTS,
) -> dict[str, FamilyCost]:
    """The cost of every family: a scaled reference's, one fitted to its samples, or the prior's.

    `like` are costs whose kernels are used, instead of finding them again.
    """
    kernels = {family: cost.kernel for family, cost in (like or {}).items()}
    found = {family: prior.unmeasured(family) for family in FAMILIES}
    for family, members in sorted(_by_family(samples).items()):
        if scaled is not None and family in scaled:
            found[family] = scaled.cost(family, members)
        else:
            center, kernel = prior.center(family), kernels.get(family)
            found[family] = fit_family(members, center, kernel, likelihood_points)
    return found
