"""Predicts communication between ranks: point-to-point, broadcast, all-gather, all-reduce.

Arithmetic; loads no torch. A message of m bytes takes α + m / β (latency α, bandwidth β; R.
Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994), and a collective is a
sequence of such messages. The model assumes that links are alike and that both directions work at
once. β includes the time of adding numbers, as `measure.all_reduce` measures it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pydantic import Field

from trainwright.estimator.curves import Interval
from trainwright.estimator.errors import BadInput
from trainwright.estimator.frozen_model import FrozenModel
from trainwright.estimator.quantiles import quantile

HOROVOD_CYCLE_S = 1e-3
"""The default of HOROVOD_CYCLE_TIME (Horovod 0.28, operations.cc)."""
HOROVOD_POLL_S = 1e-3
"""The interval at which a waiting rank polls for its sum (Horovod 0.28, torch/mpi_ops_v2.cc)."""
GRADIENT_BUCKET_BYTES = 4 << 20
"""Gradients are summed in buckets of at most this size, each once the backward pass filled it."""
FIGURES_BYTES = 1 << 10
"""Loss, accuracy and which parameters were used: summed at the end of every step."""
# Faster than any link; keeps the bandwidth finite if times do not grow with the bytes.
_FASTEST_BYTES_PER_S = 1e13
_SHORTEST_S = 1e-9


class Link(FrozenModel):
    """A link between two ranks: latency in s, bandwidth in bytes/s, and the error of predictions.

    `spread` is the relative half width of the 90 % interval: a time t is predicted as
    t / (1 + spread) to t · (1 + spread).
    """

    bandwidth_bytes_per_s: float = Field(gt=0, description="of one direction")
    latency_s: float = Field(ge=0, description="of a message")
    spread: float = Field(ge=0, description="relative half width of the 90 % interval")
    after_sum_s: float = Field(
        default=0.0,
        ge=0,
        description="how much longer a training step takes after a sum with another rank of this "
        "machine; 0 if not measured",
    )

    def time(self, messages: float, volume_bytes: float) -> Interval:
        """Seconds for a sequence of messages with this total volume: messages · α + volume / β."""
        median = messages * self.latency_s + volume_bytes / self.bandwidth_bytes_per_s
        return Interval(
            median=median, low=median / (1 + self.spread), high=median * (1 + self.spread)
        )


def point_to_point(link: Link, size_bytes: float) -> Interval:
    """Seconds for one message: α + m / β (Hockney 1994)."""
    _check(size_bytes, 2)
    return link.time(1, size_bytes)


def broadcast(link: Link, size_bytes: float, ranks: int) -> Interval:
    """Seconds until every rank has the m bytes of one: ⌈log2 n⌉ · (α + m / β).

    The binomial tree (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective
    communication operations in MPICH", IJHPCA 19, 2005, section 4.2). Raises ValueError for less
    than one rank or negative sizes.
    """
    _check(size_bytes, ranks)
    rounds = (ranks - 1).bit_length()  # ⌈log2 n⌉, without rounding
    return link.time(rounds, rounds * size_bytes)


def all_gather(link: Link, size_bytes: float, ranks: int) -> Interval:
    """Seconds until every rank has the m bytes of all: (n − 1) · α + (n − 1) / n · m / β.

    The ring (Thakur, Rabenseifner, Gropp 2005, section 4.1). Raises ValueError for less than one
    rank or negative sizes.
    """
    _check(size_bytes, ranks)
    return link.time(*_ring(size_bytes, ranks))


def all_reduce(link: Link, size_bytes: float, ranks: int) -> Interval:
    """Seconds until every rank has the sum of m bytes: 2 (n − 1) · α + 2 (n − 1) / n · m / β.

    The ring: a reduce-scatter, then an all-gather (P. Patarasuk, X. Yuan, "Bandwidth optimal
    all-reduce algorithms for clusters of workstations", JPDC 69, 2009, section 3). Raises
    ValueError for less than one rank or negative sizes.
    """
    _check(size_bytes, ranks)
    messages, volume_bytes = _ring(size_bytes, ranks)
    return link.time(2 * messages, 2 * volume_bytes)


def all_reduces(link: Link, size_bytes: float, pieces: int, ranks: int) -> Interval:
    """Seconds for several all-reduces of m bytes in total, with the messages of each."""
    _check(size_bytes, ranks)
    messages, volume_bytes = _ring(size_bytes, ranks)
    return link.time(2 * messages * pieces, 2 * volume_bytes)


def on_cycle(
    time: Interval, cycle_s: float, agreed: Interval, poll_s: float = HOROVOD_POLL_S
) -> Interval:
    """Seconds for sums by a library that works in cycles.

    A sum waits for the next cycle; then ranks agree on what is ready, sum it, and the waiting rank
    notices. Ranks agree in every cycle, so a sum that comes during a cycle waits for its end: half
    a cycle and half an agreement at the median. `agreed` is the time of an agreement (a small
    all-reduce); the waiting rank polls every `poll_s`. With a cycle of 0 the library begins at once
    and wakes the waiting rank. Raises ValueError for a negative cycle.
    """
    if cycle_s < 0:
        raise ValueError(f"cycle {cycle_s:g} s; allowed: 0 s or more")
    if cycle_s == 0:
        return time
    return Interval(
        median=time.median + 1.5 * agreed.median + (cycle_s + poll_s) / 2,
        low=time.low + agreed.low,
        high=time.high + 2 * agreed.high + cycle_s + poll_s,
    )


def fit_link(samples: Sequence[tuple[float, int, float]]) -> Link:
    """The link that explains measured all-reduces best; samples are (bytes, ranks, seconds).

    The median of each size counts. Over those, the fit minimises Σ |1 − predicted / seconds| for α,
    1 / β ≥ 0, as a linear program. Errors are relative, so that small sizes count as much as large
    ones, and absolute, so that outliers have no more weight than other sizes. `spread` is the 90th
    percentile, over all samples, of the factor between measured and predicted, less one. Raises
    BadInput for fewer than two sizes, or a time that is not above zero.
    """
    import numpy as np
    from scipy.optimize import linprog

    times: dict[tuple[float, int], list[float]] = {}
    for size, ranks, seconds in samples:
        if ranks > 1:
            times.setdefault((size, ranks), []).append(seconds)
    if len({size for size, _ in times}) < 2 or any(
        not 0 < one < math.inf for group in times.values() for one in group
    ):
        raise BadInput(
            f"link: got {len(samples)} samples; needed: two sizes or more between two ranks or "
            "more, each with a time > 0 s"
        )
    medians = np.array([statistics.median(group) for group in times.values()])
    # Minimise Σ e with −e <= 1 − rows · x <= e, where x are α and 1 / β and each size has an e.
    # Columns are scaled to 1, because α and 1 / β lie some six orders of magnitude apart.
    rows = (
        np.array([[2 * part for part in _ring(size, ranks)] for size, ranks in times])
        / medians[:, None]
    )
    scale, one_each = rows.max(axis=0), np.eye(len(medians))
    found = linprog(
        c=np.r_[0.0, 0.0, np.ones(len(medians))],
        A_ub=np.block([[rows / scale, -one_each], [-rows / scale, -one_each]]),
        b_ub=np.r_[np.ones(len(medians)), -np.ones(len(medians))],
        bounds=(0, None),
        method="highs",
    )
    assert found.success, found.message
    latency_s, seconds_per_byte = (float(value) for value in found.x[:2] / scale)
    link = Link(
        latency_s=latency_s,
        bandwidth_bytes_per_s=1 / max(seconds_per_byte, 1 / _FASTEST_BYTES_PER_S),
        spread=0.0,
    )
    off = []
    for (size, ranks), group in times.items():
        predicted = max(all_reduce(link, size, ranks).median, _SHORTEST_S)
        off += [max(predicted / seconds, seconds / predicted) - 1 for seconds in group]
    return link.model_copy(update={"spread": quantile(off, 0.9)})


def _ring(size_bytes: float, ranks: int) -> tuple[float, float]:
    """Messages, and their bytes, of one pass around the ring: n − 1, and (n − 1) / n · m."""
    return ranks - 1, (ranks - 1) / ranks * size_bytes


def _check(size_bytes: float, ranks: int) -> None:
    if size_bytes < 0 or ranks < 1:
        raise ValueError(
            f"got {size_bytes:g} bytes between {ranks} ranks; allowed: 0 bytes or more, one rank "
            "or more"
        )
