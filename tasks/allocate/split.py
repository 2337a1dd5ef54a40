"""How many samples each device gets, so that all finish together.

With t_r(b) = a_r + s_r·b, the real-valued optimum is the water level T with Σ (T − a_r)/s_r = B; the integer one is found
exactly by handing samples to whichever device finishes earliest with one more.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from trainwright.estimator.curves import Affine


def split_batch(total: int, curves: Sequence[Affine], limits: Sequence[int | None] | None = None) -> list[int] | None:
    """Samples by device: at least one each, `total` together, none above its limit; the largest t_r(b_r) is the least possible.

    None where that can't be: fewer samples than devices, or more than the limits hold. Ties go to the earlier device.
    """
    count = len(curves)
    bounds = [total if limit is None else limit for limit in limits] if limits else [total] * count
    if total < count or any(bound < 1 for bound in bounds) or sum(bounds) < total:
        return None
    batches = _below_level(total, curves, bounds)
    heap = [(curves[r](batches[r] + 1), r) for r in range(count) if batches[r] < bounds[r]]
    heapq.heapify(heap)
    for _ in range(total - sum(batches)):
        _, rank = heapq.heappop(heap)
        batches[rank] += 1
        if batches[rank] < bounds[rank]:
            heapq.heappush(heap, (curves[rank](batches[rank] + 1), rank))
    return batches


def _below_level(total: int, curves: Sequence[Affine], bounds: Sequence[int]) -> list[int]:
    """Batches that the optimum surely reaches: what fits below a water level that holds no more than `total`."""
    low, high = 0.0, max(curve(total) for curve in curves)

    def filled(level: float) -> list[int]:
        return [
            max(1, min(bound, int((level - curve.fixed) / curve.per_sample) if curve.per_sample > 0 else bound))
            for curve, bound in zip(curves, bounds, strict=True)
        ]

    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(filled(middle)) <= total else (low, middle)
    return filled(low) if sum(filled(low)) <= total else [1] * len(curves)
