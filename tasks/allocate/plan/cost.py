"""The cost of one configuration: duration, energy and money of the training, with intervals.

With t_r the time of rank r for its share of a global batch B, C the time of all collectives one
after another, A the micro-batches of a step, and S the number of steps:

    T         = max_r t_r
    step      = T + max(C', C − o · T / A)
    duration  = S · step + start
    energy    = S · Σ_r ((load_r − idle_r) · t_r + idle_r · step) + start · Σ_r idle_r
    cost      = Σ_r price_r · duration + price of energy · energy

Gradients are summed during the slowest rank's backward pass, of which a share remains when the
first bucket of them is complete: o of the step's work (`overlap`). C' is the time after it: the
last bucket, and the all-reduce of the step's metrics. A leased device draws its load power while it
computes, and its idle power while it waits.

The same formulas give every quantile. At z standard deviations, in units of those of the 90 %
interval's ends (0: median, 1: high end, −1: low end), each quantity that is uncertain has its own
quantile: t_r · factor_r^z, C, C' and start at z, energy times (1 + spread of the powers)^z, with
the largest factor of the ranks for their work. The overlap with the backward pass is assumed in
full up to the median, and fades to none at the high end.

With A > 1 (gradient accumulation), a rank takes its share in min(A, b_r) micro-batches, as even as
whole samples allow: t = A · t(b / A) for a curve that is straight between whole numbers. Memory is
then that of one micro-batch, plus the gradients, which are kept between micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from trainwright.tasks.allocate.plan.confidence import Triple, relative_deviations
from trainwright.tasks.allocate.plan.kinds import Kind, Share, check_curve
from trainwright.tasks.allocate.plan.overlap import BACKWARD
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import NotExceeded, Prediction
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Device, Pool
from trainwright.tasks.spec.windows import seconds_left

START_S = Triple(median=6.0, low=3.0, high=20.0)
"""Starting processes and reading data: a prior."""
_ENDS = (0.0, -1.0, 1.0)
"""z of a `Triple`'s median, low and high end."""


class Collectives(NamedTuple):
    """Seconds of a step's all-reduces at one quantile."""

    total: float
    tail: float
    """The part after the backward pass."""
    overlap: float
    """The share of the slowest rank's time during which the others can run, without accumulation"""

    def step_s(self, slowest_s: Any, accumulation: int = 1) -> Any:
        """Seconds of a step whose slowest rank takes this long (a number or a numpy array).

        Gradients are summed only during the last micro-batch.
        """
        import numpy as np

        hidden_s = slowest_s * self.overlap / accumulation
        return slowest_s + np.maximum(self.tail, self.total - hidden_s)

    def slowest_s(self, step_s: Any, accumulation: int = 1) -> Any:
        """The inverse of `step_s`: how long the slowest rank may take."""
        import numpy as np

        shown = 1 - self.overlap / accumulation
        return np.minimum(step_s - self.tail, (step_s - self.total) / shown)


class Quantiles(Protocol):
    """The time of a step's all-reduces, or a lower bound of it, at z = 0 and the job's z."""

    def at(self, z: float) -> Collectives:
        """The quantile at z."""


class CollectiveTime(NamedTuple):
    """Seconds of a step's all-reduces: in total, and those that can't overlap the backward pass."""

    total: Triple
    tail: Triple
    overlap: float = BACKWARD
    """The share of the slowest rank's time that they may overlap, at the median."""

    def at(self, z: float) -> Collectives:
        """The quantile at z."""
        return Collectives(self.total.at(z), self.tail.at(z), overlap_at(z, self.overlap))


def overlap_at(z: float, overlap: float) -> float:
    """The share of the slowest rank's time that collectives may overlap, at z."""
    return overlap * min(1.0, max(0.0, 1 - z))


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

    def with_steps(self, steps: int, step_s: Triple, extra: RanksCost, work_j: float) -> Cost:
        """The cost if a step takes `step_s` instead, and its ranks' work `work_j` J more.

        `extra` has what the ranks cost while they wait.
        """
        added = Triple(*(new - old for new, old in zip(step_s, self.step_s, strict=True)))
        duration = Triple(
            *(old + steps * more for old, more in zip(self.duration_s, added, strict=True))
        )
        energy, cost = self.energy_j, self.cost
        if energy is not None:
            more_j = steps * (extra.idle_w * added.median + work_j)
            share = max(0.0, 1 + more_j / energy.median) if energy.median > 0 else 1.0
            energy = Triple(*(share * one for one in energy))
        if cost is not None:
            joules = [0.0] * 3
            if energy is not None and self.energy_j is not None:
                joules = [new - old for new, old in zip(energy, self.energy_j, strict=True)]
            rent = extra.rent if math.isfinite(extra.rent) else 0.0
            cost = Triple(
                *(
                    old + rent * steps * more + extra.energy_price_per_j * joule
                    for old, more, joule in zip(cost, added, joules, strict=True)
                )
            )
        longer = duration.high / self.duration_s.high
        dearer = cost.high / self.cost.high if cost and self.cost and self.cost.high else 1.0
        return Cost(
            step_s,
            duration,
            energy,
            cost,
            self.upper_duration_s * longer,
            self.upper_cost * dearer,
        )

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


class CostFigures(NamedTuple):
    """Duration, energy and cost of a training at one quantile; infinite where unknown.

    Numbers, or numpy arrays.
    """

    step_s: Any
    duration_s: Any
    energy_j: Any
    cost: Any


@dataclass(frozen=True)
class RanksCost:
    """The cost of training with some ranks, as a function of their computing times.

    Sums over ranks: `idle_w`, and `rent` by the second. Infinite: unknown.
    """

    collectives: Quantiles
    accumulation: int
    steps: int
    idle_w: float
    rent: float
    energy_price_per_j: float
    kinds: tuple[Kind, ...]

    def figures(self, z: float, slowest_s: Any, work_j: Any) -> CostFigures:
        """The figures at z.

        `slowest_s` is max_r t_r · factor_r^z; `work_j` is Σ_r (load_r − idle_r) · t_r at the
        median. The figures never fall with either of them.
        """
        step_s = self.collectives.at(z).step_s(slowest_s, self.accumulation)
        start_s = START_S.at(z)
        duration_s = self.steps * step_s + start_s
        pick = max if z >= 0 else min
        factor = pick(kind.factor(z) for kind in self.kinds)
        spread = max(1 + kind.curve.power_spread for kind in self.kinds) ** z
        leased_j = self.idle_w * duration_s if self.idle_w else 0.0
        energy_j = spread * (self.steps * factor * work_j + leased_j)
        cost = self.rent * duration_s if self.rent else 0.0 * duration_s
        if self.energy_price_per_j:
            cost = cost + self.energy_price_per_j * energy_j
        return CostFigures(step_s, duration_s, energy_j, cost)


class CostModel:
    """The cost of a job's configurations on the devices of a pool.

    `now` (UTC) is the plan's start, for the hosts' windows; None ignores the windows. `slower`: by
    id, devices that take so many times as long as the estimate says.
    """

    def __init__(
        self,
        job: Job,
        pool: Pool,
        estimate: Estimate,
        data: DataSchema,
        now: datetime | None = None,
        slower: Mapping[str, float] | None = None,
    ) -> None:
        self.job, self.pool, self.estimate, self.data, self._now = job, pool, estimate, data, now
        self._slower = slower or {}
        self.z = relative_deviations(job.objective.confidence)
        """The job's confidence in standard deviations, in units of the 90 % interval's."""
        self.energy_price_per_j = pool.prices["energy"] / 3.6e6 if "energy" in pool.prices else None
        self._windows = {host.name: seconds_left(host.available, now) for host in pool.hosts}
        self._kinds: dict[object, Kind] = {}
        self._rented = any(name != "energy" for name in pool.prices)

    def with_estimate(self, estimate: Estimate) -> CostModel:
        """The same, by another estimate."""
        return CostModel(self.job, self.pool, estimate, self.data, self._now, self._slower)

    def with_pool(self, pool: Pool) -> CostModel:
        """The same in another pool."""
        return CostModel(self.job, pool, self.estimate, self.data, self._now, self._slower)

    def kind(self, device: Device) -> Kind:
        """The device's kind. Raises BadInput if its curve or its powers are impossible."""
        factor = self._slower.get(device.id, 1.0)
        key = (device.variant, self._windows.get(device.host, math.inf), factor)
        if key not in self._kinds:
            curve = self.estimate.curve(device)
            curve = curve if factor == 1 else curve.slowed(factor)
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

    def memory_bytes(self, kind: Kind, batch: int, accumulation: int) -> float:
        """Peak memory of a rank with this share, as an upper bound."""
        micro = math.ceil(batch / accumulation)
        return kind.curve.device_memory_bytes(micro) + self.kept_bytes(accumulation)

    def kept_bytes(self, accumulation: int) -> float:
        """Memory of the gradients between micro-batches."""
        return self.estimate.gradient_bytes if accumulation > 1 else 0.0

    def ranks_cost(
        self,
        ranks: Sequence[tuple[Kind, int]],
        collectives: Quantiles,
        batch: int,
        accumulation: int = 1,
    ) -> RanksCost:
        """The cost of these numbers of ranks of each kind, for any split of the batch."""
        per_j = self.energy_price_per_j or 0.0
        priced = bool(self.pool.prices)
        return RanksCost(
            collectives,
            accumulation,
            self.steps(batch),
            math.fsum(count * _known(kind.idle_w) for kind, count in ranks),
            math.fsum(count * _known(kind.price_per_s) for kind, count in ranks)
            if priced
            else math.inf,
            per_j,
            tuple(kind for kind, _ in ranks),
        )

    def cost(
        self,
        shares: Sequence[Share],
        collectives: CollectiveTime,
        batch: int,
        accumulation: int = 1,
    ) -> Cost:
        """The cost of these shares. Ignores memory, limits and windows."""
        ranks = [(share.kind, share.ranks) for share in shares]
        costs = self.ranks_cost(ranks, collectives, batch, accumulation)
        times = [share.kind.curve.median_s(share.batch, accumulation) for share in shares]
        work_j = math.fsum(
            share.ranks * share.kind.extra_w * time
            for share, time in zip(shares, times, strict=True)
        )

        def at(z: float) -> CostFigures:
            slowest_s = max(
                share.kind.factor(z) * time for share, time in zip(shares, times, strict=True)
            )
            return costs.figures(z, slowest_s, work_j)

        ends, upper = [at(z) for z in _ENDS], at(self.z)
        step, duration, energy, cost = (
            Triple(*map(float, values)) for values in zip(*ends, strict=True)
        )
        return Cost(
            step,
            duration,
            energy if math.isfinite(energy.median) else None,
            cost if math.isfinite(cost.median) else None,
            float(upper.duration_s),
            float(upper.cost),
        )


def _known(value: float | None) -> float:
    return math.inf if value is None else value
