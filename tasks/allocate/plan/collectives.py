"""Time of a step's all-reduces, depending on the ranks' placement on machines.

The ranks form one flat ring, as in Horovod and Gloo: its slowest link determines the speed.
Gradients are reduced bucket by bucket, then the step's metrics.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from trainwright.estimator.predict.communication import (
    FIGURES_BYTES,
    GRADIENT_BUCKET_BYTES,
    Link,
    all_reduce,
    all_reduces,
    on_cycle,
)
from trainwright.tasks.allocate.plan.confidence import Triple
from trainwright.tasks.allocate.plan.cost import CollectiveTime
from trainwright.tasks.allocate.plan.overlap import overlap_of
from trainwright.tasks.runs.artefacts.estimate import Estimate

INNER = (0.5e9, 0.3e-3)
"""The link between two ranks of a machine, unless it was measured or the pool file states it.

Bandwidth in bytes/s, latency in s: a prior for sums in the host's memory. NVIDIA GPUs of one type
sum among each other, over the link of their datasheet (`Links.inside`). If the host's own network
is faster, so is this link. Rounded from
the middle of 21 measurements on a two-core machine, idle and busy: 0.56 (0.24 to 1.23) GB/s, 0.29
(0.11 to 3.1) ms; `tests/benchmarks/all_reduce.py` measures and prints the link of the machine it
runs on.
"""
# The interval of a time that follows from a prior, or from the network as the pool file states it.
_UNMEASURED_LOW, _UNMEASURED_HIGH = 1 / 2, 3.0


class RingShape(NamedTuple):
    """The quantities that determine the time of an all-reduce ring."""

    machines: int
    widest: int
    """Most ranks on a machine other than this one."""
    here: int
    """Ranks on this machine."""
    total: int
    """All ranks."""
    network: tuple[float, float] | None = None
    """The slowest link between the machines: bandwidth in bytes/s, latency in s.
    None: the fastest of the pool (for lower bounds)."""
    inner: tuple[float, float] | None = None
    """The slowest link inside a machine with several ranks. None: the fastest of the pool."""
    on_devices: bool = False
    """Whether devices sum among each other, so that what was measured here does not hold."""


class CollectiveModel:
    """The time of collectives on some machines.

    `networks` and `inner` are the links between and inside all of them: bandwidth, latency.
    """

    def __init__(
        self,
        estimate: Estimate,
        networks: Sequence[tuple[float, float]],
        inner: Sequence[tuple[float, float]],
    ) -> None:
        self._estimate = estimate
        self.overlap = overlap_of(estimate.layers, estimate.curves)
        """the share of a rank's time that sums of gradients may overlap"""
        self._network, self._inner = _fastest(networks), _fastest(inner)
        self.lower_bounds: dict[object, Any] = {}
        """cache for `search.collective_bound`, which needs the same times in each search"""

    @functools.lru_cache(maxsize=100_000)  # noqa: B019 - lives as long as one plan's search
    def time(self, ring: RingShape, gradient_bytes: float | None = None) -> CollectiveTime:
        """All-reduces of gradients, bucket by bucket, and of the step's metrics.

        `gradient_bytes` are those of the whole model unless given.
        """
        size = self._estimate.gradient_bytes if gradient_bytes is None else gradient_bytes
        buckets = max(1, math.ceil(size / GRADIENT_BUCKET_BYTES))
        last = size - (buckets - 1) * GRADIENT_BUCKET_BYTES
        return CollectiveTime(
            self._all_reduces(size + FIGURES_BYTES, buckets + 1, ring),
            self._all_reduces(last + FIGURES_BYTES, 2, ring),
            self.overlap,
        )

    def _all_reduces(self, size: float, pieces: int, ring: RingShape) -> Triple:
        """The time of consecutive sums: the slower of inside and between machines."""
        estimate, found = self._estimate, Triple(0.0, 0.0, 0.0)
        measured = estimate.local_link if ring.here > 1 and not ring.on_devices else None
        if measured is not None:
            agreed = all_reduce(measured, FIGURES_BYTES, ring.total)
            local = on_cycle(
                all_reduces(measured, size, pieces, ring.total), estimate.cycle_s, agreed
            )
            found = Triple(local.median, local.low, local.high)
        if ring.widest > 1 or (ring.here > 1 and measured is None):
            link = _link(*(ring.inner or self._inner))
            inside = _unmeasured(all_reduces(link, size, pieces, ring.total).median)
            found = Triple(*map(max, found, inside))
        if ring.machines > 1:
            link = _link(*(ring.network or self._network))
            between = _unmeasured(all_reduces(link, size, pieces, ring.total).median)
            found = Triple(*map(max, found, between))
        return found


def _unmeasured(median: float) -> Triple:
    return Triple(median, median * _UNMEASURED_LOW, median * _UNMEASURED_HIGH)


def _link(bandwidth_bytes_per_s: float, latency_s: float) -> Link:
    return Link(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s, spread=0.0)


def _fastest(links: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The highest bandwidth and the lowest latency."""
    return max(one[0] for one in links), min(one[1] for one in links)
