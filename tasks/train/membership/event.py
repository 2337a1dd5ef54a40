"""What the membership state machine is told: typed values.

The launcher makes them of messages, ended processes, lost hosts, and the passing of time.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.tasks.errors import TrainwrightError


@dataclass(frozen=True)
class MembershipEvent:
    """Something that happened at `now` (monotonic, in seconds)."""

    now: float


@dataclass(frozen=True)
class Tick(MembershipEvent):
    """Time has passed, and all messages that had arrived were handled: the time for timeouts."""


@dataclass(frozen=True)
class RankEvent(MembershipEvent):
    """Something that the process of a device did; `number` is the device's."""

    number: int


@dataclass(frozen=True)
class MemoryShortage:
    """A rank ran out of memory with a batch of `batch_size`."""

    batch_size: int
    fits: int = 0
    """the largest batch that it has finished a step with"""
    memory_bytes: float | None = None
    """what its device has, free or held by it; None: not known"""


@dataclass(frozen=True)
class RankReady(RankEvent):
    """It waits for a worker group: just loaded, or out of a group that ended."""

    step: int | None
    """steps finished; None: it has no state"""
    sum_error: str = ""
    """why its sums failed"""
    shortage: MemoryShortage | None = None


@dataclass(frozen=True)
class RankJoined(RankEvent):
    """It has met the other members of its group."""


@dataclass(frozen=True)
class RankHeartbeat(RankEvent):
    """It lives, and this is what it does."""

    waits_s: float | None
    """how long it has waited for the others"""
    computes_s: float | None
    """how long it has computed its part of a step"""
    writing: bool
    """whether it keeps the others waiting because it reads or writes a checkpoint"""


@dataclass(frozen=True)
class RankDone(RankEvent):
    """It has trained, or searched, to the end, or stopped as asked, after `step` steps."""

    step: int | None


@dataclass(frozen=True)
class RankFailed(RankEvent):
    """It reports an error, and is about to exit."""

    error: TrainwrightError
    """names the rank"""
    message: str
    """the rank's own words"""
    step: int | None
    final: bool
    """whether no other rank can do better"""


@dataclass(frozen=True)
class ProcessEnded(RankEvent):
    """It has exited, or was killed."""

    how: str
    log: str
    out_of_memory: bool
    """whether the kernel killed it because memory ran out"""


@dataclass(frozen=True)
class SpareLoaded(MembershipEvent):
    """The spare process waits for a device."""


@dataclass(frozen=True)
class SpareEnded(MembershipEvent):
    """The spare process has exited, or was killed."""


@dataclass(frozen=True)
class HostsLost(MembershipEvent):
    """The hosts of these devices can't be reached."""

    numbers: frozenset[int]


@dataclass(frozen=True)
class HostsReturned(MembershipEvent):
    """The hosts of these devices can be reached again."""

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
    """Each device's batch, by number."""

    batch_sizes: tuple[int, ...]


@dataclass(frozen=True)
class StopRequested(MembershipEvent):
    """The training is to stop after the step at hand."""


@dataclass(frozen=True)
class LeaseLost(MembershipEvent):
    """The devices are leased to another run."""
