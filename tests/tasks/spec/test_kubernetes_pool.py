"""Pool files of a Kubernetes cluster."""

from __future__ import annotations

from typing import Any

import pytest

from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.documents import validated
from trainwright.tasks.spec.pool import Pool

CLUSTER = {"image": "registry.example/train:1"}


def pool(host: dict[str, Any] | None = None, **fields: Any) -> Pool:
    hosts = [{"name": "a", "devices": [{"type": "cpu"}], **(host or {})}]
    given = {"name": "p", "engine": "kubernetes", "kubernetes": CLUSTER, "hosts": hosts, **fields}
    return validated(Pool, {name: one for name, one in given.items() if one is not None}, "pool")


def test_hosts_are_known_by_their_names() -> None:
    found = pool({"count": 2, "node_selector": {"disk": "ssd"}})
    assert [(host.name, host.address) for host in found.hosts] == [("a-1", "a-1"), ("a-2", "a-2")]
    devices = found.devices()
    assert {device.engine for device in devices} == {"kubernetes"}
    assert devices[0].resource_of("r1") != devices[0].resource_of("r2")


@pytest.mark.parametrize(
    ("host", "fields", "says"),
    [
        ({}, {"kubernetes": None}, "`kubernetes: {image: …}` together"),
        ({}, {"engine": "ssh"}, "`kubernetes: {image: …}` together"),
        ({}, {"container": {"image": "a"}}, "no `container` with Kubernetes"),
        ({"address": "10.0.0.1"}, {}, "hosts without an address, which Kubernetes gives"),
        ({"slurm": {"node": "n"}}, {}, "slurm with `engine: slurm`, not for host a"),
        ({"node_selector": {"a": "b"}}, {"engine": "ssh"}, "node_selector with `engine: kubernet"),
        ({}, {"kubernetes": {**CLUSTER, "namespace": "My"}}, "kubernetes.namespace: got 'My'"),
        ({}, {"kubernetes": {**CLUSTER, "api": "https://a"}}, "kubernetes.api: got 'https://a'"),
        (
            {},
            {"kubernetes": {**CLUSTER, "api": "http://127.0.0.1:8001"}},
            "allowed: address with `api`, at which pods reach this machine",
        ),
        ({}, {"kubernetes": {}}, "kubernetes.image"),
    ],
)
def test_a_wrong_pool_gives_one_line(
    host: dict[str, Any], fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadInput) as error:
        pool(host, **fields)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
