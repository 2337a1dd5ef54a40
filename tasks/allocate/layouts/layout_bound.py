"""A planning problem whose least value is below the value of every layout, for one global batch.

With b_r a rank's samples and x_lr its part of the rows of layer l, as a part of the joint batch B,
a layout's rank r computes for at least

    F_r + o_r · b_r + Σ_l d_lr · x_lr        Σ_r b_r = Σ_r x_lr = B        (l may be sharded)

F_r and o_r are a line below the layers that are never sharded, without the part of the update that
sharded layers divide, and d_lr is the least time for a sample of layer l. For weights γ that sum to
1, y_r = γ_0 · b_r + Σ_l γ_l · x_lr sums to B, and the rank computes for at least

    F_r + y_r · min(o_r / γ_0, d_lr / γ_l)

whatever its rows are. The problem divides y in whole samples, so that a rank has up to one sample
more: its curve has one sample less. Memory, limits and windows do not bind; gradients of layers
that may be kept equal otherwise are not sent. `planning` lets no step be shorter than its computing
or its sums, max(T, C); in the problem, it takes T + BACKWARD · (C − T) for C > T, which is less.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainwright.estimator.curves import Affine, DeviceCurve, Knots
from trainwright.estimator.predict.communication import GRADIENT_BUCKET_BYTES
from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.layouts.permitted import why_not
from trainwright.tasks.allocate.plan.configuration import Limits
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.plan.kinds import median_times
from trainwright.tasks.allocate.plan.overlap import BACKWARD
from trainwright.tasks.allocate.plan.topology import Topology
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.layout import Sync

_LEAST_S = 1e-12
_MOST_SIZES = 4096


def bounding(problem: PlanningProblem, syncs: Sequence[Sync], batch: int) -> PlanningProblem:
    """The problem, if layers may be summed or kept equal in these ways."""
    model = problem.model
    estimate = model.estimate
    used = Counter(estimate.curves.index(model.kind(device).curve) for device in problem.devices)
    costs = {at: _rank_cost(estimate.curves[at], estimate.layers, syncs, batch) for at in used}
    slopes = _slopes(costs, used)
    curves = [
        _bounding(curve, costs[at].fixed, slopes[at], batch, costs[at].rows)
        if at in costs
        else curve
        for at, curve in enumerate(estimate.curves)
    ]
    lower = estimate.model_copy(
        # Without layers, sums may overlap BACKWARD of the step.
        update={"gradient_bytes": _sent_bytes(estimate, syncs), "curves": curves, "layers": []}
    )
    eased = CostModel(model.job, model.pool, lower, model.data)
    return replace(
        problem,
        model=eased,
        topology=Topology(eased, problem.devices),
        limits=Limits(math.inf, math.inf),
    )


def may_be(layer: LayerFacts, syncs: Sequence[Sync]) -> bool:
    """Whether a layer may be kept equal in one of these ways."""
    return bool(layer.parameters) and any(why_not(layer, sync) is None for sync in syncs)


def _sent_bytes(estimate: Estimate, syncs: Sequence[Sync]) -> float:
    """Gradients of which the sums take at most BACKWARD of those of every layout.

    They end with a bucket of one byte. Times that are rounded up to cycles are not in proportion.
    """
    layers = estimate.layers
    total = sum(one.parameter_bytes for one in layers)
    left = sum(one.parameter_bytes for one in layers if not may_be(one, syncs))
    sent = estimate.gradient_bytes * (left / total if total else 1.0)
    full = max(0, math.floor(BACKWARD * sent / GRADIENT_BUCKET_BYTES) - 2)
    return (0 if estimate.cycle_s else full * GRADIENT_BUCKET_BYTES) + min(1.0, sent)


@dataclass(frozen=True)
class _RankCost:
    """Least seconds that a device computes in a step."""

    fixed: float
    others: float
    """for a sample, in layers that are never sharded"""
    rows: tuple[float, ...]
    """for a sample, in each layer that may be"""


def _rank_cost(
    curve: DeviceCurve, layers: Sequence[LayerFacts], syncs: Sequence[Sync], batch: int
) -> _RankCost:
    import numpy as np

    sizes: Any = np.unique(np.geomspace(1, batch, min(batch, _MOST_SIZES)).round())
    if batch <= _MOST_SIZES:
        sizes = np.arange(1.0, batch + 1)
    median = median_times(curve, sizes)
    loop = 0 * sizes if curve.loop_s is None else _at(curve.loop_s, sizes)
    scale = _scale(curve, sizes, median - loop)
    least, most = float(scale.min()), float(scale.max())
    facts = {one.name: one for one in layers}
    others, rows = 0 * sizes, []
    for one in curve.layers:
        parts, layer = [one.forward, one.input_gradient, one.weight_gradient], facts.get(one.name)
        if layer is not None and "rows" in syncs and may_be(layer, ["rows"]):
            rows.append(least * sum(part.per_sample for part in parts))
            continue
        if layer is not None and "factors" in syncs and may_be(layer, ["factors"]):
            # Its weight gradient is computed once, for all micro-batches and ranks together.
            others = others + least * parts.pop().per_sample * sizes
        others = others + scale * sum(_at(part, sizes) for part in parts)
    fixed, slope = _line_below(sizes, np.minimum(others + loop, median))
    cut = sum(_elements(one) for one in layers if "rows" in syncs and may_be(one, ["rows"]))
    divided = most * curve.update(batch) * cut / max(1, sum(map(_elements, layers)))
    update_s = least * curve.update(1) - divided
    return _RankCost(max(0.0, fixed + update_s), slope, tuple(rows))


def _scale(curve: DeviceCurve, sizes: Any, step_s: Any) -> Any:
    """The factor of `DeviceCurve.layer_seconds` at each batch size: a numpy array."""
    import numpy as np

    total = 0 * sizes + _at(curve.update, sizes)
    for one in curve.layers:
        for part in (one.forward, one.input_gradient, one.weight_gradient):
            total = total + _at(part, sizes)
    none = np.zeros_like(total)
    return np.divide(np.maximum(0.0, step_s), total, out=none, where=total > 0)


def _at(line: Affine, sizes: Any) -> Any:
    return line.fixed + line.per_sample * sizes


def _elements(layer: LayerFacts) -> int:
    return sum(layer.parameters.values())


def _line_below(sizes: Any, values: Any) -> tuple[float, float]:
    """Fixed part and slope, neither negative, of a line below all points."""
    slope = 0.0
    if len(sizes) > 1:
        slope = max(0.0, float((values[-1] - values[0]) / (sizes[-1] - sizes[0])))
    fixed = float((values - slope * sizes).min())
    return (fixed, slope) if fixed >= 0 else (0.0, float((values / sizes).min()))


def _slopes(costs: Mapping[int, _RankCost], used: Mapping[int, int]) -> dict[int, float]:
    """Least seconds for a sample of y, by curve; of two choices of γ, the one that bounds better.

    `used` counts the devices of each curve.
    """
    parts = {at: (cost.others, *cost.rows) for at, cost in costs.items()}
    alike = [one for one in parts.values() if sum(one) > 0]
    weights = [
        sum(one[place] / sum(one) for one in alike) / max(1, len(alike))
        for place in range(max(map(len, parts.values()), default=0))
    ]

    def of(gamma: Sequence[float]) -> dict[int, float]:
        return {
            at: min(
                (one / weight for one, weight in zip(each, gamma, strict=True) if weight > 0),
                default=0.0,
            )
            for at, each in parts.items()
        }

    def together(slopes: Mapping[int, float]) -> float:
        return sum(used[at] / max(_LEAST_S, slope) for at, slope in slopes.items())

    only_others = of([1.0, *[0.0] * (len(weights) - 1)])
    return min(of(weights), only_others, key=together)


def _bounding(
    curve: DeviceCurve, fixed: float, slope: float, batch: int, rows: Sequence[float]
) -> DeviceCurve:
    """A curve of these seconds, without memory."""
    most, lost = max(2, batch), 1 if rows else 0
    values = tuple(max(_LEAST_S, fixed + slope * (size - lost)) for size in (1, most))
    nothing = Affine(fixed=0.0, per_sample=0.0)
    return curve.model_copy(
        update={
            "time_knots": Knots(sizes=(1, most), values=values),
            "loop_s": None,
            "peak_memory_bytes": nothing,
            "memory_knots": None,
            "safe_memory_knots": None,
            "process_bytes": 0.0,
            "memory_limit_bytes": None,
            "most_batch_size": None,
        }
    )
