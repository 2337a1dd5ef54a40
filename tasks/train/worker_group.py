"""A worker group: ranks that sum together until the membership changes. Loads no torch.

Neither Gloo nor Horovod repairs a group that has lost a member. Horovod's elastic mode has only one
timeout for noticing a loss and for the next rendezvous: if it is short enough to notice, it kills
the job in the rendezvous. So a group is short-lived: it ends when a member dies or a device comes
back. The processes outlive it and form the next group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict, Field

from trainwright.estimator.devices import summing_type
from trainwright.tasks.runs.artefacts.layout import Layout
from trainwright.tasks.spec.pool import Device


class WorkerGroup(BaseModel):
    """The description of a group that the launcher sends to each member."""

    model_config = ConfigDict(frozen=True)
    generation: int = Field(description="the group's number: 1, 2, …")
    members: list[int] = Field(
        description="numbers of the plan's devices, in the order of the collectives' ranks"
    )
    machines: list[str] = Field(
        default_factory=list, description="the members' machines; empty: all on one"
    )
    rendezvous: str = Field(
        default="",
        description=(
            "where the members connect. torch: a file, a store's tcp://address:port/prefix, or "
            "env://; Horovod: its server's address:port"
        ),
    )
    transfers: str = Field(
        default="",
        description="where they connect for messages between pairs of ranks, as `rendezvous` for "
        "torch; empty: they need none",
    )
    on_devices: bool = Field(
        default=False, description="whether sums of tensors on GPUs stay there, if torch has NCCL"
    )
    committed: int = Field(default=0, description="steps that the newest checkpoint holds")
    checkpoint: str | None = Field(
        default=None, description="local folder to start from if no member has a state"
    )
    limits: dict[int, int] = Field(
        default_factory=dict, description="largest batch of each device that ran out of memory"
    )
    summed: list[str] = Field(
        default_factory=list,
        description="layers that must be summed, as memory did not hold the rows of all ranks",
    )
    layout: Layout | None = Field(
        default=None, description="the layout for these members; None: the plan's"
    )
    broken: bool = Field(default=False, description="whether the previous group was aborted")
    reason: str = Field(default="", description="why the membership changed")
    end: bool = Field(default=False, description="save a checkpoint, then end")


def sums_on_devices(devices: Sequence[Device]) -> bool:
    """Whether ranks on these devices sum gradients there, by NCCL, if torch has it on all hosts.

    If all are NVIDIA GPUs of one type. Two ranks on one GPU are not possible with NCCL. Otherwise,
    sums are in host memory, which all devices have.
    """
    types = {device.type for device in devices}
    places = {(device.host, device.type, device.index) for device in devices}
    return len(devices) > 1 and summing_type(types) is not None and len(places) == len(devices)


def needs_transfers(layouts: Iterable[Layout | None], devices: Sequence[Device]) -> bool:
    """Whether ranks connect for more than sums in host memory: see `WorkerGroup.transfers`.

    `layouts` are those that the group may use.
    """
    transfers = any(one is not None and one.has_transfers for one in layouts)
    return transfers or sums_on_devices(devices)
