"""The ranks' numbers and addresses on hosts, access to the rendezvous, versions, ssh options."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import doors
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_case import planned

from trainwright.estimator.interfaces import interface_of
from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.host_spec import Ssh
from trainwright.tasks.spec.pool import load_pool
from trainwright.tasks.ssh import ssh_command
from trainwright.tasks.train.exchange.host_name import ADDRESS, own_address
from trainwright.tasks.train.exchange.rendezvous import INTERFACE, horovod_server, place_among
from trainwright.tasks.train.hosts.hosts import machine
from trainwright.tasks.train.hosts.versions import differences, facts

LOOPBACK = interface_of("127.0.0.1")
HOSTS = ["localhost", "127.0.0.1", "10.0.0.1", "10.0.0.2"]


@given(st.lists(st.sampled_from(HOSTS), min_size=1, max_size=12))
def test_ranks_are_numbered_on_each_host_and_across_hosts(addresses: list[str]) -> None:
    devices = planned(
        [{"type": "cpu", "address": one} for one in addresses], [1] * len(addresses)
    ).devices
    machines = [machine(device) for device in devices]
    assert ("localhost" in machines) == bool({"localhost", "127.0.0.1"} & set(addresses))
    places = [place_among(machines, rank) for rank in range(len(devices))]
    sizes = Counter(machines)
    for name, own in zip(machines, places, strict=True):
        assert own["local_size"] == sizes[name]
        assert own["cross_size"] == sum(size > own["local_rank"] for size in sizes.values())
    within = {(name, own["local_rank"]) for name, own in zip(machines, places, strict=True)}
    across = {(own["cross_rank"], own["local_rank"]) for own in places}
    assert len(within) == len(across) == len(devices)
    assert all(
        own["cross_rank"] < own["cross_size"] and own["local_rank"] < own["local_size"]
        for own in places
    )


def test_only_the_launchs_machines_may_query_the_rendezvous() -> None:
    pytest.importorskip("horovod")
    server = horovod_server("127.0.0.1", ["localhost"])
    try:
        host, port = server.server_address
        assert host == "127.0.0.1"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{host}:{port}/global/0", timeout=60)
        with socket.create_connection(
            (host, port), timeout=60, source_address=("127.0.0.9", 0)
        ) as stranger:
            stranger.sendall(b"GET /global/0 HTTP/1.0\r\n\r\n")
            assert stranger.recv(100) == b""
    finally:
        server.shutdown()
        server.server_close()


def test_machines_differ_by_versions_and_sources() -> None:
    here = facts()
    assert differences(here, facts(), "horovod") == []
    versions = {**here["versions"], "torch": "0.1", "horovod": None}
    there = {**here, "versions": versions, "sources": "0" * 64}
    found = differences(here, there, "torch")
    assert [one.split(":")[0] for one in found] == ["torch", "trainwright's sources"]
    assert "0.1 there" in found[0]
    assert differences(here, {**here, "sources": None}, "torch") == [
        "trainwright is not installed on that host"
    ]
    if here["versions"]["horovod"] is not None:
        assert any(one.startswith("horovod: ") for one in differences(here, there, "horovod"))


def test_the_pool_file_defines_the_login(tmp_path: Path) -> None:
    pool = tmp_path / "pool.yaml"
    hosts = "hosts: [{name: a, address: 10.0.0.1, devices: [{type: cpu}]}]"
    text = f"name: p\n{hosts}\nssh: {{known_hosts: keys, user: train, port: 2222}}\n"
    pool.write_text(text)
    (tmp_path / "keys").touch()
    login = load_pool(pool).ssh
    assert login.known_hosts == str(tmp_path / "keys")
    words = ssh_command("10.0.0.1", doors.settings(), login)
    assert words[-2:] == ["--", "10.0.0.1"]
    assert {
        "User=train",
        "Port=2222",
        f'UserKnownHostsFile="{tmp_path}/keys"',
        "StrictHostKeyChecking=yes",
    } <= set(words)
    assert "StrictHostKeyChecking=yes" in ssh_command("10.0.0.1", doors.settings(), Ssh())
    pool.write_text(text.replace("user: train", "user: -oProxyCommand"))
    with pytest.raises(BadInput, match=r"ssh\.user"):
        load_pool(pool)


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({ADDRESS: "10.0.0.7", INTERFACE: LOOPBACK}, "10.0.0.7"),
        ({INTERFACE: LOOPBACK, "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, "127.0.0.1"),
        ({INTERFACE: f"{LOOPBACK},none"}, "127.0.0.1"),
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4"}, "127.0.0.1"),
    ],
)
def test_a_rank_listens_on_the_given_address_or_its_interface_or_the_loopback(
    monkeypatch: pytest.MonkeyPatch, given_: dict[str, str], expected: str
) -> None:
    for name in (ADDRESS, INTERFACE, "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given_.items():
        monkeypatch.setenv(name, value)
    assert own_address() == expected


def test_a_missing_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS, raising=False)
    monkeypatch.setenv(INTERFACE, "none0")
    with pytest.raises(OSError, match="no interface 'none0'"):
        own_address()
