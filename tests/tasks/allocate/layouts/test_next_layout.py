"""The layout of a running training is planned again, for the devices that are left."""

from __future__ import annotations

from typing import Any

import pytest
from layout_cases import LOSS, convolution, dense_layer
from layout_plans import HEAVY, LIGHT, case
from pipeline_cases import blocks, units_of

from trainwright.estimator.curves import Affine
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.allocate.replan.next_layout import LayoutPlanner, NextLayout, layout_planner
from trainwright.tasks.errors import BadInput, Infeasible
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.eligibility import usable


def planned(*args: Any, **options: Any) -> tuple[Plan, LayoutPlanner]:
    """A plan, and the planner of what follows."""
    job, pool, estimate, data = case(*args, **options)
    return make_plan(job, pool, estimate, data), layout_planner(job, pool, estimate, data)


def on(plan: Plan, planner: LayoutPlanner, *members: int, summed: tuple[str, ...] = ()) -> Layout:
    found = planned_on(plan, planner, *members, summed=summed)
    assert found.layout is not None
    return found.layout


def planned_on(
    plan: Plan, planner: LayoutPlanner, *members: int, summed: tuple[str, ...] = ()
) -> NextLayout:
    devices = [plan.devices[number] for number in members]
    batches = [one.batch_size for one in devices]
    return planner(devices, batches, plan.accumulation, summed, False, {})


@pytest.mark.parametrize("layers", [HEAVY, LIGHT])
@pytest.mark.parametrize("layout", ["auto", "late-multiply", "sharded", "hybrid", "averaging"])
def test_for_all_devices_it_is_the_plans(layers: Any, layout: str) -> None:
    plan, planner = planned(layers, hosts=3, cores=(1.0, 0.5, 0.25), layout=layout)
    assert on(plan, planner, 0, 1, 2) == plan.layout


def test_with_some_left_it_is_of_these_with_their_shares() -> None:
    plan, planner = planned(HEAVY, hosts=3, cores=(1.0, 0.5, 0.25))
    found = planned_on(plan, planner, 0, 2)
    assert found.layout is not None
    assert found.layout.devices == [plan.devices[0].id, plan.devices[2].id]
    assert [one.micro_batches for one in found.layout.pipelines] == [
        [plan.devices[0].batch_size],
        [plan.devices[2].batch_size],
    ]
    assert "on 2 devices" in found.words


@pytest.mark.parametrize(
    "layout", ["auto", "late-multiply", "sharded", "hybrid", {"dense": "rows"}]
)
def test_one_device_alone_is_data_parallel(layout: Any) -> None:
    plan, planner = planned(HEAVY, layout=layout)
    assert plan.layout is not None
    assert plan.layout.sync
    found = planned_on(plan, planner, 1)
    assert found.words == "all layers data parallel on one device"
    assert found.layout is not None
    assert (found.layout.name, found.layout.sync) == ("data-parallel", {})


@pytest.mark.parametrize(
    "layout",
    ["late-multiply", "sharded", "hybrid", "averaging", "mixed", {"dense": "rows"}],
)
def test_a_layout_that_the_job_names_stays(layout: Any) -> None:
    plan, planner = planned(HEAVY, hosts=3, layout=layout)
    assert plan.layout is not None
    assert on(plan, planner, 0, 1).name == plan.layout.name


def test_a_device_that_is_slower_than_estimated_holds_fewer_rows() -> None:
    plan, planner = planned(HEAVY, hosts=3, layout="sharded")
    devices = plan.devices[:2]
    slow, fast = (one.id for one in devices)

    def rows(slower: dict[str, float]) -> int:
        layout = planner(devices, [32, 32], plan.accumulation, (), False, slower).layout
        assert layout is not None
        begin, end = layout.rows["fc6"][slow]
        return end - begin

    assert rows({slow: 2.0}) < rows({}) < rows({fast: 2.0})


def test_after_pipelines_a_device_that_is_slower_than_estimated_computes_less() -> None:
    layers = blocks()
    job, pool, estimate, data = case(layers, layout="pipeline", hosts=4, network="10Gbit")
    known = estimate.model_copy(update={"units": units_of(layers)})
    plan, planner = make_plan(job, pool, known, data), layout_planner(job, pool, known, data)
    left = plan.devices[1:]
    slow = left[0].id

    def work(slower: dict[str, float]) -> float:
        """The part of a step's work that the device has."""
        layout = planner(left, [20, 20, 20], 1, (), True, slower).layout
        assert layout is not None
        each = {
            stage.device: sum(one.micro_batches) * (len(stage.layers) or len(known.units))
            for one in layout.pipelines
            for stage in one.stages
        }
        return each[slow] / sum(each.values())

    assert work({slow: 4.0}) < work({}) == pytest.approx(1 / 3, abs=0.1)


def test_pipelines_that_are_planned_again_keep_the_jobs_schedule() -> None:
    layers = blocks(5_000_000)
    wanted = {"name": "pipeline", "schedule": "gpipe", "stages": 4, "recompute": "none"}
    job, pool, estimate, data = case(layers, layout=wanted, hosts=4, network="100Mbit")
    known = estimate.model_copy(update={"units": units_of(layers)})
    plan, planner = make_plan(job, pool, known, data), layout_planner(job, pool, known, data)
    layout = planner(plan.devices[1:], [20, 20, 20], 1, (), True, {}).layout
    assert layout is not None
    assert layout.name == "pipeline"
    assert layout.schedule == "gpipe"


def after_one_is_lost(memory: float, **wanted: Any) -> Layout:
    """The layout of three of four devices with so much memory."""
    layers = blocks(5_000_000, Affine(fixed=0.0, per_sample=4e6))
    given = {"layout": {"name": "pipeline", **wanted}, "hosts": 4, "memory": memory}
    job, pool, estimate, data = case(layers, network="10Gbit", **given)
    known = estimate.model_copy(update={"units": units_of(layers)})
    devices = usable(pool, job)[1:]
    layout = layout_planner(job, pool, known, data)(devices, [20, 22, 22], 4, (), True, {}).layout
    assert layout is not None
    assert {*layout.devices} == {one.id for one in devices}
    return layout


def test_after_pipelines_no_device_takes_more_than_its_memory_holds() -> None:
    """The whole model takes 0.86 GiB with one sample."""
    layout = after_one_is_lost(6e8)
    assert layout.has_stages
    assert all(stage.layers for one in layout.pipelines for stage in one.stages)


def test_after_pipelines_it_is_infeasible_if_no_layout_fits() -> None:
    with pytest.raises(Infeasible) as raised:
        after_one_is_lost(4e8)
    assert "memory binds" in str(raised.value)
    assert "nearest with layout pipeline on 3 devices" in str(raised.value)
    assert raised.value.details["binding"] == "memory"


@pytest.mark.parametrize("layout", ["averaging", "mixed"])
def test_averages_stay_on_one_device(layout: str) -> None:
    plan, planner = planned(HEAVY, hosts=3, layout=layout)
    assert planned_on(plan, planner, 2).layout is None


def test_layers_whose_joint_work_did_not_fit_are_summed() -> None:
    layers = [
        convolution("conv", 5_000),
        dense_layer("fc6", 4096, 4096),
        dense_layer("fc7", 4096, 4000),
        LOSS,
    ]
    for layout in ("auto", "hybrid", "mixed", {"factor_type": "bf16"}):
        plan, planner = planned(layers, layout=layout)
        assert plan.layout is not None
        assert plan.layout.sync["fc7"] != "sum"
        found = on(plan, planner, 0, 1, summed=("fc6",))
        assert found.how("fc6") in ("sum", "average")


@pytest.mark.parametrize("layout", ["sharded", "late-multiply", {"dense": "rows"}])
def test_a_layout_without_another_way_is_an_error(layout: Any) -> None:
    plan, planner = planned(HEAVY, layout=layout)
    with pytest.raises(BadInput, match=r"train.layout: permits no other way for fc6"):
        planned_on(plan, planner, 0, 1, summed=("fc6",))
