"""Makes the plan: which devices, which global batch, and which share for each device.

Plans are compared by the median of the objective; deadline, budget and the hosts' windows hold at
the job's confidence. Arithmetic on values: only `solve_time_s` reads a clock.

    plan/cost, plan/placement   the cost of a configuration, and the placement of its ranks
    search/, batch_choice       the search, and the choice of the global batch
    alternatives, front         other configurations, and why they lost
    recompute_search            modules that are recomputed if memory binds
    description                 prices, windows, shares of a step, what the plan was compared with
    infeasible/                 why there is no plan
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from trainwright.estimator.curves import Interval, LayerCost
from trainwright.estimator.devices import EMULATED
from trainwright.estimator.predict.energy import power_of
from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.alternatives import alternatives, other_layouts
from trainwright.tasks.allocate.batch_choice import batch_rule, choose_batch
from trainwright.tasks.allocate.description import described, searched
from trainwright.tasks.allocate.front import explored, front, point
from trainwright.tasks.allocate.infeasible.binding_limits import infeasible
from trainwright.tasks.allocate.infeasible.nearest_limit import MOST_DEVICES, nearest_limit
from trainwright.tasks.allocate.layout_search import JointChoice, with_devices
from trainwright.tasks.allocate.layouts.choose import links_between
from trainwright.tasks.allocate.layouts.permitted import require_effect
from trainwright.tasks.allocate.layouts.predicted_kinds import predicted_by_kind
from trainwright.tasks.allocate.plan.batch_limits import most_samples
from trainwright.tasks.allocate.plan.configuration import Configuration, comes_before
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.plan.search_request import SearchResult
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.allocate.recompute_search import leanest_problem, recomputing
from trainwright.tasks.errors import Infeasible
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.layout import DATA_PARALLEL
from trainwright.tasks.runs.artefacts.plan import Plan, PlannedDevice
from trainwright.tasks.spec.eligibility import usable
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Device, Pool


def make_plan(
    job: Job,
    pool: Pool,
    estimate: Estimate,
    data: DataSchema,
    free: Sequence[Device] | None = None,
    *,
    now: datetime | None = None,
    most_accumulation: int | None = None,
    continues: bool = False,
) -> Plan:
    """The plan that minimises the job's objective within its limits at its confidence.

    Gradients are accumulated over up to `most_accumulation` micro-batches (None: any number).
    `free` are the devices to choose from (default: all that the job may use). `now` is the plan's
    start, for the hosts' windows (None: ignore windows). If the training `continues`, parts of the
    job's layout may have no effect on its devices; else they are refused.

    Raises BadInput, or Infeasible with the binding limit and the nearest feasible deadline and
    budget.
    """

    def make(job: Job) -> Plan:
        return _made(job, pool, estimate, data, free, now, most_accumulation, continues)

    try:
        return make(job)
    except Infeasible as error:
        count = len(usable(pool, job) if free is None else free)
        raise nearest_limit(error, job, make) if count <= MOST_DEVICES else error from None


def _made(
    job: Job,
    pool: Pool,
    estimate: Estimate,
    data: DataSchema,
    free: Sequence[Device] | None,
    now: datetime | None,
    most_accumulation: int | None,
    continues: bool,
) -> Plan:
    """As `make_plan`; a nearest limit is that of the fastest or cheapest plan that was found."""
    started = time.perf_counter()
    devices = usable(pool, job) if free is None else list(free)
    if len(devices) < job.devices.min_count:
        raise Infeasible(
            f"devices: {len(devices)} free, at least {job.devices.min_count} needed "
            "(devices.min_count)",
            binding="devices",
        )
    model = CostModel(job, pool, estimate, data, now)
    problem = PlanningProblem.of(job, model, devices, most_accumulation)
    chosen, found = choose_batch(problem)
    if chosen is not None and chosen.best is not None and chosen.best.value(problem.goal) == 0:
        chosen, found = choose_batch(problem.at_no_cost())
    plain = None if chosen is None else chosen.best
    again = recomputing(problem, plain)
    if again is None and job.train.recomputes == "all" and job.train.pipeline is None:
        raise infeasible(leanest_problem(problem))
    solve_time_s = time.perf_counter() - started
    if again is None:
        base, neighbours, known = _with_neighbours(problem, plain)
    else:
        base, neighbours, known = _with_neighbours(again.problem, again.best)
    started = time.perf_counter()
    if again is None or base is None:
        joint = with_devices(problem, base)
    else:
        laid = again.laid_out(base, plain)
        joint = JointChoice(laid, None)
        if job.train.recomputes == "auto":
            joint = with_devices(problem, plain, laid)
        if joint.laid.chosen is laid.chosen:
            problem, found = again.problem, again.found
        else:
            _, neighbours, known = _with_neighbours(problem, plain)
    solve_time_s += time.perf_counter() - started
    chosen_one = joint.laid.chosen.configuration
    if chosen_one.layout is not None and not continues:
        batches = [batch for _, batch in chosen_one.devices()]
        require_effect(job.train, chosen_one.layout, batches)
    return described(
        _document(problem, estimate, joint, found, neighbours, known, solve_time_s), pool
    )


def _with_neighbours(
    problem: PlanningProblem, best: Configuration | None
) -> tuple[Configuration | None, list[Configuration], list[Configuration]]:
    """The best configuration with ties broken, its neighbours, and all that were looked at."""
    if best is None:
        return None, [], []
    neighbours = problem.neighbours(best)
    known = explored(problem, best, neighbours)
    return _tie_broken(problem, known, best), neighbours, known


def _tie_broken(
    problem: PlanningProblem, known: Sequence[Configuration], result: Configuration
) -> Configuration:
    """The result, or one that is as good for the goal and better in another objective.

    The search for the goal ends without looking at all ties; those for the front find them.
    """
    for one in known:
        if one.excess(problem.limits) <= 0 and comes_before(one, result, problem.goal):
            result = one
    return result


def _document(
    problem: PlanningProblem,
    estimate: Estimate,
    joint: JointChoice,
    found: Sequence[SearchResult],
    neighbours: Sequence[Configuration],
    known: Sequence[Configuration],
    solve_time_s: float,
) -> Plan:
    """The plan as an artefact; `found` are the results of all global batches, largest first.

    `estimate` is of steps without recomputation.
    """
    job, rows, laid = problem.job, problem.model.data.train_rows, joint.laid
    result = laid.chosen.configuration
    chosen = _of_batch(found, result)
    found = sorted(
        [chosen, *(one for one in found if one.best and one.best.batch != result.batch)],
        key=lambda one: -(one.best.batch if one.best else 0),
    )
    gap = chosen.gap(problem.goal)
    if result.strategy != DATA_PARALLEL:  # the search knows nothing of other layouts
        gap = 1.0 if joint.gap is None else joint.gap
    window_s = result.available_s()
    used = [device for device, _ in result.devices()]
    staged = result.layout is not None and result.layout.has_stages
    most = max(job.train.batch_bounds[1], result.batch)
    held = {} if staged else most_samples(result, most)
    return Plan(
        feasible=True,
        objective=job.objective.minimize,
        devices=[
            planned(
                problem.model,
                device,
                batch,
                result.accumulation,
                most=held.get(device.id),
                need_bytes=laid.needs.get(device.id),
                compute_s=laid.compute_s.get(device.id),
            )
            for device, batch in result.devices()
        ],
        global_batch_size=result.batch,
        steps_per_epoch=math.ceil(rows / result.batch),
        epochs=job.train.epochs,
        links=links_between(problem.model, used) if len(used) > 1 else {},
        strategy={"name": result.strategy, "collective": "ring all-reduce"},
        layout=result.layout,
        layout_in_words=laid.chosen.words,
        layout_rule=laid.rule,
        by_layer=laid.by_layer,
        layers=_stored_layers(result),
        units=problem.model.estimate.units if staged else [],
        emulated_layers=_emulated_layers(estimate, result),
        predicted=result.cost.prediction().model_copy(
            update={"by_kind": predicted_by_kind(result)}
        ),
        not_exceeded=result.cost.not_exceeded(job.objective.confidence),
        deadline_s=job.objective.deadline,
        budget=job.objective.budget,
        alternatives=[
            *other_layouts(problem, laid.others, result),
            *alternatives(problem, chosen, neighbours, laid.others),
        ],
        front=front(problem, known, result),
        batches=[
            point(problem, one.best, chosen=one is chosen)
            for one in found[::-1]
            if one.best is not None
        ],
        accumulation=result.accumulation,
        batch_rule=batch_rule(problem),
        search="exact" if gap == 0 else "bounded",
        gap=gap,
        layouts_gap=joint.gap,
        searched=searched(
            problem,
            result,
            [result.strategy, *(one.configuration.strategy for one in laid.others)],
        ),
        window_s=None if math.isinf(window_s) else window_s,
        solve_time_s=solve_time_s,
    )


def _stored_layers(result: Configuration) -> list[LayerFacts]:
    """The layers that ranks have to know.

    Of those whose gradients are summed, the order of parameters is enough: it is the order in which
    the backward pass makes their gradients, reversed.
    """
    layers = result.topology.model.estimate.layers
    if result.layout is None:  # one device
        return []
    if result.strategy != DATA_PARALLEL:
        return layers
    return [
        LayerFacts(
            name=one.name,
            kind=one.kind,
            parameters=one.parameters,
            parameter_bytes=one.parameter_bytes,
        )
        for one in layers
        if one.parameters
    ]


def _emulated_layers(estimate: Estimate, result: Configuration) -> list[LayerCost]:
    """What an emulated device of the plan needs for each layer, done once."""
    found = [estimate.curve(device) for device, _ in result.devices()]
    curves = [curve for curve in found if curve.device_type == EMULATED]
    return list(curves[0].layers) if curves else []


def _of_batch(found: Sequence[SearchResult], result: Configuration) -> SearchResult:
    """The search of the result's global batch, with the result as its best."""
    for one in found:
        if one.best is not None and one.best.batch == result.batch:
            return replace(one, best=result)
    return SearchResult(result, 0.0, 0, [result])


def planned(
    model: CostModel,
    device: Device,
    batch: int,
    accumulation: int,
    most: int | None = None,
    need_bytes: float | None = None,
    compute_s: float | None = None,
) -> PlannedDevice:
    """A device with its share of each step.

    `most` is the largest share that fits in its memory. `need_bytes` is its peak memory with the
    plan's layout, and `compute_s` what it computes of a step; None: those of data parallel.
    """
    kind = model.kind(device)
    need = model.memory_bytes(kind, batch, accumulation) if need_bytes is None else need_bytes
    step_s, curve = kind.curve.step_time(batch, accumulation), kind.curve
    if compute_s is not None:
        low, high = (compute_s * factor for factor in (curve.low_factor, curve.high_factor))
        step_s = Interval(median=compute_s, low=low, high=high)
    return PlannedDevice(
        **device.model_dump(),
        batch_size=batch,
        cpu_threads=kind.curve.threads,
        step_time_s=step_s,
        loop_s=kind.curve.loop_part_s(batch, accumulation),
        most_batch_size=most,
        peak_memory_bytes=need,
        memory_bytes=kind.curve.memory_line(batch, need, accumulation),
        power=power_of(kind.curve),
        mode=kind.curve.mode,
    )
