"""The planner: the objective within the limits, or why not."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.estimator.communication import FIGURES_BYTES, HOROVOD_POLL_S, Link, all_reduce, all_reduces
from trainwright.estimator.curves import Affine, DeviceCurve, Interval, Knots
from trainwright.tasks.allocate.configuration import Configuration, Space
from trainwright.tasks.allocate.cost import Triple
from trainwright.tasks.allocate.layout import Layout, Seating
from trainwright.tasks.allocate.planner import make_plan
from trainwright.tasks.allocate.plot import write_front
from trainwright.tasks.allocate.restrictions import usable
from trainwright.tasks.allocate.strategies import STRATEGIES, load_installed, strategy
from trainwright.tasks.artefacts import DataSchema, Estimate, Plan
from trainwright.tasks.documents import validated
from trainwright.tasks.errors import BadInput, Infeasible
from trainwright.tasks.job import Job
from trainwright.tasks.pool import Pool, seconds_left

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


def plan(
    pool: dict[str, Any], memory: float | None = None, link: Link | None = None, cycle_s: float = 0.0, **job: Any
) -> Plan:
    chosen = Pool.model_validate({"name": "p", **pool})
    estimate = Estimate(
        mode="calibrated", gradient_bytes=1e6,
        curves=[curve(cores, memory) for cores in {device.cores or 1.0 for device in chosen.devices()}],
        local_link=link,
        cycle_s=cycle_s,
    )  # fmt: skip
    values = {"name": "j", "data": {"uri": "builtin:digits"}, "objective": {"minimize": "time"}, **job}
    return make_plan(Job.model_validate(values), chosen, estimate, DATA)


TWO: dict[str, Any] = {
    "hosts": [{"name": "a", "devices": [{"type": "cpu", "cores": 1.0}, {"type": "cpu", "cores": 0.5}]}]
}
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


BOTH: dict[str, Any] = {"devices": {"min_count": 2}, "train": {"global_batch_size": 96}}


def step_time(pool: dict[str, Any], link: Link | None, **job: Any) -> Interval:
    predicted = plan(pool, link=link, **BOTH | job).predicted
    assert predicted is not None
    return predicted.step_time_s


@settings(deadline=None)
@given(bandwidth=st.floats(1e6, 1e12), latency=st.floats(1e-6, 0.1), spread=st.floats(0, 4), slower=st.floats(1.1, 100))
def test_a_slower_link_between_ranks_makes_a_step_longer(
    bandwidth: float, latency: float, spread: float, slower: float
) -> None:
    link = Link(bandwidth_bytes_per_s=bandwidth, latency_s=latency, spread=spread)
    here = step_time(TWO, link)
    for change in ({"bandwidth_bytes_per_s": bandwidth / slower}, {"latency_s": latency * slower}):
        assert step_time(TWO, link.model_copy(update=change)).median > here.median


def test_the_measured_link_takes_the_place_of_the_prior_with_its_own_interval() -> None:
    still = Link(bandwidth_bytes_per_s=1e300, latency_s=0, spread=0)
    link = Link(bandwidth_bytes_per_s=1e8, latency_s=1e-3, spread=0.25)
    alone, shared, summed = step_time(TWO, still), step_time(TWO, link), all_reduces(link, 1e6 + FIGURES_BYTES, 2, 2)
    assert shared.median - alone.median == pytest.approx(summed.median)
    assert shared.low - alone.low == pytest.approx(summed.low)
    assert shared.high - alone.high == pytest.approx(summed.high)
    prior = step_time(TWO, None)
    assert prior.median > alone.median
    assert prior.high - alone.high == pytest.approx(3 * (prior.median - alone.median))


def test_a_library_that_works_in_cycles_makes_a_step_wait_agree_and_look() -> None:
    link = Link(bandwidth_bytes_per_s=1e8, latency_s=1e-3, spread=0.25)
    at_once, cycled = step_time(TWO, link), step_time(TWO, link, cycle_s=1e-2)
    agreed = all_reduce(link, FIGURES_BYTES, 2)
    assert cycled.median - at_once.median == pytest.approx(5e-3 + HOROVOD_POLL_S / 2 + 1.5 * agreed.median)
    assert cycled.low - at_once.low == pytest.approx(agreed.low)
    assert cycled.high - at_once.high == pytest.approx(1e-2 + HOROVOD_POLL_S + 2 * agreed.high)
    one = {"devices": {"max_count": 1, "min_count": 1}}
    assert step_time(TWO, link, cycle_s=1e-2, **one) == step_time(TWO, link, **one)


def test_this_machines_link_says_nothing_of_ranks_on_another_machine() -> None:
    elsewhere = {"hosts": [TWO["hosts"][0] | {"address": "10.0.0.7"}]}
    slow = Link(bandwidth_bytes_per_s=1e3, latency_s=1, spread=0)
    assert step_time(elsewhere, slow) == step_time(elsewhere, None)
    assert step_time(TWO, slow).median > step_time(TWO, None).median


def test_hosts_of_the_pool_on_one_machine_are_one_machine_and_others_meet_over_the_network() -> None:
    def pool(*addresses: str) -> dict[str, Any]:
        kinds = [{"type": "cpu", "cores": 1.0}, {"type": "cpu", "cores": 0.5}]
        return {
            "network": {"bandwidth": "1kB", "latency": "1s"},
            "hosts": [
                {"name": f"h{number}", "address": address, "devices": [kinds[number]]}
                for number, address in enumerate(addresses)
            ],
        }

    fast = Link(bandwidth_bytes_per_s=1e12, latency_s=1e-6, spread=0)
    assert step_time(pool("localhost", "127.0.0.1"), fast).median < 1
    assert step_time(pool("localhost", "10.0.0.7"), fast).median == pytest.approx(
        4 + (1e6 + FIGURES_BYTES) / 1e3, rel=1e-3
    )


def test_a_host_with_a_slow_way_to_the_network_slows_only_those_plans_that_use_it() -> None:
    def pool(network: dict[str, str], *own: dict[str, str]) -> dict[str, Any]:
        return {
            "network": network,
            "hosts": [
                {"name": f"h{number}", "address": f"10.0.0.{number}", "devices": [{"type": "cpu"}], "network": one}
                for number, one in enumerate(own)
            ],
        }

    quick, slow = {"bandwidth": "100Gbit", "latency": "5us"}, {"bandwidth": "1Mbit", "latency": "20ms"}
    two = {"train": {"global_batch_size": 64}, "devices": {"min_count": 2, "max_count": 2}}
    three = {"train": {"global_batch_size": 64}, "devices": {"min_count": 3}}
    mixed = plan(pool(quick, {}, slow, {}), **two)
    assert [device.host for device in mixed.devices] == ["h0", "h2"]
    assert mixed.predicted == plan(pool(quick, {}, {}), **two).predicted
    everywhere = plan(pool(slow, {}, {}, {}), **three).predicted
    assert plan(pool(quick, {}, {}, slow), **three).predicted == everywhere
    by_halves = ({"bandwidth": slow["bandwidth"]}, {"latency": slow["latency"]}, {})
    assert plan(pool(quick, *by_halves), **three).predicted == everywhere


@given(
    st.integers(2, 8),
    st.sampled_from(["100Mbit", "1Gbit", "10Gbit", "100Gbit"]),
    st.sampled_from(["5us", "50us", "9ms"]),
)
@settings(max_examples=20, deadline=None)
def test_ranks_that_nobody_measured_are_not_slower_on_one_machine_than_between_machines(
    ranks: int, bandwidth: str, latency: str
) -> None:
    def step_s(hosts: list[dict[str, Any]]) -> float:
        pool = {"hosts": hosts, "network": {"bandwidth": bandwidth, "latency": latency}}
        fixed = {"train": {"global_batch_size": 64}, "devices": {"min_count": ranks}}
        predicted = plan(pool, **fixed).predicted
        assert predicted is not None
        return predicted.step_time_s.median

    apart = [
        {"name": f"h{n}", "address": f"10.0.0.{n}", "devices": [{"type": "cpu", "cores": 1.0}]} for n in range(ranks)
    ]
    together = [{"name": "h", "address": "10.0.0.1", "devices": [{"type": "cpu", "cores": 1.0, "count": ranks}]}]
    assert step_s(together) <= step_s(apart) * (1 + 1e-9)


def test_ranks_on_several_machines_sum_in_one_ring_of_them_all() -> None:
    """2 (n - 1) messages and 2 (n - 1) / n of the bytes at the network's pace, however many a machine holds."""

    def sums_s(machines: int, each: int) -> float:
        hosts = [
            {"name": f"h{n}", "address": f"10.0.0.{n}", "devices": [{"type": "cpu", "cores": 1.0, "count": each}]}
            for n in range(machines)
        ]
        network = {"bandwidth": "1Gbit", "latency": "50ms"}
        fixed = {"train": {"global_batch_size": 8}, "devices": {"min_count": 8}}
        found = plan({"hosts": hosts, "network": network}, **fixed)
        assert found.predicted is not None
        return found.predicted.step_time_s.median

    network = Link(bandwidth_bytes_per_s=125e6, latency_s=0.05, spread=0)
    ring = all_reduces(network, 1e6 + FIGURES_BYTES, 2, 8).median
    for machines in (8, 4, 2):
        assert sums_s(machines, 8 // machines) == pytest.approx(ring + 3e-3, rel=1e-6)


def test_an_estimate_stored_without_a_link_is_read() -> None:
    old = {"schema_version": 1, "mode": "calibrated", "gradient_bytes": 1.0, "curves": [], "calibrations": {}}
    assert Estimate.model_validate(old).local_link is None


def test_least_time_takes_all_devices_and_least_energy_does_not() -> None:
    fixed: dict[str, Any] = {"train": {"global_batch_size": 1000}}
    fast = plan(MANY, objective={"minimize": "time"}, **fixed)
    frugal = plan(MANY, objective={"minimize": "energy"}, **fixed)
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
    kinds = TWO["hosts"][0]["devices"]
    apart = {"hosts": [{"name": f"h{n}", "address": f"10.0.0.{n}", "devices": [kind]} for n, kind in enumerate(kinds)]}
    result = plan(apart, memory=2e8, devices={"min_count": 2}, train={"global_batch_size": 100})
    assert all(device.peak_memory_bytes <= 2e8 for device in result.devices)


def test_a_budget_that_is_too_small_names_the_cheapest_devices_and_not_the_quickest() -> None:
    pool = {**TWO, "prices": {"cpu": "1/h", "energy": "0.25/kWh"}}
    with pytest.raises(Infeasible, match="cheapest: 1 x cpu"):
        plan(pool, objective={"minimize": "time", "budget": 1e-9})


def test_bounds_beyond_the_rows_to_train_on_are_told() -> None:
    found = plan(TWO, train={"batch_bounds": [5000, 9000]})
    assert found.global_batch_size == DATA.train_rows
    assert "batch_bounds begin above them, at 5000" in found.batch_rule


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


def test_the_batch_is_chosen_among_those_that_meet_the_deadline() -> None:
    """A tight deadline that only a large batch meets is no reason to say infeasible."""
    auto: dict[str, Any] = {"train": {"batch_bounds": [16, 1000], "epochs": 400}}
    with pytest.raises(Infeasible) as caught:
        plan(TWO, **auto, objective={"minimize": "time", "deadline": "1s"})
    nearest = caught.value.details["nearest_deadline_s"]
    found = plan(TWO, **auto, objective={"minimize": "time", "deadline": f"{nearest}s"})
    assert found.feasible
    with pytest.raises(Infeasible):
        plan(TWO, **auto, objective={"minimize": "time", "deadline": f"{0.9 * nearest}s"})


def test_ranks_of_a_host_share_its_memory() -> None:
    fixed: dict[str, Any] = {"train": {"global_batch_size": 96}}
    assert len(plan(TWO, memory=1e9, **fixed).devices) == 2
    both = 2 * 1.25 * 1e8 + 1.25e6 * 96
    together = plan(TWO, memory=0.99 * both, **fixed, devices={"min_count": 2})
    assert together.accumulation > 1
    with pytest.raises(Infeasible, match="which its ranks share"):
        plan(TWO, memory=0.65 * both, **fixed, devices={"min_count": 2})
    assert len(plan(TWO, memory=0.65 * both, **fixed).devices) == 1


def test_a_cost_of_which_a_part_is_unknown_is_unknown() -> None:
    dark = {"hosts": [{"name": "a", "devices": [{"type": "cpu", "cores": 1.0}]}], "prices": {"energy": "0.3/kWh"}}
    chosen = Pool.model_validate({"name": "p", **dark})
    unknown = curve(1.0).model_copy(update={"idle_w": None, "load_w": None, "energy_source": None})
    job = Job.model_validate(
        {"name": "j", "data": {"uri": "builtin:digits"}, "objective": {"minimize": "time", "budget": 5.0}}
    )
    made = Estimate(mode="calibrated", gradient_bytes=1e6, curves=[unknown])
    with pytest.raises(BadInput, match="budget: got 5; the cost is not known: pool p"):
        make_plan(job, chosen, made, DATA)


NOON = datetime(2026, 1, 5, 12, 0, tzinfo=UTC)


def made(
    pool: dict[str, Any],
    curves: list[DeviceCurve] | None = None,
    now: datetime | None = None,
    most: int = 1,
    **job: Any,
) -> Plan:
    chosen = Pool.model_validate({"name": "p", **pool})
    kinds = curves or [curve(cores) for cores in {device.cores or 1.0 for device in chosen.devices()}]
    values = {"name": "j", "data": {"uri": "builtin:digits"}, "objective": {"minimize": "time"}, **job}
    estimate = Estimate(mode="calibrated", gradient_bytes=1e6, curves=kinds)
    return make_plan(Job.model_validate(values), chosen, estimate, DATA, now=now, most_accumulation=most)


@pytest.mark.parametrize(
    ("window", "clock", "left"),
    [
        ("18:00-08:00", "17:59", 0.0), ("18:00-08:00", "18:00", 14 * 3600.0), ("18:00-08:00", "07:00", 3600.0),
        ("09:00-17:00", "16:30", 1800.0), ("09:00-17:00", "17:00", 0.0), ("00:00-00:00", "12:00", math.inf),
    ],
)  # fmt: skip
def test_a_daily_window_says_for_how_long_a_host_is_there(window: str, clock: str, left: float) -> None:
    now = datetime.fromisoformat(f"2026-01-05T{clock}:00+00:00")
    assert seconds_left(window, now) == left
    assert seconds_left(window, now.astimezone(timezone(timedelta(hours=5)))) == left
    assert seconds_left(None, now) == math.inf


def test_a_host_is_used_only_where_the_plan_surely_ends_within_its_window() -> None:
    def hosts(window: str) -> dict[str, Any]:
        fast = {"name": "fast", "devices": [{"type": "cpu", "cores": 1.0}], "available": window}
        return {"hosts": [fast, {"name": "slow", "devices": [{"type": "cpu", "cores": 0.5}]}]}

    fixed: dict[str, Any] = {"devices": {"max_count": 1}, "train": {"global_batch_size": 100, "epochs": 100}}
    assert [device.host for device in made(hosts("11:00-13:00"), now=NOON, **fixed).devices] == ["fast"]
    assert [device.host for device in made(hosts("11:00-12:01"), now=NOON, **fixed).devices] == ["slow"]
    assert [device.host for device in made(hosts("13:00-14:00"), now=NOON, **fixed).devices] == ["slow"]
    assert [device.host for device in made(hosts("13:00-14:00"), **fixed).devices] == ["fast"]
    only = {"hosts": [hosts("11:00-12:01")["hosts"][0]]}
    with pytest.raises(Infeasible, match="availability binds") as caught:
        made(only, now=NOON, **fixed)
    assert caught.value.details["binding"] == "availability"
    assert "fast 11:00-12:01" in str(caught.value)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.99])
def test_a_plan_says_what_its_limits_are_held_against(confidence: float) -> None:
    priced, long = MANY | {"prices": {"cpu": "1/h"}}, {"epochs": 1000, "global_batch_size": 1000}
    objective = {"minimize": "time", "confidence": confidence}
    most = made(priced, objective=objective, train=long).not_exceeded
    assert most is not None
    assert most.confidence == confidence
    assert most.cost is not None
    for field, limit, unit in (("deadline", most.duration_s, "s"), ("budget", most.cost, "")):
        enough, short = (objective | {field: f"{limit * by}s" if unit else limit * by} for by in (1.0001, 0.9999))
        assert made(priced, objective=enough, train=long).not_exceeded == most
        with contextlib.suppress(Infeasible):
            assert made(priced, objective=short, train=long).not_exceeded != most


def test_what_misses_a_limit_says_by_how_much_in_words_and_why_more_devices_are_slower() -> None:
    far = [{"name": f"h{n}", "address": f"10.0.0.{n}", "devices": [{"type": "cpu", "cores": 1.0}]} for n in (1, 2, 3)]
    pool = {"hosts": far, "network": {"bandwidth": "100kbit", "latency": "50us"}}
    objective = {"minimize": "time", "deadline": "1m"}
    result = made(pool, objective=objective, train={"epochs": 5, "global_batch_size": 100})
    assert len(result.devices) == 1
    reasons = [one.reason for one in result.alternatives if not one.feasible]
    assert reasons
    for reason in reasons:
        assert re.fullmatch(
            r"(takes [0-9]+(\.[0-9]+)? x the deadline|misses the deadline by [0-9.]+ %) at confidence 0.9; "
            "sums cost more than the extra devices save", reason,
        )  # fmt: skip


def test_sums_are_blamed_for_what_has_the_plans_devices_and_more_not_for_slow_devices() -> None:
    host = {"name": "a", "devices": [{"type": "cpu", "cores": 1.0}, {"type": "cpu", "cores": 0.125, "count": 3}]}
    dear = Link(bandwidth_bytes_per_s=1e9, latency_s=0.5, spread=0)
    result = plan({"hosts": [host]}, link=dear, train={"global_batch_size": 100})
    assert {device.cores for device in result.devices} == {1.0}
    reasons = {frozenset(one.devices): one.reason for one in result.alternatives}
    slow, both = "cpu (0.125 cores)", "cpu (1 core)"
    assert "sums" in reasons[frozenset({slow, both})]
    assert "sums" not in reasons[frozenset({slow})]


def test_where_memory_is_short_a_batch_is_taken_in_micro_batches_if_training_can() -> None:
    one = {"hosts": [{"name": "a", "devices": [{"type": "cpu", "cores": 1.0}]}]}
    fixed: dict[str, Any] = {"train": {"global_batch_size": 512}}
    small = [curve(1.0, memory=4e8)]
    with pytest.raises(Infeasible, match="memory binds"):
        made(one, small, **fixed)
    result = made(one, small, most=16, **fixed)
    assert result.accumulation == 4
    assert result.devices[0].peak_memory_bytes <= 4e8
    assert result.devices[0].step_time_s.median == pytest.approx(4 * small[0].step_time(128).median)
    assert result.devices[0].step_time_s.median < result.predicted.step_time_s.median * (1 + 1e-9)  # type: ignore[union-attr]
    assert made(one, [curve(1.0)], most=16, **fixed).accumulation == 1


def test_the_front_holds_no_point_that_another_beats_and_marks_the_plan() -> None:
    result = made(MANY | {"prices": {"cpu": "0.1/h"}}, objective={"minimize": "energy"})
    assert [one.chosen for one in result.front].count(True) == 1
    values = [(one.time, one.energy, one.cost) for one in result.front]
    assert values == sorted(values)
    for mine in values:
        for other in values:
            assert other == mine or any(a < b for a, b in zip(mine, other, strict=True))  # type: ignore[operator]


def test_the_front_is_drawn_and_another_suffix_is_refused(tmp_path: Path) -> None:
    result = made(MANY | {"prices": {"cpu": "0.1/h"}}, objective={"minimize": "energy"})
    for suffix in ("svg", "html"):
        write_front(result, tmp_path / f"front.{suffix}")
        text = (tmp_path / f"front.{suffix}").read_text()
        assert text.count("<circle") == 2 * len(result.front)
    ElementTree.parse(tmp_path / "front.svg")
    with pytest.raises(BadInput, match=r"--plot: got .*front\.png; allowed: a file that ends in \.svg or \.html"):
        write_front(result, tmp_path / "front.png")
    with pytest.raises(BadInput, match="can't be written"):
        write_front(result, tmp_path / "nowhere" / "front.svg")


def test_a_noise_scale_says_what_a_large_batch_costs() -> None:
    sizes = [
        made(MANY, train={"batch_bounds": [16, 1000], "noise_scale": noise}).global_batch_size
        for noise in (1.0, 100.0, 1e6)
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    rule = made(MANY, train={"batch_bounds": [16, 1000], "noise_scale": 100.0}).batch_rule
    assert rule is not None
    assert "samples to the same loss" in rule


@pytest.mark.parametrize(
    ("pool", "job", "line"),
    [
        (TWO | {"prices": {"nvidia-t4": "1/h"}}, {"objective": {"minimize": "cost"}}, "no price for cpu"),
        (TWO | {"prices": {"nvidia-t4": "1/h"}}, {"objective": {"minimize": "time", "budget": 1.0}}, "no price for cpu"),
        (TWO, {"devices": {"min_count": 3}}, r"devices\.min_count: got 3; pool p has 2 device"),
        (TWO, {"devices": {"types": ["cpu"], "exclude": ["cpu"]}}, r"^devices\.exclude: got cpu; with that pool p has 0 device"),
        (TWO, {"devices": {"ids": ["a/cpu-0"], "exclude": ["a/cpu-0"]}}, r"got ids \[a/cpu-0\], exclude \[a/cpu-0\]; with"),
        (TWO, {"devices": {"min_count": 2}, "train": {"global_batch_size": 1}}, r"devices\.min_count: got 2; allowed: at most"),
        (TWO, {"train": {"global_batch_size": 1001}}, r"train\.global_batch_size: got 1001; allowed: at most the 1000 rows"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_one_clear_line(pool: dict[str, Any], job: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput, match=line) as caught:
        made(pool, **job)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"time_knots": Knots(sizes=(1, 2, 4), values=(2.0, 3.0, 1.0))}, "falls to 1 s at a batch of 4"),
        ({"step_time_s": Affine(fixed=1.0, per_sample=-0.1)}, "the step time of cpu falls"),
        ({"step_time_s": Affine(fixed=0.0, per_sample=0.0)}, "takes 0 s for a sample"),
        ({"idle_w": 30.0, "load_w": 20.0}, "draws 30 W idle and 20 W at work"),
    ],
)
def test_a_curve_that_can_not_be_is_refused(change: dict[str, Any], line: str) -> None:
    one = {"hosts": [{"name": "a", "devices": [{"type": "cpu", "cores": 1.0}]}]}
    with pytest.raises(BadInput, match=line):
        made(one, [curve(1.0).model_copy(update=change)])


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("network", {"bandwidth": "10"}, "a number with its unit"), ("prices", {"cpu": "-1/h"}, "a number of zero or more"),
        ("prices", {"gpu": "1/h"}, "known device types, not 'gpu'"), ("hosts", [], "at least 1 item"),
        ("power", {"cpu": {"idle_w": 9, "load_w": 3}}, "idle_w up to load_w"),
    ],
)  # fmt: skip
def test_a_pool_that_can_not_be_is_refused(field: str, value: Any, line: str) -> None:
    with pytest.raises(BadInput, match=line):
        validated(Pool, {"name": "p", **TWO, field: value}, "pool.yaml")


def test_what_is_infeasible_says_what_one_more_device_would_change() -> None:
    with pytest.raises(Infeasible) as caught:
        made(TWO, objective={"minimize": "time", "deadline": "30s"}, train={"epochs": 1000, "global_batch_size": 1000})
    details = caught.value.details
    assert set(details["one_more"]) == {"cpu (1 core)", "cpu (0.5 cores)"}
    assert all(value < details["nearest_deadline_s"] for value in details["one_more"].values())


def test_one_more_device_is_not_said_to_help_where_it_changes_nothing() -> None:
    slow = {"name": "a", "devices": [{"type": "cpu", "cores": 1.0}, {"type": "cpu", "cores": 0.01}]}
    long: dict[str, Any] = {"train": {"epochs": 1000, "global_batch_size": 1000}}
    for limits in ({"max_count": 1}, {}):
        with pytest.raises(Infeasible) as caught:
            made({"hosts": [slow]}, objective={"minimize": "time", "deadline": "30s"}, devices=limits, **long)
        found = caught.value.details["one_more"]
        assert ("with one more" in str(caught.value)) == bool(found) == (not limits)
        assert ("no device more of a kind of the pool brings that nearer" in str(caught.value)) == (not found)
        assert all(value < caught.value.details["nearest_deadline_s"] for value in found.values())


def test_deadline_and_budget_that_bind_only_together_are_told_with_what_each_would_have_to_be() -> None:
    priced = MANY | {"prices": {"cpu": "1/h"}}
    long: dict[str, Any] = {"train": {"epochs": 1000, "global_batch_size": 1000}}
    quick = made(priced, objective={"minimize": "time"}, **long).predicted
    cheap = made(priced, objective={"minimize": "cost"}, **long).predicted
    assert quick is not None
    assert cheap is not None
    assert cheap.cost is not None
    limits = {"deadline": f"{quick.duration_s.high * 1.01}s", "budget": cheap.cost.high * 1.01}
    with pytest.raises(Infeasible, match="bind together") as caught:
        made(priced, objective={"minimize": "energy", **limits}, **long)
    nearest = caught.value.details
    for field, value in (("budget", nearest["nearest_budget"]), ("deadline", f"{nearest['nearest_deadline_s']}s")):
        assert made(priced, objective={"minimize": "energy", **limits, field: value}, **long).feasible


def test_another_strategy_registers_itself_with_a_cost_function() -> None:
    @strategy("half-price")
    def cost(layout: Layout, counts: Sequence[int], seating: Seating, batch: int) -> Configuration | None:
        found = Space(layout, batch, 1, sum(counts)).configure(counts, 1)
        if not found:
            return None
        half = found[0].cost._replace(duration_s=Triple(*(value / 2 for value in found[0].cost.duration_s)))
        return dataclasses.replace(found[0], cost=half)

    try:
        with pytest.raises(ValueError, match="registered already"):
            strategy("half-price")
        assert made(TWO).strategy["name"] == "half-price"
    finally:
        del STRATEGIES["half-price"]
    assert made(TWO).strategy["name"] == "data-parallel"


@pytest.mark.parametrize(
    ("source", "says"), [("STRATEGIES['own'] = data_parallel", None), ("1 / 0", "ZeroDivisionError")]
)
def test_an_installed_package_brings_its_strategy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, says: str | None
) -> None:
    module = "from trainwright.tasks.allocate.strategies import STRATEGIES, data_parallel\n"
    (tmp_path / "my_strategy.py").write_text(f"{module}{source}\n")
    installed = tmp_path / "mine-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[trainwright.strategies]\nown = my_strategy\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_strategy", raising=False)
    load_installed.cache_clear()
    try:
        if says is None:
            assert made(TWO).feasible
            assert list(STRATEGIES) == ["data-parallel", "own"]
        else:
            with pytest.raises(BadInput, match=f"strategy own of mine: can't be loaded: {says}"):
                made(TWO)
    finally:
        STRATEGIES.pop("own", None)
        load_installed.cache_clear()
