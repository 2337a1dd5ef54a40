"""The membership state machine's data: the ranks of a launch and their worker group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from trainwright.tasks.errors import TrainwrightError
from trainwright.tasks.runs.artefacts.plan import PlannedDevice
from trainwright.tasks.spec.train_spec import FaultPolicy
from trainwright.tasks.train.membership import event
from trainwright.tasks.train.membership.capacity import TrainingCapacity
from trainwright.tasks.train.membership.instruction import Instruction
from trainwright.tasks.train.membership.restart_limits import FruitlessGroups, RestartLimits
from trainwright.tasks.train.request import Order

WHOLE = ("data-parallel", "late-multiply", "averaging")
"""The layouts in which each rank holds the whole state of the training."""


@dataclass(frozen=True)
class MembershipPolicy:
    """What a launch needs and allows."""

    devices: tuple[PlannedDevice, ...]
    min_count: int
    faults: FaultPolicy
    searches: bool = False
    """whether this is a learning-rate search: no checkpoints, and all ranks restart together"""
    may_sum: bool = True
    """whether the job lets any layer be summed"""
    shares: tuple[int, ...] = ()
    """of the batch, by device; empty: what each computes"""
    whole: bool = True
    """whether each rank holds the whole training state, so that those that stay lose no step"""
    wait_s: float | None = None
    """how long to wait for devices to come back; None: as the job's faults say"""
    staged: bool = False
    """whether the plan has stages: a group of fewer devices needs a layout of its own"""

    @classmethod
    def of(cls, order: Order) -> Self:
        """The policy of a launch."""
        job, devices = order.request.job, tuple(order.request.plan.devices)
        queued = any(device.engine != "ssh" for device in devices)
        return cls(
            devices,
            job.devices.min_count,
            job.train.faults,
            searches=order.mode == "ramp",
            may_sum=job.train.dense is None,
            shares=tuple(order.request.plan.shares),
            whole=order.request.layout.name in WHOLE,
            wait_s=max(job.train.faults.wait_for_devices, job.queue_timeout) if queued else None,
            staged=order.request.layout.has_stages,
        )


@dataclass
class RankState:
    """The process of a device, from its start to its end."""

    number: int
    heard_at: float
    """when it was started, or last reported anything"""
    status: Literal["starting", "ready", "joining", "joined"] = "starting"
    """`ready`: waits for a worker group"""
    step: int | None = None
    """finished steps when it was last ready; None: it has no state"""
    done: bool = False
    """whether it has reached the end in its current group"""
    done_step: int | None = None
    failure: event.RankFailed | None = None
    killed: bool = False
    # What its last heartbeat reported:
    waits_s: float | None = None
    computes_s: float | None = None
    writing: bool = False

    @property
    def in_group(self) -> bool:
        """Whether it is in a worker group, or joining one."""
        return self.status in ("joining", "joined")

    def become(self, status: Literal["ready", "joining"]) -> None:
        """Change the status, and discard what earlier heartbeats reported."""
        self.status, self.waits_s, self.computes_s, self.writing = status, None, None, False


class MembershipState:
    """The processes of a launch and their current worker group, by number of the plan's device."""

    def __init__(
        self,
        policy: MembershipPolicy,
        checkpoint: str | None,
        committed: int,
        summed: Sequence[str] = (),
    ) -> None:
        self.policy, self.faults, self.devices = policy, policy.faults, policy.devices
        self.now = 0.0
        self.awake_since = -math.inf
        self.ended = False
        self.instructions: list[Instruction] = []
        self.checkpoint, self.committed = checkpoint, committed
        """the folder of the checkpoint to start from; steps that the newest one holds"""
        self.split = policy.shares or tuple(device.batch_size for device in policy.devices)
        self.capacity = TrainingCapacity(self.split, policy.min_count)
        self.restarts = RestartLimits(policy.faults.restarts)
        self.summed = [*summed]
        """layers that are summed, as the rows of all ranks did not fit into a device's memory"""
        # Processes.
        self.ranks: dict[int, RankState] = {}
        self.unreachable: set[int] = set()
        """devices whose hosts are lost"""
        self.ending: set[int] = set()
        """devices whose hosts a cluster is about to take back"""
        self.given_back: set[int] = set()
        """devices whose processes end because their hosts were given back"""
        self.spare: Literal["none", "loading", "loaded"] = "none"
        self.lost_spares = 0
        # The current group.
        self.generation = 0
        self.members: list[int] = []
        self.step_at_start = 0
        self.aborted_at: float | None = None
        self.leaving_since: float | None = None
        # The next one.
        self.reasons: list[str] = []
        """why it has other members"""
        self.last_cause: TrainwrightError | None = None
        self.first_formed_at: float | None = None
        self.short_since: float | None = None
        """since when too few ranks are ready"""
        self.fruitless = FruitlessGroups(policy.faults.wait_for_devices)
        self.restore: Literal["needed", "asked", "done"] = "needed"
        self.layout_asked: tuple[int, ...] = ()
        """members whose layout is planned, or known"""
        self.layout_known = False
        self.no_layout: TrainwrightError | None = None
        """why no layout fits them"""
        # The end.
        self.stop_asked_at: float | None = None
        self.saving = False
        """whether the last checkpoint is being written"""
        self.giving_up: str | None = None
        """why the training ends with the current group"""
        self.makes_way = False
        """whether it ends only until its cluster gives it hosts again"""
        self.most_batch_sizes: dict[str, dict[str, int]] = {}
        """batches that devices were seen to hold, if the training ends because memory is short"""

    def instruct(self, *what: Instruction) -> None:
        """Add instructions for the launcher."""
        self.instructions += what

    def name(self, number: int) -> str:
        """A rank's name in messages."""
        return f"rank {number} ({self.devices[number].id})"

    def present(self) -> list[RankState]:
        """Members of the current group with a living process."""
        return [self.ranks[number] for number in self.members if number in self.ranks]

    def inside(self) -> list[RankState]:
        """Those present members that have not left the group."""
        return [rank for rank in self.present() if rank.in_group]

    def ready(self) -> list[int]:
        """Ranks that wait for a group."""
        return sorted(number for number, rank in self.ranks.items() if rank.status == "ready")

    def loading(self) -> list[RankState]:
        """Ranks that are still loading."""
        return [rank for rank in self.ranks.values() if rank.status == "starting"]

    def all_done(self) -> bool:
        """Whether every member of the group has reached the end."""
        present = self.present()
        return (
            bool(present)
            and len(present) == len(self.members)
            and all(rank.done for rank in present)
        )
