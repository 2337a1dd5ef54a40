"""The pool file. `host_spec` has its hosts and networks, `prices` what devices cost and draw.

The ledger (`tasks.leases.ledger`) knows which devices are held.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, ValidationInfo, field_validator, model_validator

from trainwright.estimator.devices import DEVICE_TYPES, HOST_MEMORY_TYPES, threads_of
from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.container_spec import Container
from trainwright.tasks.spec.documents import (
    Document,
    matching,
    parse_text,
    read_mapping,
    validated,
)
from trainwright.tasks.spec.host_spec import DeviceEntry, Host, Network, Ssh
from trainwright.tasks.spec.job import Name
from trainwright.tasks.spec.kubernetes_spec import Kubernetes
from trainwright.tasks.spec.other_documents import refuse_other, refuse_run
from trainwright.tasks.spec.prices import Power, Prices
from trainwright.tasks.spec.slurm_spec import Slurm

_MOST_DEVICES = 100_000
PoolEngine = Literal["ssh", "slurm", "kubernetes"]
LOCAL_ADDRESSES = ("localhost", "127.0.0.1", "::1")


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
    prices: Prices = Field(
        default_factory=dict,
        description="of an hour of a device type, such as 2.1/h, and of `energy`, such as 0.25/kWh",
    )
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
        if self.container is not None and not any(map(self.container_of, self.hosts)):
            raise ValueError("no `container`: every host is this machine, which starts none")
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

        The queue of Slurm or Kubernetes gives out its own devices, so runs don't wait for each
        other in ours: each leases a name of its own.
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
    refuse_run(path, "pool")
    values = read_mapping(Path(path), "pool")
    refuse_other(values, "pool", str(path))
    pool = validated(Pool, values, str(path))
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
