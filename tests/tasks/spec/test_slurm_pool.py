"""A pool whose hosts Slurm gives: counted hosts, their options, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.documents import validated
from trainwright.tasks.spec.pool import Pool

CPU = [{"type": "cpu", "cores": 2.0}]


def pool(hosts: list[dict[str, Any]], **fields: Any) -> Pool:
    return validated(Pool, {"name": "p", "engine": "slurm", "hosts": hosts, **fields}, "pool")


def test_a_count_makes_that_many_hosts_without_a_node() -> None:
    found = pool([{"name": "big", "count": 2, "devices": CPU}, {"name": "one", "devices": CPU}])
    assert [host.name for host in found.hosts] == ["big-1", "big-2", "one"]
    assert [device.id for device in found.devices()] == ["big-1/cpu-0", "big-2/cpu-0", "one/cpu-0"]
    assert not any(device.local for device in found.devices())
    assert Pool.model_validate(found.model_dump()) == found


def test_a_hosts_own_options_replace_the_pools() -> None:
    own = {"constraint": "a100", "partition": "gpu"}
    found = pool(
        [{"name": "a", "devices": CPU, "slurm": own}, {"name": "b", "devices": CPU}],
        slurm={"partition": "work", "time_limit": "12h"},
    )
    of_a, of_b = map(found.slurm_of, found.hosts)
    assert (of_a.partition, of_a.constraint, of_a.time_limit) == ("gpu", "a100", 43200.0)
    assert (of_b.partition, of_b.constraint) == ("work", None)


def test_runs_lease_names_of_their_own_as_slurms_queue_gives_out_the_devices() -> None:
    device = pool([{"name": "a", "devices": CPU}]).devices()[0]
    assert device.resource_of("file:///x/1") != device.resource_of("file:///x/2")
    here = Pool.model_validate({"name": "p", "hosts": [{"name": "a", "devices": CPU}]}).devices()[0]
    assert here.resource_of("file:///x/1") == here.resource_of("file:///x/2") == here.resource


@pytest.mark.parametrize(
    ("host", "fields", "says"),
    [
        (
            {"count": 2},
            {"engine": "ssh"},
            "count with `engine: slurm` or `engine: kubernetes`, not for host a",
        ),
        ({"slurm": {"node": "n"}}, {"engine": "ssh"}, "slurm with `engine: slurm`, not for host a"),
        ({"address": "10.0.0.1"}, {}, "hosts without an address, which Slurm gives"),
        ({}, {"engine": "pbs"}, "engine: got 'pbs'; allowed: 'ssh', 'slurm' or 'kubernetes'"),
        ({}, {"slurm": {"partition": "-p x"}}, "slurm.partition: got '-p x'; allowed: a partition"),
        ({}, {"slurm": {"queue": "x"}}, "slurm.queue: unknown field; allowed: partition"),
        ({"slurm": {"gres": "gpu:a100:4"}}, {}, "allowed: Slurm's name of the GPUs without their"),
        ({"slurm": {"constraint": "$(id)"}}, {}, "allowed: features of nodes"),
        ({"slurm": {"time_limit": 12}}, {}, "slurm.time_limit: got 12"),
    ],
)
def test_a_wrong_pool_of_slurm_gives_one_line(
    host: dict[str, Any], fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadInput) as caught:
        pool([{"name": "a", "devices": CPU, **host}], **fields)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
