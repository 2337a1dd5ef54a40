"""The inputs of the membership state machine, as typed values.

The launcher makes them from messages, ended processes, lost hosts and the clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainwright.tasks.errors import TrainwrightError


@dataclass(frozen=True)
class MembershipEvent:
    """Something that happened at `now` (monotonic clock, in seconds)."""

    now: float


@dataclass(frozen=True)
class Tick(MembershipEvent):
    """Time has passed and all earlier messages are handled: check timeouts."""

    awake_since: float = -math.inf
    """since when the launcher runs without a stop; silence before that does not count"""


@dataclass(frozen=True)
class RankEvent(MembershipEvent):
    """An event of one device's process; `number` is the device's."""

    number: int


@dataclass(frozen=True)
class MemoryShortage:
    """A rank ran out of memory with a batch of `batch_size`, or with all ranks' rows in `layer`."""

    batch_size: int
    fits: int = 0
    """the largest batch with which it has finished a step"""
    memory_bytes: float | None = None
    """memory of its device that is free or held by the rank; None: unknown"""
    layer: str = ""
    """the layer whose rows of all ranks did not fit: a smaller batch of one rank would not help"""


@dataclass(frozen=True)
class RankReady(RankEvent):
    """It waits for a worker group: it has just loaded, or its last group has ended."""

    step: int | None
    """steps finished; None: it has no state"""
    sum_error: str = ""
    """why its last sum failed"""
    shortage: MemoryShortage | None = None


@dataclass(frozen=True)
class RankJoined(RankEvent):
    """It has connected to the other members of its group."""


@dataclass(frozen=True)
class RankHeartbeat(RankEvent):
    """It is alive; the fields say what it does."""

    waits_s: float | None
    """how long it has waited for other ranks"""
    computes_s: float | None
    """how long it has computed its part of the current step"""
    writing: bool
    """whether the others wait for it because it reads or writes a checkpoint"""


@dataclass(frozen=True)
class RankDone(RankEvent):
    """It has finished its training or search, or stopped on request, after `step` steps."""

    step: int | None


@dataclass(frozen=True)
class RankFailed(RankEvent):
    """It reports an error and is about to exit."""

    error: TrainwrightError
    """the error with the rank's name"""
    message: str
    """the rank's own message"""
    step: int | None
    final: bool
    """whether the error would occur on every rank"""


@dataclass(frozen=True)
class ProcessEnded(RankEvent):
    """It has exited, or was killed."""

    how: str
    log: str
    out_of_memory: bool
    """whether the kernel killed it for lack of memory"""
    stage: str = ""
    """if it was a stage of a pipeline: that the stage does not fit, and what takes less"""


@dataclass(frozen=True)
class SpareLoaded(MembershipEvent):
    """The spare process waits for a device."""


@dataclass(frozen=True)
class SpareEnded(MembershipEvent):
    """The spare process has exited, or was killed."""


@dataclass(frozen=True)
class HostsLost(MembershipEvent):
    """These devices' hosts are unreachable."""

    numbers: frozenset[int]


@dataclass(frozen=True)
class HostsEnding(MembershipEvent):
    """A cluster is about to take these devices' hosts back; repeated until they are lost."""

    numbers: frozenset[int]


@dataclass(frozen=True)
class HostsReturned(MembershipEvent):
    """These devices' hosts are reachable again."""

    numbers: frozenset[int]


@dataclass(frozen=True)
class LastCheckpointBegun(MembershipEvent):
    """The last checkpoint is being written."""


@dataclass(frozen=True)
class CheckpointStored(MembershipEvent):
    """A checkpoint of `step` steps is safe: staged on this machine, or in the store."""

    step: int


@dataclass(frozen=True)
class CheckpointRestored(MembershipEvent):
    """The newest checkpoint is in `folder`; None: there is none."""

    folder: str | None
    step: int


@dataclass(frozen=True)
class RolledBack(MembershipEvent):
    """The members have returned to the checkpoint of `step` steps."""

    step: int


@dataclass(frozen=True)
class SplitChanged(MembershipEvent):
    """The batch of each device changed; in the order of the devices' numbers."""

    batch_sizes: tuple[int, ...]


@dataclass(frozen=True)
class LayoutPlanned(MembershipEvent):
    """A better layout for the current members is there."""

    members: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class LayoutReady(MembershipEvent):
    """The layout that `PlanLayout` asked for is there."""

    members: tuple[int, ...]


@dataclass(frozen=True)
class NoLayout(MembershipEvent):
    """No layout fits these members; `error` says why."""

    members: tuple[int, ...]
    error: TrainwrightError


@dataclass(frozen=True)
class StopRequested(MembershipEvent):
    """The training must stop after the current step."""


@dataclass(frozen=True)
class LeaseLost(MembershipEvent):
    """Another run now leases the devices."""
