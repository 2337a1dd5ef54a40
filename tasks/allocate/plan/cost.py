"""The cost of one configuration: duration, energy and money of the training, with intervals.

With b_r the share of rank r in a global batch B, t_r its time for that share, C the time of all
collectives one after another, A the micro-batches of a step, and S the number of steps:

    step      = T + max(C', C − BACKWARD · T / A)   with T = max_r t_r(b_r)
    duration  = S · step + start
    energy    = Σ_r S · (load_r · t_r + idle_r · (step − t_r)) + start · idle_r
    cost      = Σ_r price_r · duration + price of energy · energy

Gradients are summed during the slowest rank's backward pass. C' is the time after it: the last
bucket, and the all-reduce of the step's metrics. The high end of the interval assumes no overlap.

The energy's interval is the duration's, widened by the uncertainty of the powers. A leased device
draws its load power while it computes, and its idle power while it waits.

With A > 1 (gradient accumulation), a rank takes its share in min(A, b_r) micro-batches, as even as
whole samples allow: t = A · t(b / A) for a curve that is straight between whole numbers. Memory is
then that of one micro-batch, plus the gradients, which are kept between micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from trainwright.tasks.allocate.plan.confidence import Triple, not_exceeded
from trainwright.tasks.allocate.plan.kinds import (
    Kind,
    Share,
    check_curve,
    largest_batch,
    median_times,
)
from trainwright.tasks.runs.artefacts import DataSchema, Estimate, NotExceeded, Prediction
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Device, Pool
from trainwright.tasks.spec.windows import seconds_left

BACKWARD = 2 / 3
"""The backward pass, as a share of a step's work: twice the arithmetic of the forward pass."""
START_S = Triple(median=6.0, low=3.0, high=20.0)
"""Starting processes and reading data: a prior."""


class CollectiveTime(NamedTuple):
    """Seconds of a step's all-reduces: in total, and those that can't overlap the backward pass."""

    total: Triple
    tail: Triple

    def step_s(self, busy_s: Any, accumulation: int = 1) -> Any:
        """Median step time if the slowest rank computes for `busy_s` (a number or a numpy array).

        Gradients are summed only during the last micro-batch.
        """
        import numpy as np

        return busy_s + np.maximum(
            self.tail.median, self.total.median - busy_s * BACKWARD / accumulation
        )


class Cost(NamedTuple):
    """The cost of a configuration. None: a price or a power is unknown.

    `upper_…` is not exceeded at the job's confidence.
    """

    step_s: Triple
    duration_s: Triple
    energy_j: Triple | None
    cost: Triple | None
    upper_duration_s: float
    upper_cost: float

    def prediction(self) -> Prediction:
        """The same, as an artefact stores it."""
        return Prediction(
            step_time_s=self.step_s.interval(),
            duration_s=self.duration_s.interval(),
            energy_j=self.energy_j.interval() if self.energy_j else None,
            cost=self.cost.interval() if self.cost else None,
        )

    def not_exceeded(self, confidence: float) -> NotExceeded:
        """The values that the limits apply to, as an artefact; `confidence` is the job's."""
        return NotExceeded(
            confidence=confidence,
            duration_s=self.upper_duration_s,
            cost=self.upper_cost if self.cost else None,
        )


class CostModel:
    """The cost of a job's configurations on the devices of a pool.

    `now` (UTC) is the plan's start, for the hosts' windows; None ignores the windows.
    """

    def __init__(
        self,
        job: Job,
        pool: Pool,
        estimate: Estimate,
        data: DataSchema,
        now: datetime | None = None,
    ) -> None:
        self.job, self.pool, self.estimate, self.data = job, pool, estimate, data
        self.confidence = job.objective.confidence
        self.energy_price_per_j = pool.prices["energy"] / 3.6e6 if "energy" in pool.prices else None
        self._windows = {host.name: seconds_left(host.available, now) for host in pool.hosts}
        self._kinds: dict[object, Kind] = {}
        self._rented = any(name != "energy" for name in pool.prices)

    def kind(self, device: Device) -> Kind:
        """The device's kind. Raises BadInput if its curve or its powers are impossible."""
        key = (device.variant, self._windows.get(device.host, math.inf))
        if key not in self._kinds:
            curve = self.estimate.curve(device)
            check_curve(curve)
            price = self.pool.prices.get(device.type) if self._rented else 0.0
            self._kinds[key] = Kind(
                index=len(self._kinds),
                device_type=device.type,
                curve=curve,
                idle_w=curve.idle_w,
                load_w=curve.load_w,
                price_per_s=None if price is None else price / 3600,
                available_s=key[1],
            )
        return self._kinds[key]

    def steps(self, batch: int) -> int:
        """Steps of the whole training."""
        return math.ceil(self.data.train_rows / batch) * self.job.train.epochs

    def times(self, kind: Kind, batch: int, accumulation: int) -> Any:
        """Median seconds for 1, 2, … samples, up to `batch` or the memory limit (numpy array)."""
        import numpy as np

        micro = largest_batch(kind.curve, batch, self._kept_bytes(accumulation))
        sizes = np.arange(1, min(batch, accumulation * micro) + 1)
        in_micro = np.maximum(1.0, sizes / accumulation)
        return np.minimum(sizes, accumulation) * median_times(kind.curve, in_micro)

    def memory_bytes(self, kind: Kind, batch: int, accumulation: int) -> float:
        """Peak memory of a rank with this share, as an upper bound."""
        micro = math.ceil(batch / accumulation)
        return kind.curve.device_memory_bytes(micro) + self._kept_bytes(accumulation)

    def largest_global_batch(self) -> int:
        """The largest global batch that the job may get."""
        size = self.job.train.global_batch_size
        most = size if size != "auto" else self.job.train.batch_bounds[1]
        return min(most, self.data.train_rows)

    def _kept_bytes(self, accumulation: int) -> float:
        return self.estimate.gradient_bytes if accumulation > 1 else 0.0

    def cost(
        self,
        shares: Sequence[Share],
        collectives: CollectiveTime,
        batch: int,
        accumulation: int = 1,
    ) -> Cost:
        """The cost of these shares. Ignores memory, limits and windows."""
        times = [share.kind.curve.median_s(share.batch, accumulation) for share in shares]
        step = _step(shares, times, collectives, accumulation)
        steps = self.steps(batch)
        duration = Triple(*(steps * one + start for one, start in zip(step, START_S, strict=True)))
        energy = _energy(shares, times, step, steps)
        cost = self._money(shares, duration, energy)
        return Cost(
            step,
            duration,
            energy,
            cost,
            not_exceeded(duration, self.confidence),
            not_exceeded(cost, self.confidence) if cost else math.inf,
        )

    def _money(
        self, shares: Sequence[Share], duration: Triple, energy: Triple | None
    ) -> Triple | None:
        """Σ_r price_r · duration + price of energy · energy; None if a price is unknown."""
        priced = all(share.kind.price_per_s is not None for share in shares)
        if not (priced and self.pool.prices):
            return None
        if energy is None and self.energy_price_per_j is not None:
            return None
        rent = math.fsum(share.ranks * (share.kind.price_per_s or 0.0) for share in shares)
        per_j, joules = self.energy_price_per_j or 0.0, energy or Triple(0.0, 0.0, 0.0)
        return Triple(
            *(rent * time + per_j * one for time, one in zip(duration, joules, strict=True))
        )


def _step(
    shares: Sequence[Share],
    times: Sequence[float],
    collectives: CollectiveTime,
    accumulation: int,
) -> Triple:
    """Step time: T + max(C', C − BACKWARD · T / A); at the high end T + C."""
    total, tail = collectives
    low_s = max(
        time * share.kind.curve.low_factor for time, share in zip(times, shares, strict=True)
    )
    high_s = max(
        time * share.kind.curve.high_factor for time, share in zip(times, shares, strict=True)
    )
    return Triple(
        float(collectives.step_s(max(times), accumulation)),
        low_s + max(tail.low, total.low - low_s * BACKWARD / accumulation),
        high_s + total.high,
    )


def _energy(
    shares: Sequence[Share], times: Sequence[float], step: Triple, steps: int
) -> Triple | None:
    """Σ_r S · (load_r · t_r + idle_r · (step − t_r)) + start · idle_r; None if a power is unknown.

    The ends are those of the step at the median's mean power, widened by the powers' spread.
    """
    if any(share.kind.idle_w is None or share.kind.load_w is None for share in shares):
        return None
    idle_w = math.fsum(share.ranks * (share.kind.idle_w or 0.0) for share in shares)
    working_j = math.fsum(
        share.ranks
        * ((share.kind.load_w or 0.0) * time + (share.kind.idle_w or 0.0) * (step.median - time))
        for time, share in zip(times, shares, strict=True)
    )
    power_w = working_j / step.median
    median, low, high = (
        steps * one * power_w + start * idle_w for one, start in zip(step, START_S, strict=True)
    )
    spread = 1 + max(share.kind.curve.power_spread for share in shares)
    return Triple(median, low / spread, high * spread)
