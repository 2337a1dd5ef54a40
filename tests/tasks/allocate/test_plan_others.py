"""Alternatives with the reasons why they lost, and the Pareto front."""

from __future__ import annotations

import re
from typing import Any

import pytest
from plans import MANY, curve, plan

from trainwright.estimator.curves import Affine, DeviceCurve
from trainwright.estimator.predict.communication import Link


def test_the_plan_is_at_least_as_good_as_every_alternative_and_each_has_a_reason() -> None:
    result = plan(MANY, objective={"minimize": "energy"})
    assert result.alternatives
    for other in result.alternatives:
        assert other.reason
        if other.feasible and other.predicted is not None and other.predicted.energy_j is not None:
            assert result.predicted is not None
            assert result.predicted.energy_j is not None
            assert other.predicted.energy_j.median >= result.predicted.energy_j.median


def test_an_alternative_that_misses_a_limit_says_by_how_much_and_why_more_devices_are_slower() -> (
    None
):
    far = [
        {"name": f"h{n}", "address": f"10.0.0.{n}", "devices": [{"type": "cpu", "cores": 1.0}]}
        for n in (1, 2, 3)
    ]
    pool = {"hosts": far, "network": {"bandwidth": "100kbit", "latency": "50us"}}
    objective = {"minimize": "time", "deadline": "1m"}
    result = plan(pool, objective=objective, train={"epochs": 5, "global_batch_size": 100})
    assert len(result.devices) == 1
    reasons = [one.reason for one in result.alternatives if not one.feasible]
    assert reasons
    for reason in reasons:
        assert re.fullmatch(
            r"(takes [0-9.]+ times the deadline|misses the deadline by [0-9.]+ %) "
            "at confidence 0.9; "
            "all-reduces take longer than the extra devices save",
            reason,
        )


def test_slow_all_reduces_are_the_reason_only_for_a_superset_of_the_plans_devices() -> None:
    host = {
        "name": "a",
        "devices": [{"type": "cpu", "cores": 1.0}, {"type": "cpu", "cores": 0.125, "count": 3}],
    }
    dear = Link(bandwidth_bytes_per_s=1e9, latency_s=0.5, spread=0)
    result = plan({"hosts": [host]}, link=dear, train={"global_batch_size": 100})
    assert {device.cores for device in result.devices} == {1.0}
    reasons = {frozenset(one.devices): one.reason for one in result.alternatives}
    slow, both = "cpu (0.125 cores)", "cpu (1 core)"
    assert "all-reduces" in reasons[frozenset({slow, both})]
    assert "all-reduces" not in reasons[frozenset({slow})]


def test_the_front_has_no_dominated_point_and_marks_the_plan() -> None:
    result = plan(MANY | {"prices": {"cpu": "0.1/h"}}, objective={"minimize": "energy"})
    assert [one.chosen for one in result.front].count(True) == 1
    values = [(one.time, one.energy, one.cost) for one in result.front]
    assert values == sorted(values)
    for mine in values:
        for other in values:
            better = any(a < b for a, b in zip(mine, other, strict=True))  # type: ignore[operator]
            assert other == mine or better


def gpu(name: str, per_sample: float, **change: Any) -> DeviceCurve:
    """A GPU that takes 10 us and this much for each sample."""
    values = {
        "device_type": name,
        "cores": None,
        "step_time_s": Affine(fixed=1e-5, per_sample=per_sample),
    }
    return curve(1.0).model_copy(update=values | change)


def reasons(pool: dict[str, Any], goal: str, *curves: DeviceCurve) -> dict[frozenset[str], str]:
    """By kinds of devices, the reason of the best alternative with them."""
    found: dict[frozenset[str], str] = {}
    train = {"global_batch_size": 100}
    made = plan(pool, curves=list(curves), objective={"minimize": goal}, train=train)
    for one in made.alternatives:
        found.setdefault(frozenset(one.devices), one.reason)
    return found


def test_a_slow_device_loses_by_its_slowness_and_not_by_slow_all_reduces() -> None:
    fast, slow = gpu("nvidia-t4", 1e-6), curve(1.0)
    hosts = [{"name": "a", "devices": [{"type": "nvidia-t4"}, {"type": "cpu", "cores": 1.0}]}]
    for goal in ("time", "energy"):
        found = reasons({"hosts": hosts}, goal, fast, slow)
        both = found[frozenset({"nvidia-t4", "cpu (1 core)"})]
        assert (
            "cpu (1 core) is too slow: it takes 3 ms for 1 sample, a step of the plan 110 us"
            in both
        )
        alone = found[frozenset({"cpu (1 core)"})]
        assert "a step takes 927 times as long" in alone
        assert "all-reduce" not in both + alone


def test_a_faster_device_that_costs_more_says_how_much_faster_and_how_much_dearer() -> None:
    devices = [{"type": "nvidia-t4"}, {"type": "nvidia-l4"}]
    pool = {
        "hosts": [{"name": "a", "devices": devices}],
        "prices": {"nvidia-t4": "1/h", "nvidia-l4": "5000/h"},
    }
    curves = gpu("nvidia-t4", 1e-3), gpu("nvidia-l4", 5e-4, load_w=400.0)
    fast = frozenset({"nvidia-l4"})
    for goal, rate in (("cost", r"5,000 times the cost per hour"), ("energy", "times the power")):
        found = reasons(pool, goal, *curves)[fast]
        assert re.search(rf"times the {goal}: [0-9,.]*( ?{rate}) for [0-9.]+ % less time", found), (
            found
        )


@pytest.mark.parametrize("goal", ["time", "energy", "cost"])
def test_no_reason_has_an_exponent(goal: str) -> None:
    curves = [gpu("nvidia-t4", 1e-6), gpu("nvidia-l4", 1.0001e-6), gpu("nvidia-p100-16gb", 0.5)]
    types = [{"type": one.device_type, "count": 2} for one in curves]
    pool = {
        "hosts": [{"name": "a", "devices": types}],
        "prices": {
            one.device_type: f"{price}/h" for one, price in zip(curves, (1, 1, 90000), strict=True)
        },
    }
    found = plan(pool, curves=curves, objective={"minimize": goal}, train={"global_batch_size": 64})
    assert found.alternatives
    for one in found.alternatives:
        assert not re.search(r"[0-9]e[-+]?[0-9]", one.reason)


def test_a_free_plan_is_not_compared_by_a_ratio() -> None:
    pool = {
        "hosts": [{"name": "a", "devices": [{"type": "nvidia-t4"}, {"type": "nvidia-l4"}]}],
        "prices": {"nvidia-t4": "0/h", "nvidia-l4": "360000/h"},
    }
    found = reasons(pool, "cost", gpu("nvidia-t4", 1e-3), gpu("nvidia-l4", 1e-4))
    assert re.fullmatch("a cost of [0-9.,]+, not 0", found[frozenset({"nvidia-l4"})])
