"""Layouts for a training that runs: for the devices that it has left, and by measured speeds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from trainwright.tasks.allocate.actions.network import RankNetwork
from trainwright.tasks.allocate.actions.step_simulator import StepSimulator
from trainwright.tasks.allocate.batch_choice import choose_batch
from trainwright.tasks.allocate.infeasible.binding_limits import infeasible
from trainwright.tasks.allocate.layouts.choose import LayoutChoice, links_between
from trainwright.tasks.allocate.layouts.planning import LayoutCandidate, laid_out
from trainwright.tasks.allocate.layouts.words import in_words
from trainwright.tasks.allocate.pipelines.pipeline_plans import PipelinePlanner
from trainwright.tasks.allocate.pipelines.pipeline_rules import why_no_pipeline
from trainwright.tasks.allocate.plan.configuration import Configuration, Limits
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.plan.kinds import Share
from trainwright.tasks.allocate.plan.placement import placements
from trainwright.tasks.allocate.plan.topology import Topology
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.allocate.recompute_search import recomputing
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.layout import DATA_PARALLEL, Layout
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Device, Pool
from trainwright.tasks.spec.train_spec import LayoutSpec


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
    permit the job's layout, or if it does not let the given layers be summed; after stages,
    Infeasible if no layout fits into the devices' memory.
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
            return _after_stages(job, model, devices, sum(batches), accumulation)
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


def _after_stages(
    job: Job, model: CostModel, devices: Sequence[Device], batch: int, accumulation: int
) -> NextLayout:
    """The best of pipelines and whole models on all the devices that a pipeline has left.

    Raises Infeasible if their memory holds neither.
    """
    asked = job.train.pipeline or LayoutSpec()
    whole = "auto" if asked.recompute == "auto" else LayoutSpec(recompute=asked.recompute)
    train = job.train.model_copy(update={"global_batch_size": batch, "layout": whole})
    counts = {"min_count": len(devices), "max_count": len(devices)}
    limits = job.devices.model_copy(update=counts)
    problem = PlanningProblem.of(
        job.model_copy(update={"train": train, "devices": limits}),
        model,
        list(devices),
        accumulation,
    )
    problem = replace(problem, limits=Limits())
    numbers = {"name": "pipeline", "stages": None, "replicas": None, "micro_batches": None}
    found = _whole_models(problem)
    if why_no_pipeline(problem) is None:
        planner = PipelinePlanner(problem, asked.model_copy(update=numbers))
        found += [one.candidate for one in planner.plans(batch)]
    fitting = [one for one in found if one.shortage is None]
    if not fitting:
        raise infeasible(problem)
    best = min(fitting, key=lambda one: one.configuration.value(problem.goal))
    layout = best.configuration.layout or LayoutChoice(best.configuration).layout({})
    return NextLayout(layout, best.words or layout.name)


def _whole_models(problem: PlanningProblem) -> list[LayoutCandidate]:
    """The best layouts in which each device has the whole model, with and without recomputation."""
    chosen, _ = choose_batch(problem)
    plain = None if chosen is None else chosen.best
    found = []
    if plain is not None and problem.job.train.recomputes != "all":
        found.append(laid_out(plain, "auto", problem.goal, problem.limits).chosen)
    if (again := recomputing(problem, plain)) is not None:
        found.append(again.laid_out(again.best, plain).chosen)
    return found


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
        return StepTimes(step.step_s, dict(zip(layout.devices, step.computed_s, strict=True)))

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
