"""The planner: the objective within the limits, or why not."""

from __future__ import annotations

from typing import Any

import pytest

from trainwright.estimator.curves import Affine, DeviceCurve
from trainwright.tasks.allocate.planner import make_plan, usable
from trainwright.tasks.artefacts import DataSchema, Estimate, Plan
from trainwright.tasks.errors import BadInput, Infeasible
from trainwright.tasks.job import Job
from trainwright.tasks.pool import Pool

DATA = DataSchema(
    task="image-classification", rows=1200, train_rows=1000, validation_rows=200, inputs={"inputs": (1, 8, 8)},
    input_dtypes={"inputs": "float32"}, target="label", target_dtype="int64", classes=["0", "1"], sha256="0",
)  # fmt: skip


def curve(cores: float, memory: float | None = None) -> DeviceCurve:
    """A CPU device: 2 ms + 1 ms a sample at one core, 20 W for each core."""
    return DeviceCurve(
        device_type="cpu", cores=cores, mode="calibrated", coverage=1.0,
        step_time_s=Affine(fixed=2e-3 / cores, per_sample=1e-3 / cores), low_factor=0.9, high_factor=1.2,
        peak_memory_bytes=Affine(fixed=1e8, per_sample=1e6), memory_safe_factor=1.25, memory_limit_bytes=memory,
        idle_w=5 * cores, load_w=20 * cores, energy_source="datasheet",
    )  # fmt: skip


def plan(pool: dict[str, Any], memory: float | None = None, **job: Any) -> Plan:
    chosen = Pool.model_validate({"name": "p", **pool})
    estimate = Estimate(
        mode="calibrated", gradient_bytes=1e6,
        curves=[curve(cores, memory) for cores in {device.cores or 1.0 for device in chosen.devices()}],
    )  # fmt: skip
    values = {"name": "j", "data": {"uri": "builtin:digits"}, "objective": {"minimize": "time"}, **job}
    return make_plan(Job.model_validate(values), chosen, estimate, DATA)


TWO = {"hosts": [{"name": "a", "devices": [{"type": "cpu", "cores": 1.0}, {"type": "cpu", "cores": 0.5}]}]}
MANY = {
    "hosts": [
        {"name": "a", "devices": [{"type": "cpu", "cores": 1.0, "count": 4}, {"type": "cpu", "cores": 0.5, "count": 4}]}
    ]
}


def test_unlike_devices_get_shares_in_proportion_to_their_speed() -> None:
    result = plan(TWO, devices={"min_count": 2}, train={"global_batch_size": 96})
    assert [device.batch_size for device in result.devices] in ([65, 31], [64, 32])
    assert result.global_batch_size == 96
    assert result.steps_per_epoch == 11


def test_least_time_takes_all_devices_and_least_energy_does_not() -> None:
    fast = plan(MANY, objective={"minimize": "time"})
    frugal = plan(MANY, objective={"minimize": "energy"})
    assert len(fast.devices) == 8
    assert len(frugal.devices) < 8
    assert fast.predicted is not None
    assert frugal.predicted is not None
    assert fast.predicted.duration_s.median < frugal.predicted.duration_s.median
    assert fast.predicted.energy_j is not None
    assert frugal.predicted.energy_j is not None
    assert frugal.predicted.energy_j.median < fast.predicted.energy_j.median


def test_the_chosen_plan_is_no_worse_than_any_alternative_and_each_says_why_it_lost() -> None:
    result = plan(MANY, objective={"minimize": "energy"})
    assert result.alternatives
    for other in result.alternatives:
        assert other.reason
        if other.feasible and other.predicted is not None and other.predicted.energy_j is not None:
            assert result.predicted is not None
            assert result.predicted.energy_j is not None
            assert other.predicted.energy_j.median >= result.predicted.energy_j.median


def test_a_deadline_makes_the_plan_take_more_devices() -> None:
    frugal = plan(MANY, objective={"minimize": "energy"}, train={"epochs": 100})
    assert frugal.predicted is not None
    deadline = frugal.predicted.duration_s.median * 0.3
    hurried = plan(MANY, objective={"minimize": "energy", "deadline": f"{deadline}s"}, train={"epochs": 100})
    assert len(hurried.devices) > len(frugal.devices)


def test_an_impossible_deadline_is_infeasible_and_the_nearest_one_is_feasible() -> None:
    with pytest.raises(Infeasible) as caught:
        plan(TWO, objective={"minimize": "time", "deadline": "11s"}, train={"epochs": 50})
    nearest = caught.value.details["nearest_deadline_s"]
    assert caught.value.exit_code == 3
    assert "deadline of 11 s binds" in str(caught.value)
    assert plan(TWO, objective={"minimize": "time", "deadline": f"{nearest}s"}, train={"epochs": 50}).feasible


def test_an_impossible_budget_is_infeasible_and_the_nearest_one_is_feasible() -> None:
    priced = TWO | {"prices": {"cpu": "10/h"}}
    with pytest.raises(Infeasible, match="budget of 1e-05 binds") as caught:
        plan(priced, objective={"minimize": "cost", "budget": 1e-5})
    assert plan(priced, objective={"minimize": "cost", "budget": caught.value.details["nearest_budget"]}).feasible


def test_a_batch_that_fits_no_memory_is_infeasible_and_one_that_fits_is_split_within_it() -> None:
    with pytest.raises(Infeasible, match="memory binds"):
        plan(TWO, memory=1.1e8, train={"global_batch_size": 512})
    result = plan(TWO, memory=2e8, devices={"min_count": 2}, train={"global_batch_size": 100})
    assert all(device.peak_memory_bytes <= 2e8 for device in result.devices)


def test_minimising_cost_without_prices_is_bad_input() -> None:
    with pytest.raises(BadInput, match="names no prices"):
        plan(TWO, objective={"minimize": "cost"})


def test_the_jobs_restrictions_are_kept_and_unknown_names_refused() -> None:
    pool = Pool.model_validate({"name": "p", **MANY})
    chosen = Job.model_validate({"name": "j", "data": {"uri": "x"}, "devices": {"exclude": ["a/cpu-0"]}})
    assert "a/cpu-0" not in [device.id for device in usable(pool, chosen.devices)]
    for field, names in (("types", ["nvidia-t4"]), ("hosts", ["z"]), ("ids", ["a/cpu-9"]), ("exclude", ["a/cpu-9"])):
        wrong = Job.model_validate({"name": "j", "data": {"uri": "x"}, "devices": {field: names}})
        with pytest.raises(BadInput, match=rf"devices\.{field}: got '{names[0]}'"):
            usable(pool, wrong.devices)
    with pytest.raises(BadInput, match=r"devices\.min_count: got 9"):
        usable(pool, Job.model_validate({"name": "j", "data": {"uri": "x"}, "devices": {"min_count": 9}}).devices)


def test_a_pool_too_large_to_try_everything_says_that_the_search_was_greedy() -> None:
    hosts = [{"name": f"h{n}", "devices": [{"type": "cpu", "cores": 1.0, "count": 9}]} for n in range(6)]
    result = plan({"hosts": hosts, "network": {"bandwidth": "10Gbit", "latency": "50us"}}, devices={"max_count": 12})
    assert result.search == "greedy"
    assert 1 <= len(result.devices) <= 12
