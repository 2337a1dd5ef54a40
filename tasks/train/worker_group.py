"""A worker group: the ranks that sum together between two membership changes. Loads no torch.

Neither Gloo nor Horovod repairs a group that has lost a member, and Horovod's elastic mode has one
timeout for noticing a loss and for the next rendezvous: short enough for the first, it kills the
job in the second. So a group is short-lived. It ends when a member dies or a device comes back;
the processes outlive it and form the next one.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class WorkerGroup(BaseModel):
    """What the launcher sends to each member of a group."""

    model_config = ConfigDict(frozen=True)
    generation: int = Field(description="number of the group: 1, 2, …")
    members: list[int] = Field(
        description="numbers of the plan's devices, in the order of the collectives' ranks"
    )
    machines: list[str] = Field(
        default_factory=list, description="of the members, by any name; empty: all on one"
    )
    rendezvous: str = Field(
        default="",
        description=(
            "where the members meet. torch: a file, a store's tcp://address:port/prefix, or "
            "env://; Horovod: its server's address:port"
        ),
    )
    committed: int = Field(default=0, description="steps that the newest checkpoint holds")
    checkpoint: str | None = Field(
        default=None, description="local folder to start from if no member has a state"
    )
    limits: dict[int, int] = Field(
        default_factory=dict, description="largest batch of each device that ran out of memory"
    )
    broken: bool = Field(default=False, description="whether the group before was aborted")
    reason: str = Field(default="", description="why these are the members")
    end: bool = Field(default=False, description="write a checkpoint and end")
