"""Devices and layout are chosen together, within memory and the limits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import LOSS, convolution, dense_layer
from layout_plans import HEAVY, LIGHT, case, plan, problem, step_s

from trainwright.tasks.allocate.layout_search import with_devices
from trainwright.tasks.allocate.layouts.planning import laid_out
from trainwright.tasks.allocate.layouts.relaxation import MOST_DEVICES
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.allocate.strategies import best
from trainwright.tasks.errors import Infeasible
from trainwright.tasks.runs.artefacts.plan import Plan
from trainwright.tasks.spec.pool import Pool

WIDE = [convolution("conv", 5_000), dense_layer("fc", 8192, 8192), LOSS]
"""Its dense layer has 268 MB of parameters."""


def peak_bytes(plan: Plan) -> list[float]:
    return [one.peak_memory_bytes for one in plan.devices]


def test_a_slow_network_lets_data_parallel_use_one_device_and_a_hybrid_several() -> None:
    pool: dict[str, Any] = {"network": "1Gbit", "hosts": 4, "fewest": 1}
    plain = plan(HEAVY, **pool, layout="data-parallel", global_batch_size=256)
    chosen = plan(HEAVY, **pool, global_batch_size=256)
    assert len(plain.devices) == 1
    assert len(chosen.devices) > 1
    assert chosen.strategy["name"] == "hybrid"
    assert step_s(chosen) < 0.9 * step_s(plain)
    assert chosen.layouts_gap is not None
    assert 0 <= chosen.layouts_gap < 1


def test_a_named_layout_gets_several_devices_even_if_one_would_be_faster() -> None:
    assert len(plan(HEAVY, fewest=1).devices) == 1
    made = plan(HEAVY, fewest=1, layout="sharded")
    assert len(made.devices) == 2
    assert made.strategy["name"] == "hybrid"
    rule = "sharded, as train.layout says, of the layers that permit it, so the whole is hybrid"
    assert made.layout_rule == rule


@pytest.mark.parametrize("part", [{"chunk_bytes": 65536}, {"dense": "sum"}])
def test_a_mapping_that_names_no_other_layout_asks_for_no_second_device(part: Any) -> None:
    assert len(plan(HEAVY, fewest=1, layout=part).devices) == 1


@pytest.mark.parametrize("hosts", [3, 4])
def test_rows_make_a_model_fit_that_no_device_holds(hosts: int) -> None:
    with pytest.raises(Infeasible, match="memory binds"):
        plan(WIDE, hosts=hosts, memory=9e8, fewest=1, layout="data-parallel")
    chosen = plan(WIDE, hosts=hosts, memory=9e8, fewest=1)
    assert chosen.layout is not None
    assert chosen.layout.how("fc") == "rows"
    assert max(peak_bytes(chosen)) <= 9e8
    others = {one.layout: one for one in chosen.alternatives if one.layout != "hybrid"}
    assert not others["data-parallel"].feasible
    assert "too little memory: a" not in others["data-parallel"].reason
    assert "GiB and has 0.838; most is for fc" in others["data-parallel"].reason


def test_a_layout_beyond_the_memory_is_refused_with_layer_and_device() -> None:
    with pytest.raises(Infeasible, match=r"train.layout: layout sharded: .* most is for fc") as why:
        plan(WIDE, memory=5e8, layout="sharded")
    assert why.value.details["binding"] == "memory"


def test_a_model_that_no_layout_fits_names_its_largest_layer_and_what_rows_leave_of_it() -> None:
    says = "most is for the layer fc: "
    with pytest.raises(Infeasible, match=f"one sample takes .* {says}") as whole:
        plan(WIDE, memory=1e8, layout="data-parallel")
    with pytest.raises(
        Infeasible, match=f"GiB with layers sharded on 2 devices, .* {says}"
    ) as rows:
        plan(WIDE, memory=1e8, layout="sharded")
    first, second = (
        float(str(one.value).split("one sample takes ")[1].split()[0]) for one in (whole, rows)
    )
    assert second < 0.7 * first


def test_a_deadline_that_only_another_layout_meets_is_met() -> None:
    wanted: dict[str, Any] = {"minimize": "time", "deadline": "40s"}
    with pytest.raises(Infeasible, match="deadline"):
        plan(HEAVY, objective=wanted, layout="data-parallel")
    chosen = plan(HEAVY, objective=wanted)
    assert chosen.not_exceeded is not None
    assert chosen.not_exceeded.duration_s <= 40


def test_a_named_layout_that_misses_the_deadline_says_what_it_needs() -> None:
    wanted: dict[str, Any] = {"minimize": "time", "deadline": "20s"}
    with pytest.raises(
        Infeasible, match="the nearest that was found with layout sharded is"
    ) as why:
        plan(HEAVY, objective=wanted, layout="sharded")
    assert why.value.details["nearest_deadline_s"] > 20


@settings(max_examples=25, deadline=None)
@given(
    inputs=st.sampled_from([64, 1024, 4096]),
    cores=st.lists(st.sampled_from([0.5, 1.0]), min_size=2, max_size=4),
    network=st.sampled_from(["50Mbit", "500Mbit", "10Gbit"]),
    body=st.sampled_from([1_000, 1_000_000]),
    goal=st.sampled_from(["time", "energy"]),
    fixed=st.sampled_from([0.0, 1e-3, 2e-2]),
    update=st.sampled_from([0.0, 5e-2, 0.5]),
    first=st.booleans(),
)
def test_no_devices_and_layout_are_better_than_the_plans_gap_says(
    inputs: int,
    cores: list[float],
    network: str,
    body: int,
    goal: str,
    fixed: float,
    update: float,
    first: bool,
) -> None:
    layers = [convolution("conv", body), dense_layer("fc", inputs, inputs), LOSS]
    if first:
        layers[:2] = reversed(layers[:2])
    asked = problem(
        layers,
        network,
        len(cores),
        tuple(cores),
        fewest=1,
        objective={"minimize": goal, "deadline": "10000s"},
        fixed=fixed,
        update=update,
    )
    plain = best(asked.request(64)).best
    made = with_devices(asked, plain)
    assert made is not None
    assert made.gap is not None
    chosen = made.laid.chosen.configuration
    space = asked.request(64).space()
    rooms = [range(group.count + 1) for group in asked.topology.groups]
    for counts in itertools.product(*rooms):
        for one, _ in space.configure(counts, 1, asked.goal, asked.limits):
            other = laid_out(one, "auto", asked.goal, asked.limits).chosen.configuration
            least = chosen.value(asked.goal) * (1 - made.gap)
            assert other.value(asked.goal) >= least * (1 - 1e-6)


def test_one_host_gets_sharded_layers_if_nothing_else_fits() -> None:
    job, pool, estimate, data = case(WIDE, hosts=1, fewest=1)
    hosts = [{"name": "a", "devices": [{"type": "nvidia-t4", "count": 3}]}]
    pool = Pool.model_validate({"name": "p", "hosts": hosts})
    changes = {"device_type": "nvidia-t4", "cores": None, "memory_limit_bytes": 9e8}
    curves = [one.model_copy(update=changes) for one in estimate.curves]
    chosen = make_plan(job, pool, estimate.model_copy(update={"curves": curves}), data)
    assert chosen.layout is not None
    assert chosen.layout.how("fc") == "rows"
    assert len(chosen.devices) > 1
    assert max(peak_bytes(chosen)) <= 9e8


def test_one_host_that_is_too_slow_says_what_data_parallel_needs() -> None:
    job, pool, estimate, data = case(HEAVY, hosts=1, fewest=1)
    objective = job.objective.model_copy(update={"deadline": 1.0})
    with pytest.raises(Infeasible, match="deadline") as why:
        make_plan(job.model_copy(update={"objective": objective}), pool, estimate, data)
    assert why.value.details["nearest_deadline_s"] > 1
    assert "layout" not in str(why.value)


def test_the_gap_of_another_layout_is_that_over_all_layouts() -> None:
    other = plan(HEAVY)
    assert other.strategy["name"] == "hybrid"
    assert other.gap == other.layouts_gap
    plain = plan(LIGHT)
    assert plain.strategy["name"] == "data-parallel"
    assert (plain.search, plain.gap) == ("exact", 0)
    assert plain.layouts_gap is not None


def test_another_layout_among_too_many_devices_to_bound_says_nothing_of_others() -> None:
    job, pool, estimate, data = case(HEAVY, hosts=MOST_DEVICES + 1, fewest=2)
    devices = job.devices.model_copy(update={"max_count": 2})
    chosen = make_plan(job.model_copy(update={"devices": devices}), pool, estimate, data)
    assert chosen.strategy["name"] == "hybrid"
    assert (chosen.search, chosen.gap, chosen.layouts_gap) == ("bounded", 1, None)


def test_rows_that_divide_the_update_are_bounded() -> None:
    """Every device updates the whole of a layer unless its rows are divided."""
    wide = [dense_layer("fc", 4096, 4096)]
    made = plan(wide, "10Gbit", 4, fewest=1, update=5e-2)
    whole = plan(wide, "10Gbit", 4, fewest=1, update=5e-2, layout="data-parallel")
    assert made.strategy["name"] == "sharded"
    assert step_s(made) < step_s(whole)
    assert made.search == "bounded"
    assert 0 < made.gap < 1


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("layout", ["auto", "sharded"])
def test_layouts_are_compared_on_calibrated_devices(hosts: int, layout: str) -> None:
    """Also if two devices of one host are of different speed."""
    job, pool, estimate, data = case(HEAVY, cores=(1.0, 0.5), layout=layout)
    assert all(one.basis is not None and one.basis.shares for one in estimate.curves)
    if hosts == 1:
        devices = [one for host in pool.hosts for one in host.devices]
        pool = Pool.model_validate({"name": "p", "hosts": [{"name": "a", "devices": devices}]})
    made = make_plan(job, pool, estimate, data)
    assert len(made.devices) == 2
    if layout == "sharded":
        assert made.layout is not None
        assert made.layout.how("fc6") == "rows"


def test_averages_let_all_devices_of_a_slow_network_be_used() -> None:
    convolutions = [convolution("conv1", 1_000_000), convolution("conv2", 1_000_000), LOSS]
    pool: dict[str, Any] = {"network": "1Gbit", "hosts": 4, "fewest": 1, "global_batch_size": 64}
    pool["epochs"] = 200
    plain = plan(convolutions, **pool)
    assert len(plain.devices) == 1
    averaged = plan(convolutions, **pool, layout="averaging")
    assert len(averaged.devices) == 4
    assert step_s(averaged) < step_s(plain) / 2
    mixed = plan(convolutions, **pool, layout="mixed")
    assert (len(mixed.devices), mixed.strategy["name"]) == (2, "mixed")
