"""Deadline, budget, memory and windows, and the report if no plan meets them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from plans import MANY, NOON, TWO, curve, plan

from trainwright.estimator.curves import Affine
from trainwright.tasks.errors import Infeasible
from trainwright.tasks.runs.artefacts.plan import Plan


def test_a_deadline_makes_the_plan_use_more_devices() -> None:
    frugal = plan(MANY, objective={"minimize": "energy"}, train={"epochs": 100})
    assert frugal.predicted is not None
    deadline = frugal.predicted.duration_s.median * 0.3
    hurried = plan(
        MANY, objective={"minimize": "energy", "deadline": f"{deadline}s"}, train={"epochs": 100}
    )
    assert len(hurried.devices) > len(frugal.devices)


def test_an_impossible_deadline_is_infeasible_and_the_reported_nearest_one_is_feasible() -> None:
    with pytest.raises(Infeasible) as caught:
        plan(TWO, objective={"minimize": "time", "deadline": "11s"}, train={"epochs": 50})
    nearest = caught.value.details["nearest_deadline_s"]
    assert caught.value.exit_code == 3
    assert "deadline of 11 s binds" in str(caught.value)
    assert plan(
        TWO, objective={"minimize": "time", "deadline": f"{nearest}s"}, train={"epochs": 50}
    ).feasible


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99])
def test_no_deadline_that_is_clearly_nearer_than_the_reported_one_is_feasible(
    confidence: float,
) -> None:
    def at(deadline_s: float) -> Plan:
        objective = {"minimize": "energy", "deadline": f"{deadline_s}s", "confidence": confidence}
        return plan(TWO, objective=objective, train={"epochs": 50})

    with pytest.raises(Infeasible) as caught:
        at(0.001)
    nearest = caught.value.details["nearest_deadline_s"]
    assert at(nearest).not_exceeded.duration_s <= nearest
    with pytest.raises(Infeasible):
        at(0.995 * nearest)


def test_an_impossible_budget_is_infeasible_and_the_reported_nearest_one_is_feasible() -> None:
    priced = TWO | {"prices": {"cpu": "10/h"}}
    with pytest.raises(Infeasible, match=r"budget of 0\.00001 binds") as caught:
        plan(priced, objective={"minimize": "cost", "budget": 1e-5})
    assert plan(
        priced, objective={"minimize": "cost", "budget": caught.value.details["nearest_budget"]}
    ).feasible


def test_a_batch_larger_than_the_memory_is_infeasible_and_a_smaller_one_is_split_within_it() -> (
    None
):
    with pytest.raises(Infeasible, match="memory binds"):
        plan(TWO, memory=1.1e8, train={"global_batch_size": 512})
    kinds = TWO["hosts"][0]["devices"]
    apart = {
        "hosts": [
            {"name": f"h{n}", "address": f"10.0.0.{n}", "devices": [kind]}
            for n, kind in enumerate(kinds)
        ]
    }
    result = plan(apart, memory=2e8, devices={"min_count": 2}, train={"global_batch_size": 100})
    assert all(device.peak_memory_bytes <= 2e8 for device in result.devices)


def test_a_budget_that_is_too_small_names_the_cheapest_devices() -> None:
    pool = {**TWO, "prices": {"cpu": "1/h", "energy": "0.25/kWh"}}
    with pytest.raises(Infeasible, match="cheapest: 1 x cpu"):
        plan(pool, objective={"minimize": "time", "budget": 1e-9})


def test_the_batch_is_chosen_among_those_that_meet_the_deadline() -> None:
    """A tight deadline that only a large batch meets is still feasible."""
    auto: dict[str, Any] = {"train": {"batch_bounds": [16, 1000], "epochs": 400}}
    with pytest.raises(Infeasible) as caught:
        plan(TWO, **auto, objective={"minimize": "time", "deadline": "1s"})
    nearest = caught.value.details["nearest_deadline_s"]
    found = plan(TWO, **auto, objective={"minimize": "time", "deadline": f"{nearest}s"})
    assert found.feasible
    with pytest.raises(Infeasible):
        plan(TWO, **auto, objective={"minimize": "time", "deadline": f"{0.9 * nearest}s"})


def test_a_host_is_used_only_if_the_plan_ends_within_its_window_at_the_confidence() -> None:
    def hosts(window: str) -> dict[str, Any]:
        fast = {"name": "fast", "devices": [{"type": "cpu", "cores": 1.0}], "available": window}
        return {"hosts": [fast, {"name": "slow", "devices": [{"type": "cpu", "cores": 0.5}]}]}

    fixed: dict[str, Any] = {
        "devices": {"max_count": 1},
        "train": {"global_batch_size": 100, "epochs": 100},
    }
    assert [device.host for device in plan(hosts("11:00-13:00"), now=NOON, **fixed).devices] == [
        "fast"
    ]
    assert [device.host for device in plan(hosts("11:00-12:01"), now=NOON, **fixed).devices] == [
        "slow"
    ]
    assert [device.host for device in plan(hosts("13:00-14:00"), now=NOON, **fixed).devices] == [
        "slow"
    ]
    assert [device.host for device in plan(hosts("13:00-14:00"), **fixed).devices] == ["fast"]
    only = {"hosts": [hosts("11:00-12:01")["hosts"][0]]}
    with pytest.raises(Infeasible, match="availability binds") as caught:
        plan(only, now=NOON, **fixed)
    assert caught.value.details["binding"] == "availability"
    assert "fast 11:00-12:01" in str(caught.value)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99])
def test_a_plan_states_the_values_that_its_limits_apply_to(confidence: float) -> None:
    priced, long = MANY | {"prices": {"cpu": "1/h"}}, {"epochs": 1000, "global_batch_size": 1000}
    objective = {"minimize": "time", "confidence": confidence}
    most = plan(priced, objective=objective, train=long).not_exceeded
    assert most is not None
    assert most.confidence == confidence
    assert most.cost is not None
    for field, limit, unit in (("deadline", most.duration_s, "s"), ("budget", most.cost, "")):
        enough, short = (
            objective | {field: f"{limit * by}s" if unit else limit * by} for by in (1.0001, 0.9999)
        )
        assert plan(priced, objective=enough, train=long).not_exceeded == most
        with contextlib.suppress(Infeasible):
            assert plan(priced, objective=short, train=long).not_exceeded != most


def test_an_infeasible_plan_says_what_one_more_device_would_change() -> None:
    with pytest.raises(Infeasible) as caught:
        plan(
            TWO,
            objective={"minimize": "time", "deadline": "30s"},
            train={"epochs": 1000, "global_batch_size": 1000},
        )
    details = caught.value.details
    assert set(details["one_more"]) == {"cpu (1 core)", "cpu (0.5 cores)"}
    assert all(value < details["nearest_deadline_s"] for value in details["one_more"].values())


def test_one_more_device_is_suggested_only_if_it_helps() -> None:
    slow = {"name": "a", "devices": [{"type": "cpu", "cores": 1.0}, {"type": "cpu", "cores": 0.01}]}
    long: dict[str, Any] = {"train": {"epochs": 1000, "global_batch_size": 1000}}
    for limits in ({"max_count": 1}, {}):
        with pytest.raises(Infeasible) as caught:
            plan(
                {"hosts": [slow]},
                objective={"minimize": "time", "deadline": "30s"},
                devices=limits,
                **long,
            )
        found = caught.value.details["one_more"]
        assert ("with one more" in str(caught.value)) == bool(found) == (not limits)
        helpless = "one more device of any kind in the pool: no nearer limit was found"
        assert (helpless in str(caught.value)) == (not found)
        assert all(value < caught.value.details["nearest_deadline_s"] for value in found.values())


def test_the_nearest_budget_is_feasible_where_kinds_differ_in_spread() -> None:
    """A rank's cost bends where it becomes the slowest, at each kind's own quantile."""
    kinds = [
        curve(1.0).model_copy(
            update={
                "device_type": device_type,
                "cores": cores,
                "step_time_s": Affine(fixed=fixed, per_sample=0.01),
                "high_factor": factor,
                "idle_w": idle,
                "load_w": load,
            }
        )
        for device_type, cores, fixed, factor, idle, load in (
            ("cpu", 1.0, 0.1, 1.5, 50.0, 100.0),
            ("nvidia-t4", None, 0.01, 3.0, 0.0, 200.0),
        )
    ]
    pool = {
        "hosts": [{"name": "a", "devices": [{"type": "cpu"}, {"type": "nvidia-t4"}]}],
        "prices": {"cpu": "2/h", "nvidia-t4": "2/h", "energy": "0.25/kWh"},
    }
    job: dict[str, Any] = {
        "train": {"global_batch_size": 34, "epochs": 4},
        "devices": {"min_count": 2},
    }
    limits = {"minimize": "time", "confidence": 0.95}
    with pytest.raises(Infeasible) as refused:
        plan(pool, curves=kinds, objective=limits | {"budget": 1e-6}, **job)
    nearest = refused.value.details["nearest_budget"]
    made = plan(pool, curves=kinds, objective=limits | {"budget": nearest}, **job)
    assert made.not_exceeded is not None
    assert (made.not_exceeded.cost or 0) <= nearest
