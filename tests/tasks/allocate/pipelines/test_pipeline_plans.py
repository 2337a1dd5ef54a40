"""Plans with pipelines: as the job says, compared with other layouts, or the only one that fits."""

from __future__ import annotations

from typing import Any

import pytest
from layout_cases import LOSS, dense_layer
from layout_plans import case, step_s
from pipeline_cases import blocks, pipeline_plan_and_estimate, units_of

from trainwright.tasks.allocate.layouts.permitted import require_permitted
from trainwright.tasks.allocate.pipelines.pipeline_rules import why_no_pipeline
from trainwright.tasks.allocate.plan.cost import CostModel
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.allocate.problem import PlanningProblem
from trainwright.tasks.errors import BadInput, Infeasible
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.eligibility import usable


def planned(*args: Any, **options: Any) -> Plan:
    """The plan of a model of blocks; see `pipeline_plan_and_estimate`."""
    return pipeline_plan_and_estimate(*args, **options)[0]


def samples(plan: Plan) -> dict[str, int]:
    return {one.id: one.batch_size for one in plan.devices}


def test_the_job_asks_for_a_pipeline() -> None:
    plan = planned(layout={"schedule": "1f1b", "micro_batches": 8}, network="10Gbit")
    layout = plan.layout
    assert layout is not None
    assert (layout.name, len(layout.pipelines)) == ("pipeline", 1)
    require_permitted(layout, plan.layers, samples(plan), plan.units)
    assert [one.id for one in plan.devices] == layout.devices
    assert samples(plan) == dict.fromkeys(layout.devices, 64)
    assert plan.layout_rule == "as train.layout says"
    assert "2 stages: blocks.0–blocks.4 on " in plan.layout_in_words
    assert "; 8 micro-batches, 1f1b, bubble 1" in plan.layout_in_words
    assert plan.strategy["name"] == "pipeline"
    assert plan.predicted is not None
    assert len(plan.predicted.by_kind) == 2
    for one in plan.devices:
        assert 0 < one.step_time_s.median < step_s(plan)
    others = [one for one in plan.alternatives if one.layout == "data-parallel"]
    assert others


def test_the_jobs_numbers_are_in_the_layout() -> None:
    wanted = {"stages": 2, "replicas": 2, "micro_batches": 4, "schedule": "gpipe"}
    plan = planned(layout=wanted, hosts=4)
    layout = plan.layout
    assert layout is not None
    assert layout.schedule == "gpipe"
    assert [len(one.stages) for one in layout.pipelines] == [2, 2]
    assert [len(one.micro_batches) for one in layout.pipelines] == [4, 4]
    assert sum(sum(one.micro_batches) for one in layout.pipelines) == 64
    assert plan.layout_in_words.startswith("2 pipelines: 2 stages: ")
    assert "4 micro-batches, gpipe, bubble" in plan.layout_in_words


def test_a_faster_replica_gets_more_samples() -> None:
    wanted = {"stages": 2, "replicas": 2, "micro_batches": 2}
    plan = planned(layout=wanted, hosts=4, cores=(1.0, 1.0, 1.0, 2.0), network="10Gbit")
    assert plan.layout is not None
    sizes = sorted(sum(one.micro_batches) for one in plan.layout.pipelines)
    assert sizes[0] < sizes[1]
    assert sum(sizes) == 64


def test_unlike_devices_get_stages_by_their_speed() -> None:
    plan = planned(layout={"stages": 2, "micro_batches": 8}, cores=(1.0, 3.0), network="10Gbit")
    assert plan.layout is not None
    held = {stage.device: len(stage.layers) for stage in plan.layout.pipelines[0].stages}
    assert sorted(held.values()) == [2, 6]
    assert held["host-1/cpu-0"] == 6


def test_dense_layers_that_two_pipelines_hold_are_late_multiplied_if_the_job_says_so() -> None:
    dense = [dense_layer(f"fc{number}", 64, 64) for number in range(4)]
    wanted = {"stages": 2, "replicas": 2, "micro_batches": 2, "dense": "factors"}
    plan = planned([*dense, LOSS], layout=wanted, hosts=4)
    assert plan.layout is not None
    assert set(plan.layout.sync.values()) == {"factors"}
    assert plan.layout.name == "pipeline"
    assert plan.layout_in_words.endswith("; fc0, fc1, fc2, fc3 late-multiply between the pipelines")
    rows = planned([*dense, LOSS], layout={**wanted, "dense": "rows", "schedule": "gpipe"}, hosts=4)
    assert rows.layout is not None
    assert set(rows.layout.rows) == {"fc0", "fc1", "fc2", "fc3"}


def test_auto_takes_a_pipeline_that_is_clearly_better_and_says_why_others_lost() -> None:
    """Gradients of 32 MB take 1.3 s on a link of 200 Mbit/s, in a step of 77 ms."""
    plan = planned()
    assert plan.layout is not None
    assert plan.layout.name == "pipeline"
    assert "% less time than " in (plan.layout_rule or "")
    assert plan.layouts_gap is not None
    assert 0 < plan.gap == plan.layouts_gap < 1
    given = planned(layout="data-parallel")
    assert step_s(plan) < 0.9 * step_s(given)
    (other,) = [one for one in plan.alternatives if one.layout == "data-parallel"]
    assert "times as long, of which devices compute for at most " in other.reason


def test_auto_takes_no_pipeline_if_a_layer_has_statistics_of_the_batch() -> None:
    """Its one micro-batch leaves only one stage at work."""
    layers = blocks(elements=1000)
    units = units_of(layers)
    units[3] = units[3].model_copy(update={"batch_statistics": True})
    plan = planned(layers, units)
    assert plan.layout is not None
    assert plan.layout.name == "data-parallel"
    (other,) = [one for one in plan.alternatives if one.layout == "pipeline"]
    assert "1 micro-batch, " in other.layout_in_words
    assert "bubble " in other.layout_in_words


def test_a_batch_that_changes_permits_no_pipeline() -> None:
    train = {"adaptive_batch": True, "global_batch_size": 64, "batch_bounds": [64, 128]}
    plan = planned(**train)
    assert plan.layout is not None
    assert plan.layout.name == "data-parallel"


@pytest.mark.parametrize("hosts", [4, 12])
def test_auto_takes_a_pipeline_of_some_of_the_devices(hosts: int) -> None:
    """Among many devices the search is brief: it cuts at any unit only for the best pipelines."""
    layers = blocks()
    plan = planned(layers, units_of(layers, 1e3), hosts=hosts, fewest=2)
    layout = plan.layout
    assert layout is not None
    require_permitted(layout, plan.layers, samples(plan), plan.units)
    assert layout.name == "pipeline"
    assert "data-parallel" in {one.layout for one in plan.alternatives}


def test_auto_lists_the_pipeline_among_the_alternatives() -> None:
    plan = planned(blocks(elements=1000))
    assert plan.layout is not None
    assert plan.layout.name == "data-parallel"
    pipelines = [one for one in plan.alternatives if one.layout == "pipeline"]
    assert len(pipelines) == 1
    assert "stages: blocks.0" in pipelines[0].layout_in_words


def test_a_model_that_fits_no_device_gets_a_pipeline() -> None:
    """The state of all blocks takes 128 MB; a device has as much for half of them, and more."""
    layers = blocks(elements=8_000_000)
    memory = 4e8
    with pytest.raises(Infeasible, match="memory binds"):
        planned(layers, [], memory=memory)
    plan = planned(layers, memory=memory, hosts=4)
    assert plan.layout is not None
    assert plan.layout.name == "pipeline"
    assert plan.layout_rule == "the only layout that fits"
    for one in plan.devices:
        assert one.peak_memory_bytes <= memory


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"units": []}, "got 'pipeline': the model can't be cut into stages: it has no place"),
        (
            {"units": [], "not_cut": "a loop in body reads a value"},
            "the model can't be cut into stages: a loop in body reads a value",
        ),
        ({"hosts": 1}, "got 'pipeline': pipelines need two devices; the job may use one"),
        ({"layers": []}, "the estimate does not say what each layer costs"),
        ({"layout": {"stages": 9}, "hosts": 9}, r"layout.stages: got 9; the model has 8 units"),
        ({"layout": {"stages": 3}}, r"layout.stages: got 3, which takes 3 devices; the job may"),
        ({"layout": {"replicas": 2}}, r"layout.replicas: got 2, which takes 4 devices; the job"),
        ({"layout": {"micro_batches": 65}}, r"layout.micro_batches: got 65; allowed: at most the"),
    ],
)
def test_a_pipeline_that_is_not_possible_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        planned(**{"layout": "pipeline", **options})


def test_a_device_of_which_the_layers_are_not_known_gets_no_stage() -> None:
    layers = blocks()
    job, pool, estimate, data = case(layers, cores=(1.0, 2.0))
    first, second = estimate.curves
    curves = [first, second.model_copy(update={"layers": ()})]
    known = estimate.model_copy(update={"units": units_of(layers), "curves": curves})
    model = CostModel(job, pool, known, data)
    problem = PlanningProblem.of(job, model, usable(pool, job))
    assert "does not say what each layer costs" in str(why_no_pipeline(problem))


def test_joint_statistics_allow_one_micro_batch() -> None:
    layers = blocks()
    units = units_of(layers)
    units[3] = units[3].model_copy(update={"batch_statistics": True})
    plan = planned(layers, units, layout="pipeline")
    assert plan.layout is not None
    assert [len(one.micro_batches) for one in plan.layout.pipelines] == [1]
    assert plan.layout_in_words.endswith("; batch norms use statistics of the joint batch")
    with pytest.raises(BadInput, match=r"micro_batches: got 4; allowed: 1: blocks.3 normalises"):
        planned(layers, units, layout={"micro_batches": 4})


def test_a_job_may_say_that_each_micro_batch_has_statistics_of_its_own() -> None:
    layers = blocks()
    units = units_of(layers)
    wanted = {"micro_batches": 4, "batch_norm": "micro-batch"}
    with pytest.raises(BadInput, match=r"batch_norm: got 'micro-batch'; the model has no layer th"):
        planned(layers, units, layout=wanted)
    units[3] = units[3].model_copy(update={"batch_statistics": True})
    plan = planned(layers, units, layout=wanted)
    assert plan.layout is not None
    assert plan.layout.batch_norm == "micro-batch"
    assert [len(one.micro_batches) for one in plan.layout.pipelines] == [4]
    assert plan.layout_in_words.endswith("; batch norms use statistics of each micro-batch")
    require_permitted(plan.layout, plan.layers, samples(plan), plan.units)


@pytest.mark.parametrize("goal", ["energy", "time"])
def test_a_pipeline_serves_the_jobs_objective(goal: str) -> None:
    plan = planned(layout="pipeline", hosts=4, fewest=2, objective={"minimize": goal})
    assert plan.predicted is not None
    assert plan.predicted.energy_j is not None
    assert 2 <= len(plan.devices) <= 4
    for one in (plan.predicted.step_time_s, plan.predicted.duration_s, plan.predicted.energy_j):
        assert 0 < one.low <= one.median <= one.high


def test_the_least_cost_is_that_of_a_pipeline_of_the_devices_that_give_most_for_the_money() -> None:
    """A device costs the same with one core as with four; the model fits on no three of them."""
    layers = blocks(elements=8_000_000)
    cores, goal = (1.0, 4.0), {"minimize": "cost"}
    job, pool, estimate, data = case(
        layers, cores=cores, hosts=8, memory=4e8, fewest=1, objective=goal, network="10Gbit"
    )
    priced = pool.model_copy(update={"prices": {"cpu": 1.0}})
    known = estimate.model_copy(update={"units": units_of(layers)})
    cheap = make_plan(job, priced, known, data)
    assert cheap.layout is not None
    assert cheap.layout.name == "pipeline"
    assert {one.cores for one in cheap.devices} == {4.0}
    quick = {"minimize": "time", "budget": 1.001 * cost_of(cheap)}
    job = job.model_copy(update={"objective": job.objective.model_validate(quick)})
    within = make_plan(job, priced, known, data)
    assert within.not_exceeded is not None
    assert within.not_exceeded.cost is not None
    assert within.not_exceeded.cost <= 1.001 * cost_of(cheap)


def cost_of(plan: Plan) -> float:
    assert plan.not_exceeded is not None
    assert plan.not_exceeded.cost is not None
    return plan.not_exceeded.cost
