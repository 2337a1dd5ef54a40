"""Alternatives with the reasons why they lost, and the Pareto front."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from plans import MANY, plan

from trainwright.estimator.predict.communication import Link
from trainwright.tasks.cli.screens.plan_plot import write_front
from trainwright.tasks.errors import BadInput


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


def test_the_front_is_plotted_and_an_unknown_suffix_is_refused(tmp_path: Path) -> None:
    result = plan(MANY | {"prices": {"cpu": "0.1/h"}}, objective={"minimize": "energy"})
    for suffix in ("svg", "html"):
        write_front(result, tmp_path / f"front.{suffix}")
        text = (tmp_path / f"front.{suffix}").read_text()
        assert text.count("<circle") == 2 * len(result.front)
    ElementTree.parse(tmp_path / "front.svg")
    with pytest.raises(
        BadInput, match=r"--plot: got .*front\.png; allowed: a file that ends in \.svg or \.html"
    ):
        write_front(result, tmp_path / "front.png")
    with pytest.raises(BadInput, match="can't be written"):
        write_front(result, tmp_path / "nowhere" / "front.svg")
