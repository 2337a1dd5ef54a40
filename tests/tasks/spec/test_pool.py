"""The pool file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.documents import validated
from trainwright.tasks.spec.host_spec import Network
from trainwright.tasks.spec.pool import Pool, load_pool

EXAMPLE = """
name: lab
network: {bandwidth: 10Gbit, latency: 50us}
hosts:
  - {name: gpu-a, address: 10.0.0.11, devices: [{type: nvidia-a100-80gb, count: 8}],
     available: "18:00-08:00"}
  - {name: here,  address: localhost, devices: [{type: cpu, cores: 1.0}, {type: cpu, cores: 0.5}]}
  - {name: sim,   address: localhost,
     devices: [{type: emulated, speed: 2.0}, {type: emulated, speed: 1.0}]}
prices: {nvidia-a100-80gb: 2.1/h, energy: 0.25/kWh}
power: {nvidia-a100-80gb: {idle_w: 55, load_w: 400}}
"""


def test_the_contracts_example_is_read(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(EXAMPLE)
    pool = load_pool(path)
    devices = pool.devices()
    assert len(devices) == 12
    assert [device.id for device in devices[7:10]] == [
        "gpu-a/nvidia-a100-80gb-7",
        "here/cpu-0",
        "here/cpu-1",
    ]
    assert [(device.cores, device.speed) for device in devices[8:]] == [
        (1.0, None),
        (0.5, None),
        (None, 2.0),
        (None, 1.0),
    ]
    assert pool.network.bandwidth == 1.25e9
    assert pool.prices == {"nvidia-a100-80gb": 2.1, "energy": 0.25}


def test_stated_memory_is_that_of_the_machine_and_of_its_cpus_alone() -> None:
    cpu = [{"type": "cpu"}, {"type": "nvidia-t4"}]
    pool = Pool.model_validate(
        {
            "name": "p",
            "hosts": [
                {"name": "a", "address": "10.0.0.1", "memory": "64GiB", "devices": cpu},
                {"name": "b", "address": "10.0.0.1", "memory": "2GB", "devices": cpu},
                {"name": "c", "address": "10.0.0.2", "devices": cpu},
                {"name": "d", "address": "::1", "memory": "1TB", "devices": cpu},
            ],
        }
    )
    assert [one.host_memory_bytes for one in pool.devices()][::2] == [2e9, 2e9, None, 1e12]
    assert all(one.host_memory_bytes is None for one in pool.devices()[1::2])
    assert Pool.model_validate(pool.model_dump(mode="json")) == pool
    assert len({one.variant for one in pool.devices()}) == 4


@pytest.mark.parametrize(
    ("given", "stored"),
    [("50us", "50us"), ("0.05ms", "50us"), ("2s", "2s"), ("1.5ms", "1.5ms"), ("0.3us", "0.3us")],
)
def test_a_latency_is_stored_in_a_unit_that_people_write(given: str, stored: str) -> None:
    network = Network.model_validate({"latency": given})
    assert network.model_dump(mode="json")["latency"] == stored
    assert Network.model_validate_json(network.model_dump_json()) == network


def test_a_host_may_have_its_own_bandwidth_or_latency(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(EXAMPLE.replace("count: 8}]", "count: 8}], network: {bandwidth: 1Gbit}"))
    pool = load_pool(path)
    assert (pool.networks()["gpu-a"].bandwidth, pool.networks()["gpu-a"].latency) == (
        1.25e8,
        pytest.approx(50e-6),
    )
    assert pool.networks()["here"] == pool.network
    assert Pool.model_validate(pool.model_dump(mode="json")) == pool


def test_a_gpu_is_the_same_device_under_any_host_name(tmp_path: Path) -> None:
    def resources(host: str, address: str) -> list[str]:
        devices = "{type: nvidia-l4, count: 2}, {type: cpu}"
        path = tmp_path / f"{host}.yaml"
        path.write_text(
            f"name: p\nhosts: [{{name: {host}, address: {address}, devices: [{devices}]}}]"
        )
        return [device.resource for device in load_pool(path).devices()]

    one, other, elsewhere = (
        resources("a", "localhost"),
        resources("b", "127.0.0.1"),
        resources("c", "10.0.0.1"),
    )
    assert one[:2] == other[:2]
    assert one[0] != one[1]
    assert one[2] != other[2]  # a pool defines the parts of a CPU
    assert not {*one} & {*elsewhere}


def test_without_a_file_the_pool_is_this_machine() -> None:
    (device,) = load_pool(None).devices()
    assert device.type == "cpu"
    assert device.local


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: p\nhosts: []", "hosts"),
        ("name: p", "hosts: required field is missing"),
        ("name: p\nhosts: [{name: a, devices: []}]", "hosts.0.devices"),
        ("name: p\nhosts: [{name: a, devices: [{type: abacus}]}]", "a device type of"),
        ("name: p\nhosts: [{name: a, devices: [{type: cpu, cores: -1}]}]", "cores: got -1"),
        ("name: p\nhosts: [{name: a, devices: [{type: cpu, cores: 0}]}]", "cores: got 0"),
        ("name: p\nhosts: [{name: a, devices: [{type: cpu, cores: 1e-9}]}]", "cores: got 1e-09"),
        ("name: p\nhosts: [{name: a, devices: [{type: emulated}]}]", "speed for emulated"),
        (
            "name: p\nhosts: [{name: a, devices: [{type: nvidia-t4, cores: 2}]}]",
            "cores only for cpu",
        ),
        (
            "name: p\nhosts: [{name: a, devices: [{type: cpu}]}, "
            "{name: a, devices: [{type: cpu}]}]",
            "different names",
        ),
        (
            "name: p\nnetwork: {bandwidth: 10}\nhosts: [{name: a, devices: [{type: cpu}]}]",
            "a number with its unit",
        ),
        (
            "name: p\nprices: {cpu: -2/h}\nhosts: [{name: a, devices: [{type: cpu}]}]",
            "zero or more per h",
        ),
        ("name: p\nprices: {energy: 2/h}\nhosts: [{name: a, devices: [{type: cpu}]}]", "per kWh"),
        (
            "name: p\nprices: {abacus: 2/h}\nhosts: [{name: a, devices: [{type: cpu}]}]",
            "not 'abacus'",
        ),
        ("name: p\nhosts: [{name: a, address: 'x; rm', devices: [{type: cpu}]}]", "address"),
        (
            "name: p\nhosts: [{name: a, address: -oProxyCommand=x, devices: [{type: cpu}]}]",
            "not beginning with -",
        ),
        (
            "name: p\nhosts: [{name: a, address: root@b, devices: [{type: cpu}]}]",
            "got 'root@b'; allowed: a host name",
        ),
        (
            "name: p\nhosts: [{name: a, available: 9-17, devices: [{type: cpu}]}]",
            "a daily window from HH:MM to HH:MM",
        ),
        (
            "name: p\nhosts: [{name: a, available: 08:00-08:00, devices: [{type: cpu}]}]",
            "hosts.0.available: got '08:00-08:00'; "
            "allowed: a daily window that begins and ends at different times",
        ),
        (
            "name: p\nhosts: [{name: a, memory: 64, devices: [{type: cpu}]}]",
            "hosts.0.memory: got 64; allowed: a number with its unit, one of MB, GB, TB, MiB, GiB",
        ),
        (
            "name: p\nhosts: [{name: a, memory: 1e-9GB, devices: [{type: cpu}]}]",
            "hosts.0.memory: got '1e-9GB'; allowed: 1MB to 1000TB, such as 64GiB",
        ),
        (
            "name: p\nnetwork: {latency: 1h}\nhosts: [{name: a, devices: [{type: cpu}]}]",
            "network.latency: got '1h'; allowed: more than zero, up to 10s",
        ),
        (
            "name: p\nhosts: "
            "[{name: a, devices: [{type: cpu}], network: {latency: 0s, bandwidth: 1e-30Gbit}}]",
            "hosts.0.network.bandwidth: got '1e-30Gbit'; allowed: 1kbit to 1000000Gbit, "
            "such as 10Gbit (also wrong: hosts.0.network.latency)",
        ),
        (
            "name: p\ncurrency: '1 2'\nhosts: [{name: a, devices: [{type: cpu}]}]",
            "currency: got '1 2'; allowed: 1 to 10 letters or signs",
        ),
        (
            "name: p\nhosts: [{name: A b, devices: [{type: cpu}]}]",
            "lower-case letters, digits and -",
        ),
        (
            "name: p\npower: {energy: {idle_w: 1, load_w: 2}}\n"
            "hosts: [{name: a, devices: [{type: cpu}]}]",
            "which is a price",
        ),
        (
            "name: p\nhosts: " + "[{name: a}, " * 1 + "[" * 20 + "1" + "]" * 20 + "]",
            "hosts.0.devices: required field is missing",
        ),
        (
            '{"name": "p", "a\\nb": 1, "hosts": [{"name": "a", "devices": [{"type": "cpu"}]}]}',
            r"'a\nb': unknown field",
        ),
        (
            "name: p\nhosts: {a: " + "x" * 5000 + "}",
            "hosts: got a mapping of fields; allowed: a list",
        ),
        ("name: p\nhost: []", "hosts: required field is missing"),
        (
            "name: p\nhosts: [{name: a, devices: [{type: cpu}], network: {bandwidth: 10}}]",
            "network.bandwidth: got 10",
        ),
        (
            "name: p\nhosts: [{name: a, devices: [{type: cpu}], cpus: 1}]",
            "allowed: name, address, devices, available",
        ),
        ("name: p\nhosts: [{name: a, devices: [{type: cpu}]}]\nprices: {cpu: -1/h}", "not '-1/h'"),
        (
            "name: p\nhosts: [{name: a, devices: [{type: abacus}]}]",
            "hosts.0.devices.0.type: got 'abacus'; allowed: a device type",
        ),
        (
            "name: p\nhosts: [{name: a, devices: [{type: cpu}]}]\n"
            "power: {abacus: {idle_w: 1, load_w: 2}}",
            "power: allowed: device types",
        ),
        (
            "name: p\nhosts: [{name: a, python: python3, devices: [{type: cpu}]}]",
            "got 'python3'; allowed: an absolute path",
        ),
        (
            "name: p\nssh: {user: -l root}\nhosts: [{name: a, devices: [{type: cpu}]}]",
            "got '-l root'; allowed: a name of letters",
        ),
        (
            "name: p\nhosts: [{name: a, devices: [{type: cpu, count: " + "9" * 5000 + "}]}]",
            "a number of 5000 digits; allowed",
        ),
        (
            "name: p\nhosts: [{name: a, devices: ["
            + "{type: nvidia-t4, count: 10000}, " * 11
            + "]}]",
            "hosts with 100000 devices together at most, not 110000",
        ),
        (
            "name: [" + "x, " * 500 + "x]\nhosts: [{name: a, devices: [{type: cpu}]}]",
            "...; allowed: text",
        ),
    ],
)
def test_a_wrong_pool_gives_one_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        load_pool(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "pattern" not in str(caught.value)
    assert len(str(caught.value)) < 700 + len(str(path))


def test_a_missing_pool_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"^pool: .*none\.yaml: no such file$"):
        load_pool(tmp_path / "none.yaml")


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=300),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4)
        ),
        max_leaves=8,
    ),
    st.sampled_from(["name", "network", "hosts", "prices", "power", "other"]),
)
def test_any_value_of_a_field_is_read_or_refused_in_one_line(value: object, field: str) -> None:
    fields = {"name": "p", "hosts": [{"name": "a", "devices": [{"type": "cpu"}]}], field: value}
    said = ""
    try:
        validated(Pool, fields, "pool.yaml")
    except BadInput as error:
        said = str(error)
    assert not said or field in said
    assert "\n" not in said
    assert not re.search(r"pattern|Input should", said.split("allowed:")[-1])
