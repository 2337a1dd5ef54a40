"""`hosts`, `network` and `ssh` in a pool file: machines, their devices, and how to reach them."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from trainwright.estimator.devices import DEVICE_TYPES, EMULATED
from trainwright.tasks.spec.container_spec import Container
from trainwright.tasks.spec.documents import (
    Bandwidth,
    Document,
    Latency,
    MemorySize,
    matching,
)
from trainwright.tasks.spec.job import Name
from trainwright.tasks.spec.slurm_spec import Slurm
from trainwright.tasks.spec.windows import WINDOW


class DeviceEntry(Document):
    """One or more equal devices of a host."""

    type: str = Field(description="a known device type, cpu or emulated")
    count: int = Field(default=1, ge=1, le=10_000, description="number of such devices")
    cores: float | None = Field(
        default=None,
        ge=0.001,
        le=4096,
        description="for cpu: number of cores, or a fraction of one; default: 1",
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
    """A host's own bandwidth and latency."""

    bandwidth: Bandwidth | None = Field(default=None, description="such as 1Gbit")
    latency: Latency | None = Field(default=None, description="such as 200us")


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
        description="this host's bandwidth and latency to other hosts; default: the pool's",
    )
    inner: HostNetwork = Field(
        default=HostNetwork(),
        description="bandwidth and latency between two training processes on this host; "
        "default: half of the datasheet's NVLink or PCIe among NVIDIA GPUs of one type; else "
        "4 Gbit and 0.3 ms, or its network if faster, and on this machine as measured",
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
