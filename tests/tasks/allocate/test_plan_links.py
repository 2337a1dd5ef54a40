"""How all-reduces between ranks change a plan."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import TWO, plan

from trainwright.estimator.curves import Interval
from trainwright.estimator.predict.communication import (
    FIGURES_BYTES,
    HOROVOD_POLL_S,
    Link,
    all_reduce,
    all_reduces,
)
from trainwright.tasks.allocate.plan.topology import PAYLOAD
from trainwright.tasks.runs.artefacts.estimate import Estimate

BOTH: dict[str, Any] = {"devices": {"min_count": 2}, "train": {"global_batch_size": 96}}


def step_time(pool: dict[str, Any], link: Link | None, **job: Any) -> Interval:
    predicted = plan(pool, link=link, **BOTH | job).predicted
    assert predicted is not None
    return predicted.step_time_s


@settings(deadline=None)
@given(
    bandwidth=st.floats(1e6, 1e12),
    latency=st.floats(1e-6, 0.1),
    spread=st.floats(0, 4),
    slower=st.floats(1.1, 100),
)
def test_a_slower_link_between_ranks_makes_a_step_longer(
    bandwidth: float, latency: float, spread: float, slower: float
) -> None:
    link = Link(bandwidth_bytes_per_s=bandwidth, latency_s=latency, spread=spread)
    here = step_time(TWO, link)
    for change in ({"bandwidth_bytes_per_s": bandwidth / slower}, {"latency_s": latency * slower}):
        assert step_time(TWO, link.model_copy(update=change)).median > here.median


def test_the_measured_link_replaces_the_prior_with_its_own_interval() -> None:
    still = Link(bandwidth_bytes_per_s=1e300, latency_s=0, spread=0)
    link = Link(bandwidth_bytes_per_s=1e8, latency_s=1e-3, spread=0.25)
    alone, shared, summed = (
        step_time(TWO, still),
        step_time(TWO, link),
        all_reduces(link, 1e6 + FIGURES_BYTES, 2, 2),
    )
    assert shared.median - alone.median == pytest.approx(summed.median)
    assert shared.low - alone.low == pytest.approx(summed.low)
    assert shared.high - alone.high == pytest.approx(summed.high)
    prior = step_time(TWO, None)
    assert prior.median > alone.median
    assert prior.high - alone.high == pytest.approx(3 * (prior.median - alone.median))


def test_a_library_with_cycles_adds_their_waiting_and_negotiation_to_a_step() -> None:
    link = Link(bandwidth_bytes_per_s=1e8, latency_s=1e-3, spread=0.25)
    at_once, cycled = step_time(TWO, link), step_time(TWO, link, cycle_s=1e-2)
    agreed = all_reduce(link, FIGURES_BYTES, 2)
    assert cycled.median - at_once.median == pytest.approx(
        5e-3 + HOROVOD_POLL_S / 2 + 1.5 * agreed.median
    )
    assert cycled.low - at_once.low == pytest.approx(agreed.low)
    assert cycled.high - at_once.high == pytest.approx(1e-2 + HOROVOD_POLL_S + 2 * agreed.high)
    one = {"devices": {"max_count": 1, "min_count": 1}}
    assert step_time(TWO, link, cycle_s=1e-2, **one) == step_time(TWO, link, **one)


def test_this_machines_link_does_not_apply_to_ranks_on_another_machine() -> None:
    elsewhere = {"hosts": [TWO["hosts"][0] | {"address": "10.0.0.7"}]}
    slow = Link(bandwidth_bytes_per_s=1e3, latency_s=1, spread=0)
    assert step_time(elsewhere, slow) == step_time(elsewhere, None)
    assert step_time(TWO, slow).median > step_time(TWO, None).median


def test_pool_hosts_with_one_address_share_a_machine_and_others_use_the_network() -> None:
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
        4 + (1e6 + FIGURES_BYTES) / (PAYLOAD * 1e3), rel=1e-3
    )


def test_a_host_with_a_slow_network_slows_only_plans_that_use_it() -> None:
    def pool(network: dict[str, str], *own: dict[str, str]) -> dict[str, Any]:
        return {
            "network": network,
            "hosts": [
                {
                    "name": f"h{number}",
                    "address": f"10.0.0.{number}",
                    "devices": [{"type": "cpu"}],
                    "network": one,
                }
                for number, one in enumerate(own)
            ],
        }

    quick, slow = (
        {"bandwidth": "100Gbit", "latency": "5us"},
        {"bandwidth": "1Mbit", "latency": "20ms"},
    )
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
def test_an_unmeasured_local_link_is_not_slower_than_the_network(
    ranks: int, bandwidth: str, latency: str
) -> None:
    def step_s(hosts: list[dict[str, Any]]) -> float:
        pool = {"hosts": hosts, "network": {"bandwidth": bandwidth, "latency": latency}}
        fixed = {"train": {"global_batch_size": 64}, "devices": {"min_count": ranks}}
        predicted = plan(pool, **fixed).predicted
        assert predicted is not None
        return predicted.step_time_s.median

    apart = [
        {"name": f"h{n}", "address": f"10.0.0.{n}", "devices": [{"type": "cpu", "cores": 1.0}]}
        for n in range(ranks)
    ]
    together = [
        {
            "name": "h",
            "address": "10.0.0.1",
            "devices": [{"type": "cpu", "cores": 1.0, "count": ranks}],
        }
    ]
    assert step_s(together) <= step_s(apart) * (1 + 1e-9)


def test_ranks_on_several_machines_form_one_ring() -> None:
    """A ring sum: 2 (n - 1) messages and 2 (n - 1) / n of the bytes, for any ranks per machine."""

    def sums_s(machines: int, each: int) -> float:
        hosts = [
            {
                "name": f"h{n}",
                "address": f"10.0.0.{n}",
                "devices": [{"type": "cpu", "cores": 1.0, "count": each}],
            }
            for n in range(machines)
        ]
        network = {"bandwidth": "1Gbit", "latency": "50ms"}
        fixed = {"train": {"global_batch_size": 8}, "devices": {"min_count": 8}}
        found = plan({"hosts": hosts, "network": network}, **fixed)
        assert found.predicted is not None
        return found.predicted.step_time_s.median

    network = Link(bandwidth_bytes_per_s=PAYLOAD * 125e6, latency_s=0.05, spread=0)
    ring = all_reduces(network, 1e6 + FIGURES_BYTES, 2, 8).median
    for machines in (8, 4, 2):
        assert sums_s(machines, 8 // machines) == pytest.approx(ring + 3e-3, rel=1e-6)


def test_an_estimate_stored_without_a_link_is_readable() -> None:
    old = {
        "schema_version": 1,
        "mode": "calibrated",
        "gradient_bytes": 1.0,
        "curves": [],
        "calibrations": {},
    }
    assert Estimate.model_validate(old).local_link is None


FAST, SLOW_NET = {"bandwidth": "100Gbit"}, {"bandwidth": "1Gbit"}


def test_another_hosts_network_does_not_change_the_link_inside_a_host() -> None:
    host = {"name": "a", "address": "10.0.0.1", "network": SLOW_NET}
    host |= {"devices": [{"type": "cpu", "cores": 1.0, "count": 2}]}
    other = host | {"name": "b", "address": "10.0.0.2", "network": FAST}
    both = {"devices": {"min_count": 2, "hosts": ["a"]}, "train": {"global_batch_size": 64}}
    alone = plan({"hosts": [host]}, **both)
    beside = plan({"hosts": [host, other]}, **both)
    assert alone.predicted == beside.predicted
    inner = plan({"hosts": [host | {"inner": {"bandwidth": "100Gbit", "latency": "1us"}}]}, **both)
    assert inner.predicted is not None
    assert alone.predicted is not None
    assert inner.predicted.step_time_s.median < alone.predicted.step_time_s.median


def test_two_hosts_at_one_address_have_the_slower_network_whichever_is_used() -> None:
    one = {"name": "a", "address": "10.0.0.1", "network": SLOW_NET}
    one |= {"devices": [{"type": "cpu", "cores": 1.0}]}
    same = one | {"name": "b", "network": FAST}
    other = one | {"name": "c", "address": "10.0.0.2", "network": FAST}
    chosen = {"min_count": 2, "ids": ["b/cpu-0", "c/cpu-0"]}
    size = {"global_batch_size": 64}
    found = plan({"hosts": [one, same, other]}, devices=chosen, train=size)
    apart = plan({"hosts": [same, other]}, devices=chosen, train=size)
    assert found.predicted is not None
    assert apart.predicted is not None
    assert found.predicted.step_time_s.median > apart.predicted.step_time_s.median
