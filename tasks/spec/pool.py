"""The pool file: hosts, their devices, the network between them, prices and power.

The ledger (`tasks.leases.ledger`) knows which devices are held.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from trainwright.estimator.devices import DEVICE_TYPES, EMULATED, HOST_MEMORY_TYPES, threads_of
from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.container_spec import Container
from trainwright.tasks.spec.documents import (
    Bandwidth,
    Document,
    Latency,
    MemorySize,
    matching,
    parse_text,
    read_mapping,
    validated,
)
from trainwright.tasks.spec.job import Name
from trainwright.tasks.spec.kubernetes_spec import Kubernetes
from trainwright.tasks.spec.slurm_spec import Slurm
from trainwright.tasks.spec.windows import WINDOW

_MOST_PRICE = 1e9
_MOST_DEVICES = 100_000
PoolEngine = Literal["ssh", "slurm", "kubernetes"]
LOCAL_ADDRESSES = ("localhost", "127.0.0.1", "::1")


def _prices(values: object) -> object:
    """{type: "2.1/h", energy: "0.25/kWh"} -> numbers."""
    if not isinstance(values, dict):
        return values
    parsed = {}
    for name, value in values.items():
        unit = "kWh" if name == "energy" else "h"
        match = (
            re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*/\s*" + unit + r"\s*", value)
            if isinstance(value, str)
            else None
        )
        price = math.inf if match is None else float(match.group(1))
        if price > _MOST_PRICE:
            raise ValueError(
                f"for {name} a number of zero or more per {unit}, such as 2.1/{unit}, "
                f"up to {_MOST_PRICE:,.0f}, not {str(value)[:80]!r}"
            )
        parsed[name] = price
    return parsed


def _price_texts(prices: dict[str, float]) -> dict[str, str]:
    return {
        name: f"{Decimal(repr(value)):f}/{'kWh' if name == 'energy' else 'h'}"
        for name, value in prices.items()
    }


Prices = Annotated[
    dict[str, float],
    BeforeValidator(_prices),
    PlainSerializer(_price_texts, return_type=dict[str, str]),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": "string", "examples": ["2.1/h", "0.25/kWh"]},
        }
    ),
]
"""Per hour of a device type, and per kWh of energy, in the pool's currency."""


class DeviceEntry(Document):
    """One or more equal devices of a host."""

    type: str = Field(description="a known device type, cpu or emulated")
    count: int = Field(default=1, ge=1, le=10_000, description="number of such devices")
    cores: float | None = Field(
        default=None,
        ge=0.001,
        le=4096,
        description="for cpu: number of cores, or a fraction of one",
    )
    speed: float | None = Field(
        default=None, ge=1e-6, le=1e9, description="for emulated: relative speed"
    )

    @field_validator("type")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in DEVICE_TYPES:
            raise ValueError(f"a device type of {', '.join(sorted(DEVICE_TYPES))}")
        return value

    @model_validator(mode="after")
    def _fitting(self) -> DeviceEntry:
        if self.cores is not None and self.type != "cpu":
            raise ValueError(f"cores only for cpu devices, not for {self.type}")
        if (self.speed is not None) != (self.type == EMULATED):
            raise ValueError("speed for emulated devices (required), and for no others")
        return self


class HostNetwork(Document):
    """A host's own network; missing values are the pool's."""

    bandwidth: Bandwidth | None = Field(default=None, description="to other hosts, such as 1Gbit")
    latency: Latency | None = Field(default=None, description="to other hosts, such as 200us")


class Host(Document):
    """A machine and its devices."""

    name: Name
    address: str = matching(
        r"^[A-Za-z0-9.:_][A-Za-z0-9.:_-]{0,252}$",
        "a host name or IP address of 1 to 253 letters, digits and . : _ -, without user@ "
        "and not beginning with -",
        default="localhost",
        description="name or IP address; with Slurm none, because it chooses the node",
    )
    devices: list[DeviceEntry] = Field(min_length=1, description="at least one")
    available: str | None = matching(
        WINDOW,
        "a daily window from HH:MM to HH:MM, UTC, such as 18:00-08:00",
        default=None,
        description="daily window, UTC, such as 18:00-08:00",
    )
    network: HostNetwork = Field(
        default=HostNetwork(),
        description="this host's bandwidth and latency, if not the pool's",
    )
    inner: HostNetwork = Field(
        default=HostNetwork(),
        description="bandwidth and latency between two training processes on this host; "
        "default: 4 Gbit and 0.3 ms, or its network if faster; on this machine, as measured",
    )
    memory: MemorySize | None = Field(
        default=None,
        description="main memory for training, such as 64GiB; default: unknown; on this machine, "
        "what is usable",
    )
    python: str | None = matching(
        r"^/",
        "an absolute path, such as /opt/trainwright/bin/python",
        default=None,
        description="path of the Python with trainwright on the host; default: this machine's "
        "path, or in a container the first in its path",
    )
    container: Container | None = Field(
        default=None,
        description="container for the host's processes; default: the pool's, else none",
    )
    count: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="with Slurm or Kubernetes: number of such hosts, named NAME-1, NAME-2, …",
    )
    slurm: Slurm | None = Field(
        default=None, description="with Slurm: this host's options, over the pool's"
    )
    node_selector: dict[str, str] = Field(
        default_factory=dict,
        description="with Kubernetes: labels of this host's node, beside the pool's",
    )

    def require_engine(self, engine: str) -> None:
        """Raises ValueError if a field is another engine's."""
        for field, given, engines in (
            ("count", self.count > 1, ("slurm", "kubernetes")),
            ("slurm", self.slurm is not None, ("slurm",)),
            ("node_selector", bool(self.node_selector), ("kubernetes",)),
        ):
            if given and engine not in engines:
                allowed = " or ".join(f"`engine: {one}`" for one in engines)
                raise ValueError(f"{field} with {allowed}, not for host {self.name}")
        if engine != "ssh" and self.address not in (
            Host.model_fields["address"].default,
            self.name,
        ):
            by_node = " (slurm: {node: …} asks for one node)" if engine == "slurm" else ""
            raise ValueError(
                f"hosts without an address, which {engine.capitalize()} gives, not "
                f"{self.address!r} for {self.name}{by_node}"
            )

    @field_validator("available")
    @classmethod
    def _opens_and_closes(cls, value: str | None) -> str | None:
        if value is not None and len(set(value.split("-"))) == 1:
            raise ValueError(
                "a daily window that begins and ends at different times, such as 18:00-08:00; "
                "without it, the host is always available"
            )
        return value


class Ssh(Document):
    """How to log in to the hosts; missing values come from the user's ssh configuration.

    Paths are relative to the pool file.
    """

    user: str | None = matching(
        r"^[A-Za-z0-9_][A-Za-z0-9._-]*$",
        "a name of letters, digits and . _ -, not beginning with . or -",
        default=None,
        description="user name on the hosts",
    )
    port: int | None = Field(default=None, ge=1, le=65535, description="port of sshd")
    identity: str | None = Field(default=None, description="file of the private key")
    known_hosts: str | None = Field(
        default=None, description="known_hosts file with the hosts' keys; default: the user's"
    )


class Network(Document):
    """The network between hosts. Between two hosts: the lower bandwidth and the higher latency."""

    bandwidth: Bandwidth = Field(default=125e6, description="such as 10Gbit; 1kbit to 1000000Gbit")
    latency: Latency = Field(default=50e-6, description="such as 200us; at most 10s")

    def slower(self, other: Network) -> Network:
        """The network between a host with this network and a host with the other."""
        return Network.model_construct(
            bandwidth=min(self.bandwidth, other.bandwidth), latency=max(self.latency, other.latency)
        )


class Power(Document):
    """A device's power; overrides the datasheet."""

    idle_w: float = Field(ge=0, le=1e6, description="power while it waits")
    load_w: float = Field(gt=0, le=1e6, description="power while it computes")

    @model_validator(mode="after")
    def _ordered(self) -> Power:
        if self.idle_w > self.load_w:
            raise ValueError(f"idle_w up to load_w ({self.load_w:g}), not {self.idle_w:g}")
        return self


class Pool(Document):
    """A pool of devices."""

    name: Name
    network: Network = Network()
    engine: PoolEngine = Field(
        default="ssh",
        description="what starts processes on the hosts: ssh, or slurm or kubernetes, whose queue "
        "then gives out the devices",
    )
    ssh: Ssh = Ssh()
    slurm: Slurm = Field(default=Slurm(), description="with Slurm: options of all hosts")
    kubernetes: Kubernetes | None = Field(
        default=None, description="with Kubernetes: namespace and image of all hosts"
    )
    container: Container | None = Field(
        default=None, description="container for the processes of all hosts that have no own one"
    )
    hosts: list[Host] = Field(min_length=1, description="at least one")
    prices: Prices = Field(default_factory=dict, description="per device type, and of energy")
    currency: str | None = matching(
        r"^[A-Za-z$€£¥₹]{1,10}$",
        "1 to 10 letters or signs, such as EUR or $",
        default=None,
        description="the currency of prices and budgets, such as EUR, for display",
    )
    power: dict[str, Power] = Field(default_factory=dict, description="per device type")

    @field_validator("prices", "power")
    @classmethod
    def _of_known_types(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if info.field_name == "power" and "energy" in value:
            raise ValueError(
                "device types, not 'energy', which is a price (prices: {energy: 0.25/kWh})"
            )
        for named in value:
            if named not in DEVICE_TYPES and named != "energy":
                known = ", ".join(
                    [*DEVICE_TYPES, *(["energy"] if info.field_name == "prices" else [])]
                )
                raise ValueError(f"device types ({known}), not {named[:80]!r}")
        return value

    @field_validator("hosts")
    @classmethod
    def _each(cls, hosts: list[Host], info: ValidationInfo) -> list[Host]:
        """Every host by itself; of a queue, by its name, as its address is not known yet."""
        engine, found = info.data.get("engine", "ssh"), []
        for host in hosts:
            host.require_engine(engine)
            if engine == "ssh":
                found.append(host)
                continue
            for number in range(host.count):
                name = f"{host.name}-{number + 1}" if host.count > 1 else host.name
                found.append(host.model_copy(update={"name": name, "address": name, "count": 1}))
        return found

    @model_validator(mode="after")
    def _consistent(self) -> Pool:
        names = [host.name for host in self.hosts]
        twice = next((name for name, count in Counter(names).items() if count > 1), None)
        if twice is not None:
            raise ValueError(f"hosts with different names, not {twice!r} twice")
        count = sum(entry.count for host in self.hosts for entry in host.devices)
        if count > _MOST_DEVICES:
            raise ValueError(f"hosts with {_MOST_DEVICES} devices together at most, not {count}")
        return self

    @model_validator(mode="after")
    def _of_cluster(self) -> Pool:
        if (self.engine == "kubernetes") != (self.kubernetes is not None):
            raise ValueError("`engine: kubernetes` and `kubernetes: {image: …}` together")
        if self.engine == "kubernetes" and any(map(self.container_of, self.hosts)):
            raise ValueError("no `container` with Kubernetes, whose pods run `kubernetes.image`")
        return self

    @model_validator(mode="after")
    def _containers(self) -> Pool:
        for host in self.hosts:
            if host.container is not None and host.address in LOCAL_ADDRESSES:
                raise ValueError(
                    f"a container for other machines, not for {host.name}, which is this one "
                    f"({host.address})"
                )
        return self

    def container_of(self, host: Host) -> Container | None:
        """The container of a host's processes: its own, else the pool's; none on this machine."""
        if host.address in LOCAL_ADDRESSES:
            return None
        return host.container or self.container

    def slurm_of(self, host: Host) -> Slurm:
        """What to ask of Slurm for a host: its own options, else the pool's."""
        return self.slurm if host.slurm is None else host.slurm.over(self.slurm)

    def devices(self) -> list[Device]:
        """Every device, in the order of the file. Ids are stable while the file is unchanged."""
        found, memory = [], self._memory()
        for host in self.hosts:
            numbers: dict[str, int] = {}
            for entry in host.devices:
                for _ in range(entry.count):
                    number = numbers[entry.type] = numbers.get(entry.type, -1) + 1
                    found.append(
                        Device.model_construct(  # checked as parts of the pool
                            id=f"{host.name}/{entry.type}-{number}",
                            type=entry.type,
                            host=host.name,
                            address=host.address,
                            index=number,
                            cores=entry.cores if entry.type != "cpu" else entry.cores or 1.0,
                            speed=entry.speed,
                            host_memory_bytes=memory.get(_machine(host.address))
                            if entry.type in HOST_MEMORY_TYPES
                            else None,
                            engine=self.engine,
                        )
                    )
        return found

    def _memory(self) -> dict[str, float]:
        """Stated memory by machine; the least, if hosts with the same address state several."""
        found: dict[str, float] = {}
        for host in self.hosts:
            container = self.container_of(host)
            limits = [host.memory, container.memory if container is not None else None]
            for limit in limits:
                if limit is not None:
                    machine = _machine(host.address)
                    found[machine] = min(limit, found.get(machine, math.inf))
        return found

    def networks(self) -> dict[str, Network]:
        """Each host's network: its own values, else the pool's."""
        return {
            host.name: Network.model_construct(
                bandwidth=host.network.bandwidth or self.network.bandwidth,
                latency=host.network.latency or self.network.latency,
            )
            for host in self.hosts
        }

    def kinds(self) -> list[dict[str, Any]]:
        """What to calibrate: device types, CPUs by number of threads, with the hosts' addresses."""
        found: dict[tuple[str, int], set[str]] = {}
        for device in self.devices():
            found.setdefault((device.type, device.threads), set()).add(device.address)
        return [
            {"device_type": device_type, "threads": threads, "addresses": sorted(addresses)}
            for (device_type, threads), addresses in found.items()
        ]


class Variant(NamedTuple):
    """Devices that are equal in these have the same curve.

    `local` and `host_memory_bytes` are None for devices with a memory of their own.
    """

    type: str
    cores: float | None
    speed: float | None
    local: bool | None
    host_memory_bytes: float | None


class Device(Document):
    """One device of a pool. `index` counts the devices of its type on its host."""

    id: str = Field(description="host/type-number")
    type: str = Field(description="a known device type")
    host: str = Field(description="name of the host")
    address: str = Field(description="of the host")
    index: int = Field(description="number among the like devices of the host")
    cores: float | None = Field(default=None, description="of a CPU device")
    speed: float | None = Field(default=None, description="of an emulated device")
    host_memory_bytes: float | None = Field(
        default=None, description="stated memory of the host, if the device uses it"
    )
    engine: PoolEngine = Field(
        default="ssh", description="what gives it out: with slurm or kubernetes, their own queue"
    )

    @property
    def variant(self) -> Variant:
        """What decides which curve describes the device."""
        local = self.local if self.type in HOST_MEMORY_TYPES else None
        return Variant(self.type, self.cores, self.speed, local, self.host_memory_bytes)

    @property
    def threads(self) -> int:
        """The number of CPU threads with which it computes."""
        return threads_of(self.cores) if self.type == "cpu" else 1

    @property
    def local(self) -> bool:
        """Whether the device is on this machine."""
        return self.address in LOCAL_ADDRESSES

    def resource_of(self, run: str) -> str:
        """The name under which a run leases the device.

        Slurm's queue gives out its own devices, so runs don't wait for each other in ours: each
        leases a name of its own.
        """
        return self.resource if self.engine == "ssh" else f"{self.resource} of {run}"

    @property
    def resource(self) -> str:
        """The ledger's name of the device, the same in every pool that lists it by this address.

        A GPU belongs to the machine, whatever a pool calls the host. A CPU device is a part of a
        machine that the pool defines, so its name contains the pool's name of the host.
        """
        machine = _machine(self.address)
        name = self.id if self.type in HOST_MEMORY_TYPES else f"{self.type}-{self.index}"
        return f"device {machine} {name}"


def _machine(address: str) -> str:
    """The machine at an address: all addresses of this machine are one."""
    return LOCAL_ADDRESSES[0] if address in LOCAL_ADDRESSES else address


def load_pool(path: str | Path | None) -> Pool:
    """The pool in a file; without a file, this machine as one CPU device. Raises BadInput."""
    if path is None:
        cores = float(len(os.sched_getaffinity(0)))
        return Pool(
            name="local",
            hosts=[Host(name="localhost", devices=[DeviceEntry(type="cpu", cores=cores)])],
        )
    pool = validated(Pool, read_mapping(Path(path), "pool"), str(path))
    files = {"identity": pool.ssh.identity, "known_hosts": pool.ssh.known_hosts}
    beside = {
        name: str(Path(path).absolute().parent / Path(file).expanduser())
        for name, file in files.items()
        if file
    }
    return pool.model_copy(update={"ssh": pool.ssh.model_copy(update=beside)})


def is_pool(content: bytes) -> bool:
    """Whether a file's content is a valid pool."""
    try:
        validated(Pool, parse_text(content.decode(), ""), "")
    except (BadInput, UnicodeDecodeError):
        return False
    return True
