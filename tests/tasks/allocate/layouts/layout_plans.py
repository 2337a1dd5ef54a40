"""Plans of models whose layers are known, on hosts with one device each."""

from __future__ import annotations

from typing import Any

from layout_cases import LOSS, convolution, dense_layer
from plans import DATA, curve

from trainwright.estimator.curves import Affine, LayerCost
from trainwright.estimator.structure import LayerFacts
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.runs.artefacts.estimate import Estimate
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.eligibility import usable
from trainwright.tasks.spec.job import Job
from trainwright.tasks.spec.pool import Pool

HEAVY = [
    convolution("conv", 5_000),
    dense_layer("fc6", 4096, 4096),
    dense_layer("fc7", 4096, 10),
    LOSS,
]
"""Nearly all parameters are in one dense layer."""
LIGHT = [convolution("conv", 500_000), dense_layer("fc", 16, 10), LOSS]
"""Nearly all parameters are in a convolution."""


def plan(*args: Any, **options: Any) -> Plan:
    """The plan of a `case`."""
    return plan_and_estimate(*args, **options)[0]


def plan_and_estimate(*args: Any, **train: Any) -> tuple[Plan, Estimate]:
    """The same, with the estimate that it is made from."""
    job, pool, estimate, data = case(*args, **train)
    return make_plan(job, pool, estimate, data), estimate


def problem(*args: Any, **train: Any) -> PlanningProblem:
    """The problem of the same plan."""
    job, pool, estimate, data = case(*args, **train)
    model = CostModel(job, pool, estimate, data)
    return PlanningProblem.of(job, model, usable(pool, job))


def case(
    layers: list[LayerFacts],
    network: str = "200Mbit",
    hosts: int = 2,
    cores: tuple[float, ...] = (1.0,),
    memory: float | None = None,
    fewest: int | None = None,
    objective: dict[str, Any] | None = None,
    fixed: float = 0.0,
    update: float = 0.0,
    **train: Any,
) -> tuple[Job, Pool, Estimate, Any]:
    """Job, pool, estimate and data of a model on hosts with one device each, for the least time.

    `cores` are those of the hosts, in turn; `memory` is each device's, in bytes. The plan has at
    least `fewest` devices; None: all.
    `fixed` seconds of each phase of a layer do not depend on the batch, nor do `update` seconds of
    the optimizer; they count in proportion to 0.1 ms for each sample of a phase.
    """
    pool = Pool.model_validate(
        {
            "name": "p",
            "network": {"bandwidth": network, "latency": "100us"},
            "hosts": [
                {
                    "name": f"host-{number}",
                    "address": f"10.0.0.{number + 1}",
                    "devices": [{"type": "cpu", "cores": cores[number % len(cores)]}],
                }
                for number in range(hosts)
            ],
        }
    )
    each = Affine(fixed=fixed, per_sample=1e-4)
    costs = tuple(
        LayerCost(name=one.name, forward=each, input_gradient=each, weight_gradient=each)
        for one in layers
    )
    state = 4 * sum(one.parameter_bytes for one in layers)  # AdamW: with gradients, two means
    peak = Affine(fixed=1e8 + state, per_sample=1e6)
    job = Job.model_validate(
        {
            "name": "j",
            "data": {"uri": "builtin:digits"},
            "objective": objective or {"minimize": "time"},
            "devices": {"min_count": hosts if fewest is None else fewest},
            "train": {"global_batch_size": 64, **train},
        }
    )
    estimate = Estimate(
        mode="calibrated",
        gradient_bytes=sum(one.parameter_bytes for one in layers),
        curves=[
            curve(one, memory).model_copy(
                update={
                    "layers": costs,
                    "peak_memory_bytes": peak,
                    "update": Affine(fixed=update, per_sample=0.0),
                    **_step_s(len(costs), fixed, update, one),
                }
            )
            for one in sorted({*cores})
        ],
        layers=layers,
    )
    return job, pool, estimate, DATA


def _step_s(layers: int, fixed: float, update: float, cores: float) -> dict[str, Affine]:
    """The step time, if parts of it do not depend on the batch."""
    if not (fixed or update):
        return {}
    whole = Affine(fixed=(3 * layers * fixed + update) / cores, per_sample=3e-4 * layers / cores)
    return {"step_time_s": whole}


def batches_of(plan: Plan) -> dict[str, int]:
    """The samples of a step, by device."""
    return {one.id: one.batch_size for one in plan.devices}


def step_s(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_time_s.median
