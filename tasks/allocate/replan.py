"""Makes a run's plan, and another one if the pool changed or a replan was requested.

Learning rate and checkpoint are valid only for the run's global batch. So another plan keeps the
global batch, and may change all else. While a training runs, only its layout is planned again, for
the devices that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from trainwright.tasks import progress
from trainwright.tasks.allocate.acquire import Planner, gone
from trainwright.tasks.allocate.actions.network import RankNetwork
from trainwright.tasks.allocate.actions.step_simulator import StepSimulator
from trainwright.tasks.allocate.layouts.choose import LayoutChoice, links_between
from trainwright.tasks.allocate.layouts.planning import laid_out
from trainwright.tasks.allocate.layouts.words import in_words
from trainwright.tasks.allocate.pipelines.pipeline_plans import PipelinePlanner
from trainwright.tasks.allocate.pipelines.pipeline_rules import why_no_pipeline
from trainwright.tasks.allocate.plan.configuration import Configuration, Limits
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.plan.kinds import Share
from trainwright.tasks.allocate.plan.placement import placements
from trainwright.tasks.allocate.plan.split import shares
from trainwright.tasks.allocate.plan.topology import Topology
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.errors import BadInput, Infeasible
from trainwright.tasks.estimate.step import predicted
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.layout import DATA_PARALLEL, Layout
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.runs.run import Run
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Device, Pool, load_pool
from trainwright.tasks.spec.train_spec import LayoutSpec


def planner(run: Run, data: DataSchema) -> Planner:
    """A planner for the run's first plan. Estimates again if the pool has other device kinds.

    The planner raises Infeasible.
    """
    job = run.job()

    def plan(devices: list[Device]) -> Plan:
        found = run.read(Estimate)
        if len(_known(devices, found)) < len(devices):
            pool = load_pool(job.pool).name
            progress.emit(
                "notice",
                message=f"plan: pool {pool} has other kinds of devices now; estimating again",
            )
            found = predicted(run)
            run.write(found)
        return make_plan(
            job, load_pool(job.pool), found, data, _known(devices, found), now=datetime.now(UTC)
        )

    return plan


def _known(devices: list[Device], estimate: Estimate) -> list[Device]:
    # the pool may have changed after the estimate
    kinds = {device.variant: device for device in devices}
    known = {variant for variant, device in kinds.items() if estimate.find(device) is not None}
    return [device for device in devices if device.variant in known]


def replanner(run: Run, data: DataSchema) -> Planner:
    """A planner that keeps the global batch, with a new estimate.

    The planner raises Infeasible, naming devices that are gone.
    """
    job = run.job()
    estimated = False

    def again(devices: list[Device]) -> Plan:
        nonlocal estimated
        before = run.read(Plan)
        train = job.train.model_copy(update={"global_batch_size": before.global_batch_size})
        lost, pool = ", ".join(gone(before, job)), load_pool(job.pool)
        if not estimated or len(_known(devices, run.read(Estimate))) < len(devices):
            why = f"pool {pool.name} no longer has {lost} as planned; " if lost else ""
            progress.emit("notice", message=f"plan: {why}planning again")
            estimated = True
            run.write(predicted(run))
        same_batch, found = job.model_copy(update={"train": train}), run.read(Estimate)
        try:
            return make_plan(
                same_batch,
                pool,
                found,
                data,
                _known(devices, found),
                now=datetime.now(UTC),
                continues=True,
            )
        except Infeasible as error:
            lacking = f"pool {pool.name} no longer has {lost} as planned, and without it, "
            why = lacking if lost else ""
            raise Infeasible(
                f"plan: {why}for the same global batch of {before.global_batch_size}: {error}",
                **error.details,
            ) from error

    return again


def require_devices(plan: Plan, job: Job) -> None:
    """Check that a plan's devices exist, for a plan that must not change. Raises BadInput."""
    lost = gone(plan, job)
    if lost:
        raise BadInput(
            f"--replay: its plan uses {', '.join(lost)}, "
            f"which pool {load_pool(job.pool).name} does not have; "
            "allowed: a pool with the devices of the replayed run"
        )


@dataclass(frozen=True)
class NextLayout:
    """A layout for a training that runs; None: it keeps the one that it has."""

    layout: Layout | None
    words: str = ""
    """the layout, for people"""


LayoutPlanner = Callable[
    [Sequence[Device], Sequence[int], int, Collection[str], bool, Mapping[str, float]], NextLayout
]
"""Plans a layout: of devices, their shares of a step, micro-batches, layers that must be summed.

And whether the plan has pipelines of several stages: shares then only say how large the batch is.
And how many times as long as estimated devices take, by id; without a word for one: 1.
"""


def layout_planner(job: Job, pool: Pool, estimate: Estimate, data: DataSchema) -> LayoutPlanner:
    """A planner of layouts for the devices that a training has left.

    It keeps the layout that the job names, and its deadline and budget do not count: they are to be
    met as nearly as possible. The planner raises BadInput if the model or the devices do not
    permit the job's layout, or if it does not let the given layers be summed.
    """

    def plan(
        devices: Sequence[Device],
        batches: Sequence[int],
        accumulation: int,
        summed: Collection[str],
        staged: bool,
        slower: Mapping[str, float],
    ) -> NextLayout:
        if staged:
            model = CostModel(job, pool, estimate, data, slower=slower)
            return _after_stages(job, model, devices, sum(batches))
        wanted, only = job.train.layout, job.train.dense
        if summed and only is not None:
            raise BadInput(f"train.layout: permits no other way for {', '.join(sorted(summed))}")
        if len(devices) == 1 and job.train.averages:
            return NextLayout(None)  # the job's layout, of one device
        layers = [
            one.model_copy(update={"dense": None}) if one.name in summed else one
            for one in estimate.layers
        ]
        known = estimate.model_copy(update={"layers": layers})
        model = CostModel(job, pool, known, data, slower=slower)
        result = _configured(model, devices, batches, accumulation)
        # One device has nothing to keep equal, whatever the job names.
        named = wanted if len(devices) > 1 else DATA_PARALLEL
        found = laid_out(result, named, job.objective.minimize, Limits()).chosen
        if (layout := found.configuration.layout) is not None:
            return NextLayout(layout, found.words)
        layout = LayoutChoice(result).layout({})
        return NextLayout(layout, in_words(layout, layers, 0.0, 0.0))

    return plan


def _after_stages(job: Job, model: CostModel, devices: Sequence[Device], batch: int) -> NextLayout:
    """The best of pipelines and whole models on the devices that a pipeline has left.

    Raises Infeasible if their memory holds neither.
    """
    train = job.train.model_copy(update={"global_batch_size": batch, "layout": "auto"})
    limits = job.devices.model_copy(update={"min_count": len(devices)})
    open_job = job.model_copy(update={"train": train, "devices": limits})
    problem = replace(PlanningProblem.of(open_job, model, list(devices)), limits=Limits())
    times = [model.kind(device).curve.median_s(batch) for device in devices]
    sizes = shares(batch, [round(1e6 * min(times) / one) for one in times])
    goal = job.objective.minimize
    whole = laid_out(_configured(model, devices, sizes, 1), "auto", goal, Limits()).chosen
    found = [whole]
    if why_no_pipeline(problem) is None:
        asked = job.train.pipeline or LayoutSpec()
        numbers = {"name": "pipeline", "stages": None, "replicas": None, "micro_batches": None}
        spec = asked.model_copy(update=numbers)
        planner = PipelinePlanner(problem, spec)
        found += [one.candidate for one in planner.plans(batch)]
    every = {device.id for device in devices}
    fitting = [
        one
        for one in found
        if one.shortage is None
        and (one.configuration.layout is None or {*one.configuration.layout.devices} == every)
    ]
    if not fitting:
        raise Infeasible("no layout fits into the memory of the devices that are left")
    best = min(fitting, key=lambda one: one.configuration.value(goal))
    layout = best.configuration.layout
    if layout is None:
        layout = LayoutChoice(best.configuration).layout({})
    return NextLayout(layout, best.words or layout.name)


@dataclass(frozen=True)
class StepTimes:
    """A layout's simulated step."""

    step_s: float
    compute_s: Mapping[str, float]
    """by device id"""


class StagePlanner:
    """Plans the pipelines of a training that runs by the speeds that its devices have now.

    In both methods, `slower` says how many times as long as estimated devices take, by id.
    """

    def __init__(self, job: Job, pool: Pool, estimate: Estimate, data: DataSchema) -> None:
        self._job, self._pool, self._estimate, self._data = job, pool, estimate, data

    def plan(
        self, devices: Sequence[Device], batch: int, slower: Mapping[str, float]
    ) -> NextLayout | None:
        """The best pipelines of all these devices; None if no other layout is possible."""
        wanted = self._job.train.layout
        spec = wanted if isinstance(wanted, LayoutSpec) else LayoutSpec(name="pipeline")
        train = self._job.train.model_copy(update={"global_batch_size": batch, "layout": spec})
        counts = self._job.devices.model_copy(update={"min_count": len(devices)})
        job = self._job.model_copy(update={"train": train, "devices": counts})
        problem = PlanningProblem.of(job, self._model(slower), list(devices))
        problem = replace(problem, limits=Limits())
        every = {device.id for device in devices}
        for one in PipelinePlanner(problem, spec).plans(batch):
            layout = one.candidate.configuration.layout
            if one.candidate.shortage is None and layout and {*layout.devices} == every:
                return NextLayout(layout, one.candidate.words)
        return None

    def times(
        self, layout: Layout, devices: Sequence[Device], slower: Mapping[str, float]
    ) -> StepTimes:
        """What a step of a layout takes."""
        model, by_id = self._model(slower), {device.id: device for device in devices}
        placed = [by_id[one] for one in layout.devices]
        network = RankNetwork.of(placed, links_between(model, placed))
        curves = [model.kind(device).curve for device in placed]
        estimate = model.estimate
        simulator = StepSimulator(
            estimate.layers, curves, network, estimate.units, estimate.pass_cost
        )
        step = simulator(layout)
        return StepTimes(step.step_s, dict(zip(layout.devices, step.compute_s(), strict=True)))

    def _model(self, slower: Mapping[str, float]) -> CostModel:
        return CostModel(self._job, self._pool, self._estimate, self._data, slower=slower)


def _configured(
    model: CostModel, devices: Sequence[Device], batches: Sequence[int], accumulation: int
) -> Configuration:
    """The data parallel configuration of exactly these devices with these shares."""
    topology = Topology(model, devices)
    counts = tuple(topology.counts_of(devices))
    placement = placements(topology, counts)[-1]
    shares = tuple(
        Share(model.kind(device), batch, 1) for device, batch in zip(devices, batches, strict=True)
    )
    collectives = topology.collectives.time(placement.ring)
    cost = model.cost(shares, collectives, sum(batches), accumulation)
    return Configuration(
        topology, counts, placement, shares, sum(batches), accumulation, cost, DATA_PARALLEL
    )
