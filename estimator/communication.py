"""What it takes to move bytes between ranks: point-to-point, broadcast, all-gather, all-reduce. Pure arithmetic; loads no torch.

A message of m bytes takes α + m / β (latency α, bandwidth β; R. Hockney, "The communication challenge for MPP", Parallel
Computing 20, 1994), and a collective is a number of such messages one after another. Links are taken to be alike, both
directions usable at once, and the time of adding numbers up to be part of β: that is how it is measured
(`trainwright.estimator.measure_link`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from trainwright.estimator.curves import Interval
from trainwright.estimator.errors import BadInput

_FASTEST_BYTES_PER_S = 1e13  # beyond any link: times that do not grow with the bytes do not make it infinite


class Link(BaseModel):
    """A link between two ranks: latency in s, bandwidth in bytes/s, and how far off a prediction made of them is.

    `spread` is the relative half width of the 90 % interval: a time t is predicted as t / (1 + spread) to t · (1 + spread).
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    bandwidth_bytes_per_s: float = Field(gt=0)
    latency_s: float = Field(ge=0)
    spread: float = Field(ge=0)

    def time(self, messages: float, volume_bytes: float) -> Interval:
        """Seconds for messages that follow one another and carry so many bytes in all: messages · α + volume / β."""
        median = messages * self.latency_s + volume_bytes / self.bandwidth_bytes_per_s
        return Interval(median=median, low=median / (1 + self.spread), high=median * (1 + self.spread))


def point_to_point(link: Link, size_bytes: float) -> Interval:
    """Seconds for one message: α + m / β (Hockney 1994)."""
    _check(size_bytes, 2)
    return link.time(1, size_bytes)


def broadcast(link: Link, size_bytes: float, ranks: int) -> Interval:
    """Seconds until every rank has the m bytes of one: ⌈log2 n⌉ · (α + m / β).

    The binomial tree (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in
    MPICH", IJHPCA 19, 2005, section 4.2). Raises ValueError for less than one rank or negative sizes.
    """
    _check(size_bytes, ranks)
    rounds = (ranks - 1).bit_length()  # ⌈log2 n⌉, without rounding
    return link.time(rounds, rounds * size_bytes)


def all_gather(link: Link, size_bytes: float, ranks: int) -> Interval:
    """Seconds until every rank has what all ranks hold, m bytes altogether: (n − 1) · α + (n − 1) / n · m / β.

    The ring (Thakur, Rabenseifner, Gropp 2005, section 4.1). Raises ValueError for less than one rank or negative sizes.
    """
    _check(size_bytes, ranks)
    return link.time(*_ring(size_bytes, ranks))


def all_reduce(link: Link, size_bytes: float, ranks: int) -> Interval:
    """Seconds until every rank has the sum of all ranks' m bytes: 2 (n − 1) · α + 2 (n − 1) / n · m / β.

    The ring: a reduce-scatter, then an all-gather (P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for
    clusters of workstations", JPDC 69, 2009, section 3). Raises ValueError for less than one rank or negative sizes.
    """
    _check(size_bytes, ranks)
    messages, volume_bytes = _ring(size_bytes, ranks)
    return link.time(2 * messages, 2 * volume_bytes)


def fit_link(samples: Sequence[tuple[float, int, float]]) -> Link:
    """The link that explains all-reduces best: samples are (bytes, ranks, seconds).

    Minimises Σ |1 − predicted / seconds| over α, 1 / β ≥ 0, as a linear program: relative, so that the small sizes count
    as the large ones do, and absolute, so that a sample which was disturbed has no more weight than another. `spread` is
    the 90th percentile of what measured and predicted differ by. Raises BadInput where there are fewer than two sizes.
    """
    import numpy as np
    from scipy.optimize import linprog

    usable = [one for one in samples if one[1] > 1]
    if len({size for size, _, _ in usable}) < 2 or any(not 0 < seconds < math.inf for _, _, seconds in usable):
        raise BadInput(
            f"link: got {len(samples)} samples; needed: two sizes or more between two ranks or more, each of a time > 0 s"
        )
    seconds = np.array([one[2] for one in usable])
    ring = np.array([_ring(size, ranks) for size, ranks, _ in usable])
    # What is divided by the times and scaled to 1 keeps the program well conditioned; the scales go back in at the end.
    relative = 2 * ring / seconds[:, None]
    scale = relative.max(axis=0)
    scaled, ones = relative / scale, np.eye(len(usable))
    # Least Σ e with −e <= 1 − scaled · x <= e: two unknowns of the link, then one e for each sample.
    found = linprog(
        c=np.r_[0.0, 0.0, np.ones(len(usable))],
        A_ub=np.block([[scaled, -ones], [-scaled, -ones]]),
        b_ub=np.r_[np.ones(len(usable)), -np.ones(len(usable))],
        bounds=(0, None),
        method="highs",
    )
    assert found.success, found.message
    latency_s, seconds_per_byte = found.x[:2] / scale
    link = Link(
        latency_s=float(latency_s),
        bandwidth_bytes_per_s=float(1 / max(seconds_per_byte, 1 / _FASTEST_BYTES_PER_S)),
        spread=0.0,
    )
    ratios = np.array([all_reduce(link, size, ranks).median / taken for size, ranks, taken in usable])
    with np.errstate(divide="ignore"):
        off = np.maximum(ratios, 1 / ratios) - 1
    return link.model_copy(update={"spread": float(np.quantile(off, 0.9))})


def _ring(size_bytes: float, ranks: int) -> tuple[float, float]:
    """Messages, and the bytes they carry, of one way round the ring: n − 1, and (n − 1) / n · m."""
    return ranks - 1, (ranks - 1) / ranks * size_bytes


def _check(size_bytes: float, ranks: int) -> None:
    if size_bytes < 0 or ranks < 1:
        raise ValueError(f"{size_bytes:g} bytes between {ranks} ranks; allowed: 0 bytes or more, one rank or more")
