"""Which memory binds if no plan fits: the device, and how many bytes the nearest plan needs."""

from __future__ import annotations

from collections.abc import Sequence

from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.layouts.memory import state_tensors
from trainwright.tasks.allocate.layouts.permitted import why_not
from trainwright.tasks.allocate.layouts.planning import LayoutCandidate
from trainwright.tasks.allocate.pipelines.choose_pipeline import nearest_pipeline
from trainwright.tasks.allocate.plan.configuration import Limits
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.allocate.strategies import best
from trainwright.tasks.errors import Infeasible
from trainwright.tasks.units import counted, size


def nothing_fits(problem: PlanningProblem, *, recomputes: bool = False) -> Infeasible:
    """The error if no device holds a sample: figures of the device with the most memory.

    `recomputes`: whether the problem's devices recompute all that saves memory. If the model may be
    cut, also the pipeline that comes closest.
    """
    count, kinds = problem.job.devices.min_count, problem.topology.kinds
    least = next(size for size in problem.sizes if size >= count)  # a sample for each device
    roomiest = max((kind.curve for kind in kinds), key=lambda curve: curve.memory_limit_bytes or 0)
    rows, where = _in_rows(problem)
    need = (roomiest.device_memory_bytes(1) - rows) / 2**30
    have = (roomiest.memory_limit_bytes or 0) / 2**30
    shared = ", which its ranks share" if any(kind.shares_memory for kind in kinds) else ""
    measured = "".join(
        f"; in earlier runs, {kind.device_type} could hold {kind.curve.most_batch_size} at once"
        for kind in kinds
        if kind.curve.most_batch_size is not None
    )
    kept = problem.model.kept_bytes(2) / 2**30
    gradients = (
        f" (and {1024 * kept:,.0f} MiB for gradients between micro-batches)"
        if need <= have < need + kept
        else ""
    )
    again = " even with recomputation" if recomputes else ""
    takes = f"one sample takes {need:.2f} GiB{where}{again}{gradients}"
    staged = nearest_pipeline(problem)
    staged = staged if staged is not None and staged.shortage is not None else None
    closest = "" if staged is None else f"; nearest with {_named(staged)}: {staged.shortage}"
    details: dict[str, object] = {
        "device": roomiest.device_type,
        "needed_bytes": round(roomiest.device_memory_bytes(1) - rows),
        "memory_bytes": round(roomiest.memory_limit_bytes or 0),
    }
    if staged is not None and staged.shortage is not None:
        details |= {"layout": staged.configuration.strategy, **staged.shortage.details}
    return Infeasible(
        f"no feasible plan: memory binds: a global batch of {least} does not fit"
        f"{_largest_that_fits(problem, least)}; {takes}, {roomiest.device_type} has {have:.2f} GiB"
        f"{shared}{_largest_layer(problem)}{measured}{closest}",
        feasible=False,
        binding="memory",
        **details,
    )


def too_little_memory(
    problem: PlanningProblem, candidates: Sequence[LayoutCandidate], given: str
) -> Infeasible:
    """The error if none of the layouts fits: which device would need how much for the nearest one.

    `given` names the layout that the job asks for; empty: the planner may choose, and the pipeline
    that comes closest is looked at too.
    """
    every = list(candidates)
    staged = None if given else nearest_pipeline(problem)
    every += [] if staged is None else [staged]
    short = [(one, one.shortage) for one in every if one.shortage is not None]
    one, shortage = min(short, key=lambda pair: pair[1].over_bytes)
    name = f"train.layout: {given}" if given else f"nearest with {_named(one)}"
    return Infeasible(
        f"no feasible plan: memory binds: {name}: {shortage}",
        feasible=False,
        binding="memory",
        layout=one.configuration.strategy,
        **shortage.details,
    )


def _named(one: LayoutCandidate) -> str:
    """Its layout and the number of devices."""
    configuration = one.configuration
    layout = configuration.layout
    again = " with recomputation" if layout is not None and layout.recomputes else ""
    return f"layout {configuration.strategy}{again} on {counted(configuration.size, 'device')}"


def _in_rows(problem: PlanningProblem) -> tuple[float, str]:
    """Bytes that each device saves if the job has layers sharded by rows, with words for it."""
    train, most = problem.job.train, problem.job.devices.max_count
    count = min(len(problem.devices), most or len(problem.devices))
    layers = [one for one in problem.model.estimate.layers if why_not(one, "rows") is None]
    if train.dense != "rows" or count < 2 or not layers:
        return 0.0, ""
    state = state_tensors(train.optimizer) * sum(one.parameter_bytes for one in layers)
    return state * (1 - 1 / count), f" with layers sharded on {count} devices"


def _largest_layer(problem: PlanningProblem) -> str:
    """The layer that takes most of a device's memory, in words; empty if layers are not known."""
    tensors = state_tensors(problem.job.train.optimizer)

    def held(layer: LayerFacts) -> float:
        return tensors * layer.parameter_bytes + layer.kept_bytes(1)

    largest = max(problem.model.estimate.layers, key=held, default=None)
    if largest is None or not held(largest):
        return ""
    return (
        f"; most is for the layer {largest.name}: {size(held(largest))}, of which "
        f"{size(tensors * largest.parameter_bytes)} is its parameters with gradients and the "
        "optimizer's state"
    )


def _largest_that_fits(problem: PlanningProblem, batch: int) -> str:
    """The largest smaller global batch that fits, in words; empty if none does."""
    low, high = problem.job.devices.min_count - 1, batch
    while high - low > 1:
        middle = (low + high) // 2
        fits = best(problem.request(middle, "upper_time", Limits())).best is not None
        low, high = (middle, high) if fits else (low, middle)
    fits_some = low >= problem.job.devices.min_count
    return f"; the largest that fits is {low}" if fits_some else ""
