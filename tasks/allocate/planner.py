"""The plan: which devices, which global batch, which share for each. Arithmetic on values; no clock but for its own.

The objective is the median's; deadline, budget and the hosts' windows are held at the job's confidence. What a configuration
costs is in `cost`, where ranks sit in `layout`, the search in `search`, its alternatives in `front`, and why there is no plan in
`infeasible`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from trainwright.estimator.predict.energy import power_of
from trainwright.tasks.allocate.front import alternatives, front, point
from trainwright.tasks.allocate.infeasible import infeasible
from trainwright.tasks.allocate.plan.batch_limits import most_samples
from trainwright.tasks.allocate.plan.configuration import EXACT, Configuration, Found, Goal, Limits
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.plan.placement import Layout
from trainwright.tasks.allocate.search.branch_and_bound import EXACT_NODES, MOST_NODES
from trainwright.tasks.allocate.strategies import Request, best
from trainwright.tasks.errors import BadInput, Infeasible
from trainwright.tasks.runs.artefacts import DataSchema, Estimate, Plan, PlannedDevice
from trainwright.tasks.spec.eligibility import MOST_BATCH, asks_for_cost, require_possible, usable
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Device, Pool

TRAINED_ACCUMULATION = 64
"""Most micro-batches in a step that a plan asks for; `tasks.train` takes as many as it says."""
GOOD_ENOUGH = 0.9
_FIRST_NODES = 60  # of a batch's short search


def make_plan(
    job: Job,
    pool: Pool,
    estimate: Estimate,
    data: DataSchema,
    free: Sequence[Device] | None = None,
    *,
    now: datetime | None = None,
    most_accumulation: int = TRAINED_ACCUMULATION,
) -> Plan:
    """The plan that minimises the job's objective within its limits at its confidence.

    Gradients are accumulated over up to `most_accumulation` micro-batches where no plan without that meets the limits.
    `free` are the devices to choose from (default: all that the job may use); `now` is when the plan begins, for the hosts'
    windows (None: they are not looked at). Raises BadInput, and Infeasible with the limit that binds and the nearest deadline
    and budget that would do.
    """
    started = time.perf_counter()
    devices = usable(pool, job.devices) if free is None else list(free)
    if len(devices) < job.devices.min_count:
        raise Infeasible(
            f"devices: {len(devices)} free, at least {job.devices.min_count} needed (devices.min_count)",
            binding="devices",
        )
    model = CostModel(job, pool, estimate, data, now)
    planner = Planner(job, model, devices)
    chosen, found = planner.choose(planner.goal, planner.limits)
    if chosen is None:
        planner.most_accumulation = most_accumulation
        chosen, found = planner.choose(planner.goal, planner.limits)
    solve_time_s = time.perf_counter() - started
    if chosen is None:
        raise infeasible(planner)
    result = chosen.best
    assert result is not None
    gap = chosen.gap(planner.goal)
    held = most_samples(result, max(job.train.batch_bounds[1], result.batch))
    return Plan(
        feasible=True,
        objective=job.objective.minimize,
        devices=[
            planned(planner.model, device, batch, result.accumulation, most=held[device.id])
            for device, batch in result.devices()
        ],
        global_batch_size=result.batch,
        steps_per_epoch=math.ceil(data.train_rows / result.batch),
        epochs=job.train.epochs,
        strategy={"name": result.strategy, "collective": "ring all-reduce"},
        predicted=result.cost.prediction(),
        not_exceeded=result.cost.not_exceeded(job.objective.confidence),
        deadline_s=job.objective.deadline,
        budget=job.objective.budget,
        alternatives=alternatives(planner, chosen),
        front=front(planner, result),
        batches=[
            point(planner, one.best, chosen=one is chosen)
            for one in found[::-1]
            if one.best is not None
        ],
        accumulation=result.accumulation,
        batch_rule=planner.batch_rule(),
        search="exact" if gap == 0 else "bounded",
        gap=gap,
        solve_time_s=solve_time_s,
    )


def planned(
    model: CostModel, device: Device, batch: int, accumulation: int, most: int | None = None
) -> PlannedDevice:
    """The device with its share of each step, in so many micro-batches; `most` is what its memory holds."""
    kind = model.kind(device)
    return PlannedDevice(
        **device.model_dump(),
        batch_size=batch,
        step_time_s=kind.curve.step_time(batch, accumulation),
        loop_s=kind.curve.loop_part_s(batch, accumulation),
        most_batch_size=most,
        peak_memory_bytes=model.memory_bytes(kind, batch, accumulation),
        memory_bytes=kind.curve.memory_line(batch),
        power=power_of(kind.curve),
        mode=kind.curve.mode,
    )


class Planner:
    """One job's choice among devices."""

    def __init__(
        self, job: Job, model: CostModel, devices: Sequence[Device], most_accumulation: int = 1
    ) -> None:
        self.job, self.model, self.devices, self.most_accumulation = (
            job,
            model,
            list(devices),
            most_accumulation,
        )
        self.goal: Goal = job.objective.minimize
        self.limits = Limits(
            math.inf if job.objective.deadline is None else job.objective.deadline,
            math.inf if job.objective.budget is None else job.objective.budget,
        )
        self.layout = Layout(model, devices)
        self._check()
        self.sizes = _sizes(job, model.data.train_rows)

    def _check(self) -> None:
        job, pool = self.job, self.model.pool
        require_possible(job, pool, self.devices, self.model.data.train_rows)
        kinds = self.layout.kinds
        unknown = next(
            (kind.device_type for kind in kinds if kind.idle_w is None or kind.load_w is None), None
        )
        if self.goal == "energy" and unknown:
            raise BadInput(
                f"objective.minimize: got 'energy'; the power of {unknown} is not known: name it in pool {pool.name} (power)"
            )
        if (asked := asks_for_cost(job)) and "energy" in pool.prices and unknown:
            raise BadInput(
                f"objective.{asked}; the cost is not known: pool {pool.name} prices energy, and the power of "
                f"{unknown} is not known"
            )

    def request(self, size: int, goal: Goal, limits: Limits, cutoff: float = math.inf) -> Request:
        """The question for one global batch."""
        chosen = self.job.devices
        most = chosen.max_count or len(self.devices)
        return Request(
            self.layout, size, chosen.min_count, most, goal, limits, cutoff, self.most_accumulation
        )

    def choose(self, goal: Goal, limits: Limits) -> tuple[Found | None, list[Found]]:
        """The best for the global batch that the rule picks, and the best that was found for each that was in question.

        A short search of each batch gives a candidate. A smaller batch is then searched only until it is surely too far from
        the best, a larger one until it is surely not so good that the candidate would be, and the candidate to the end.
        """
        within = 1 / GOOD_ENOUGH if self._prefers_small else 1.0
        found: dict[int, Found] = {}
        exhausted: set[int] = set()

        def low(size: int) -> float:
            return found[size].bound * self._weight(size)

        def high(size: int) -> float:
            one = found[size].best
            return math.inf if one is None else one.value(goal) * self._weight(size)

        def search(size: int, most_nodes: int, ceiling: float) -> None:
            cutoff = ceiling / self._weight(size) * (1 + EXACT)
            one = best(replace(self.request(size, goal, limits, cutoff), most_nodes=most_nodes))
            found[size] = found[size].improved(one, goal) if size in found else one
            if one.nodes >= EXACT_NODES:
                exhausted.add(size)

        for size in sorted(self.sizes, reverse=True):
            most = min(map(high, found), default=math.inf)
            search(size, _FIRST_NODES if len(self.sizes) > 1 else MOST_NODES, within * most)
        while True:
            most = within * min(map(high, found))
            chosen = min(
                (size for size in found if high(size) <= most and found[size].best),
                default=math.inf,
            )
            value = high(int(chosen)) if chosen < math.inf else math.inf
            needed = {
                size: most if size < chosen else value / (within if size > chosen else 1.0)
                for size in found
            }
            pending = [
                size
                for size in found
                if size not in exhausted and low(size) < needed[size] * (1 - 2 * EXACT)
            ]
            if not pending:
                kept = [
                    found[size]
                    for size in sorted(found, reverse=True)
                    if found[size].best is not None
                ]
                return (found[int(chosen)] if chosen < math.inf else None), kept
            size = min(pending, key=lambda one: (one == chosen, low(one)))
            search(size, MOST_NODES, needed[size])

    def least(self, goal: Goal, limits: Limits) -> Configuration | None:
        """The configuration with the least of something, at any global batch."""
        chosen: Configuration | None = None
        for size in sorted(self.sizes, reverse=True):
            one = best(
                self.request(size, goal, limits, chosen.value(goal) if chosen else math.inf)
            ).best
            if one is not None and (chosen is None or one.value(goal) < chosen.value(goal)):
                chosen = one
        return chosen

    def with_one_more(self, device: Device) -> Planner:
        """The same with one more device like this one, on its host."""
        more = device.model_copy(update={"id": f"{device.id}+1"})
        other = Planner.__new__(Planner)
        other.__dict__.update(self.__dict__)
        other.devices = [*self.devices, more]
        other.layout = Layout(self.model, other.devices)
        return other

    @property
    def _prefers_small(self) -> bool:
        return self.job.train.noise_scale is None and len(self.sizes) > 1

    def _weight(self, size: int) -> float:
        """Samples to the same loss, relative to the smallest batch: (1 + B / B_noise) / (1 + B_ref / B_noise).

        S. McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, equation 2.7.
        """
        noise = self.job.train.noise_scale
        return 1.0 if noise is None else (1 + size / noise) / (1 + self.sizes[0] / noise)

    def batch_rule(self) -> str:
        """Why the global batch is what it is."""
        if self.job.train.global_batch_size != "auto":
            return "given"
        rows = self.model.data.train_rows
        if self.job.train.batch_bounds[0] > rows:
            return f"all {rows} rows to train on: batch_bounds begin above them, at {self.job.train.batch_bounds[0]}"
        if self._prefers_small or len(self.sizes) == 1:
            return (
                f"the smallest of {', '.join(map(str, self.sizes))} whose best {self.goal} is within a factor of "
                f"{1 / GOOD_ENOUGH:.2f} of the best: a larger batch learns less per sample, by how much is not known"
            )
        return (
            f"the least {self.goal} times samples to the same loss, (1 + B / {self.job.train.noise_scale:g}) / "
            f"(1 + {self.sizes[0]} / {self.job.train.noise_scale:g}), of {', '.join(map(str, self.sizes))}"
        )


def _sizes(job: Job, rows: int) -> list[int]:
    size = job.train.global_batch_size
    if size != "auto":
        return [size]
    low, high = (min(bound, rows) for bound in job.train.batch_bounds)
    return sorted(
        {low, high}
        | {2**power for power in range(MOST_BATCH.bit_length()) if low <= 2**power <= high}
    )
