"""`container` in a pool file: the container in which a host's processes run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainwright.tasks.spec.documents import Document, MemorySize, matching

_PATH = r"/[^:\s]*"
_DeviceName = Annotated[
    str,
    matching(
        r"^(/[^:\s]+(:[^:\s]+){0,2}|[A-Za-z0-9][A-Za-z0-9_./-]*=[A-Za-z0-9_.:,-]+)$",
        "a path in /dev, or a device as the runtime names it, such as nvidia.com/gpu=all",
    ),
]
_HostPath = Annotated[
    str, matching(rf"^{_PATH}$", "an absolute path without spaces and :, such as /scratch")
]
_ContainerPath = Annotated[
    str,
    matching(
        rf"^{_PATH}(:[A-Za-z,]+)?$",
        "an absolute path without spaces, and options after a :, such as /data:ro",
    ),
]


class Container(Document):
    """A container, which a launch starts on the host with podman or docker and removes at its end.

    It uses the host's network, because ranks connect on any port.
    """

    image: str = matching(
        r"^[A-Za-z0-9/][A-Za-z0-9._/:@-]{0,511}$",
        "an image that the host has, such as registry.example/trainwright-train:1, or with podman "
        "the path of a root file system, such as /srv/train:O",
        description="image with trainwright, there on the host; with podman also the path of a "
        "root file system, with :O at its end for an overlay that is removed",
    )
    runtime: Literal["podman", "docker"] = Field(
        default="podman", description="podman or docker, on the host"
    )
    cpus: float | None = Field(
        default=None,
        ge=0.01,
        le=4096,
        description="CPUs that it may use; default: those of its job in Slurm, else all",
    )
    memory: MemorySize | None = Field(
        default=None,
        description="memory that it may use, such as 8GiB; default: the host's `memory`, else all",
    )
    devices: list[_DeviceName] = Field(
        default_factory=list,
        description="devices of the host in it, as the runtime names them: nvidia.com/gpu=all, "
        "/dev/kfd",
    )
    volumes: dict[_HostPath, _ContainerPath] = Field(
        default_factory=dict,
        description="folders of the host in it: {/scratch: /scratch, /data: '/data:ro'}",
    )
