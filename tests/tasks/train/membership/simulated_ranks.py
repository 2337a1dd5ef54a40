"""Simulated ranks for the membership state machine: they follow its instructions and send events.

Every instruction is checked against the ranks' current state. Their messages wait in an outbox
until delivery, as in a socket, so a test can choose any order of events.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, assert_never

from trainwright.estimator.curves import Interval
from trainwright.tasks.errors import Infeasible, TrainingFailed
from trainwright.tasks.runs.artefacts.plan import PlannedDevice
from trainwright.tasks.spec.train_spec import FaultPolicy
from trainwright.tasks.train.batch.sampling import split_among
from trainwright.tasks.train.membership import event, instruction
from trainwright.tasks.train.membership.state import MembershipPolicy
from trainwright.tasks.train.membership.state_machine import Membership
from trainwright.tasks.train.worker_group import WorkerGroup

BATCH = 8
Hang = Literal["silent", "computes", "idle", "deaf"]
"""no heartbeat; computes for ever; neither computes nor waits; waits, and ignores an abort"""


def policy(
    count: int = 3,
    *,
    min_count: int = 1,
    searches: bool = False,
    local: bool = True,
    restarts: int = 2,
    wait_for_devices: float = 60.0,
    whole: bool = True,
    staged: bool = False,
) -> MembershipPolicy:
    """The policy of a launch on this many devices, each on its own host unless local."""
    step = Interval(median=0.01, low=0.01, high=0.02)
    devices = tuple(
        PlannedDevice.model_validate(
            {
                "id": f"h{number}/cpu",
                "type": "cpu",
                "host": f"h{number}",
                "address": "localhost" if local else f"10.0.0.{number}",
                "index": 0,
                "batch_size": BATCH,
                "step_time_s": step,
                "peak_memory_bytes": 1e8,
            }
        )
        for number in range(count)
    )
    faults = FaultPolicy(
        stall_timeout="60s", wait_for_devices=f"{wait_for_devices:g}s", restarts=restarts
    )
    return MembershipPolicy(devices, min_count, faults, searches, whole=whole, staged=staged)


@dataclass(eq=False)
class Process:
    """A rank's process."""

    number: int
    status: Literal["loading", "ready", "joining", "in"] = "loading"
    step: int | None = None
    done: bool = False
    hang: Hang | None = None
    since: float | None = None
    """the time since which it waits, or computes"""
    leave: bool = False
    aborted: bool = False
    stop: bool = False
    killed: str | None = None
    outbox: list[event.MembershipEvent] = field(default_factory=list)


class SimulatedRanks:
    """The processes of a launch, and the state machine that controls them."""

    def __init__(self, policy: MembershipPolicy, *, steps: int = 40, checkpoint_step: int = 0):
        """A training of `steps` steps that starts from a checkpoint of `checkpoint_step`."""
        self.policy, self.count, self.total_steps = policy, len(policy.devices), steps
        folder = "folder" if checkpoint_step else None
        self.machine = Membership(policy, checkpoint=folder, committed=checkpoint_step)
        self.now = 1000.0
        self.processes: dict[int, Process] = {}
        self.spare: Literal["none", "loading", "loaded"] = "none"
        self.unreachable: set[int] = set()
        self.group: WorkerGroup | None = None
        self.stored_step = checkpoint_step
        self.restored: tuple[str | None, int] | None = None
        self.restore_asked = False
        self.least_for_layout = 1
        """fewer devices than these hold no layout"""
        self.layout_asked: tuple[int, ...] = ()
        self.layout_of: tuple[int, ...] = ()
        """members for which a layout has been found since the last group"""
        self.split, self.limits = [BATCH] * self.count, dict[int, int]()
        self.starts: Counter[int] = Counter()
        """starts of each device's processes since the last checkpoint"""
        self.stop_asked_at: float | None = None
        self.end: instruction.Finish | instruction.GiveUp | None = None
        self._ended_now: set[int] = set()
        self._hopeless = False
        self._left: set[int] = set()
        """members that have reported that they left the group"""
        self._asked_to_leave = False
        self.seen: list[instruction.Instruction] = []

    # -- the machine's side ------------------------------------------------------------------------

    def tell(self, *events: event.MembershipEvent) -> None:
        """Pass events to the machine, and follow its instructions."""
        group, broken = self.group, [self._breaks_group(one) for one in events]
        for happened in events:
            self._note_limits(happened)
        ended = [one for one in events if isinstance(one, event.ProcessEnded)]
        self._ended_now = {one.number for one in ended}
        hopeless = (event.RankFailed, event.LeaseLost)
        self._hopeless = any(
            isinstance(one, hopeless) or self._lacks_another_way(one) for one in events
        ) or any(one.out_of_memory and one.stage for one in ended)
        for one in self.machine.handle(*events):
            assert self.end is None, f"{one} after the end"
            self.seen.append(one)
            self._obey(one)
        if any(broken) and self.end is None and self.group is group:
            assert all(one.aborted for one in self.inside()), "they wait for one that is gone"

    def _lacks_another_way(self, happened: event.MembershipEvent) -> bool:
        """Whether a layer's joint work does not fit, and the job permits nothing else."""
        short = happened.shortage if isinstance(happened, event.RankReady) else None
        return short is not None and bool(short.layer) and not self.policy.may_sum

    def _breaks_group(self, happened: event.MembershipEvent) -> bool:
        """Whether a member of the group is lost, or its sum has failed."""
        if not isinstance(happened, event.RankEvent) or self.group is None:
            return False
        inside = happened.number in set(self.group.members) - self._left
        if isinstance(happened, event.RankReady):
            self._left.add(happened.number)
            return inside and bool(happened.sum_error) and not self._asked_to_leave
        return inside and isinstance(happened, event.ProcessEnded)

    def _note_limits(self, happened: event.MembershipEvent) -> None:
        """The batches that did not fit on a device."""
        if isinstance(happened, event.SplitChanged):
            self.split = list(happened.batch_sizes)
        elif isinstance(happened, event.ProcessEnded) and happened.out_of_memory:
            if batch := self.split[happened.number]:
                self.limits[happened.number] = batch // 2
        elif isinstance(happened, event.RankReady) and happened.shortage is not None:
            short = happened.shortage
            if short.layer:
                return
            most = max(short.batch_size // 2, short.fits)
            self.limits[happened.number] = min(short.batch_size - 1, most)

    def tick(self, seconds: float = 0.05) -> None:
        """Advance the time: send heartbeats, then a tick."""
        self.now += seconds
        self.tell(*self.heartbeats(), event.Tick(self.now))
        if self.stop_asked_at is not None and self.now - self.stop_asked_at > 34.0:
            assert self.end is not None, "stop has no end"

    def heartbeats(self) -> list[event.MembershipEvent]:
        """Send heartbeats from all processes that are not silent."""
        found: list[event.MembershipEvent] = []
        for one in self.processes.values():
            if one.hang != "silent" and one.killed is None:
                waits = computes = None
                if one.status in ("joining", "in") and one.hang != "idle" and not one.done:
                    one.since = self.now if one.since is None else one.since
                    if one.hang == "computes":
                        computes = self.now - one.since
                    elif one.hang == "deaf" or not self.healthy():
                        waits = self.now - one.since
                found.append(event.RankHeartbeat(self.now, one.number, waits, computes, False))
        return found

    def _obey(self, what: instruction.Instruction) -> None:
        match what:
            case instruction.StartProcess(number):
                self._start(number)
            case instruction.AssignSpare(number):
                assert self.spare == "loaded"
                self.spare = "none"
                self._start(number)
            case instruction.StartSpare():
                assert self.spare == "none"
                self.spare = "loading"
            case instruction.AnnounceLoaded(number):
                self._living((number,))
            case instruction.FormGroup(group):
                self._form(group)
            case instruction.AskToLeave(numbers, generation):
                self._asked_to_leave = True
                for one in self._members(numbers, generation):
                    one.leave = True
            case instruction.AbortGroup(numbers, generation):
                for one in self._members(numbers, generation):
                    one.aborted = True
            case instruction.AskToStop(numbers):
                for one in self._living(numbers):
                    one.stop = True
            case instruction.Kill(number, reason):
                assert reason
                assert self.processes[number].killed is None, "killed twice"
                self.processes[number].killed = reason
            case instruction.GiveBack(numbers):
                for number in numbers:
                    assert number not in self.unreachable
                    self.unreachable.add(number)
                    self.processes[number].killed = "is lost: given back"
                    self.starts[number] -= 1
            case instruction.RestoreCheckpoint():
                assert not self.policy.searches
                assert all(one.step is None for one in self._usable())
                self.restore_asked = True
            case instruction.PlanLayout(members):
                assert self.policy.staged
                assert len(members) < self.count
                self.layout_asked = members
            case instruction.Notice(message):
                assert message
            case instruction.Finish():
                assert self.group is not None
                assert all(self.processes[number].done for number in self.group.members)
                self.end = what
            case instruction.GiveUp(error):
                assert str(error)
                over = self.stop_asked_at is not None or self._hopeless
                assert over or not self.inside(), "given up while some still train"
                self.end = what
            case _:
                assert_never(what)

    def _start(self, number: int) -> None:
        assert number not in self.processes, "two processes of one device"
        assert number not in self.unreachable
        assert self.stop_asked_at is None
        self.starts[number] += 1
        assert self.starts[number] <= self.policy.faults.restarts + 1, "restarts have no end"
        self.processes[number] = Process(number)

    def _members(self, numbers: tuple[int, ...], generation: int) -> list[Process]:
        assert self.group is not None
        assert generation == self.group.generation
        # A rank that has left may not have reported it yet.
        return [one for one in self._living(numbers) if one.status in ("joining", "in")]

    def _living(self, numbers: tuple[int, ...]) -> list[Process]:
        """These processes, except for those whose end the machine does not know yet."""
        assert numbers
        return [self.processes[number] for number in numbers if number not in self._ended_now]

    def _usable(self) -> list[Process]:
        """The ranks that have reported that they are ready, and have memory."""
        every = self.processes.values()
        there = [one for one in every if one.number not in self.unreachable]
        ready = [one for one in there if one.status == "ready" and not one.outbox]
        return [one for one in ready if self.limits.get(one.number) != 0]

    def _form(self, group: WorkerGroup) -> None:
        members = [self.processes[number] for number in group.members]
        last = self.group.generation if self.group is not None else 0
        assert group.generation == last + 1
        assert members
        for one in self.processes.values():
            assert one.status not in ("joining", "in"), "two groups at once"
        assert all(one.status == "ready" for one in members)
        if not group.end:
            assert {one.number for one in members} == {one.number for one in self._usable()}
            assert len(members) >= self.policy.min_count
            planned, total = [BATCH] * self.count, BATCH * self.count
            assert split_among(total, group.members, planned, self.limits) is not None
            if self.policy.staged and len(members) < self.count:
                assert self.layout_of == (*group.members,), "a group without a layout"
        self.layout_of = ()
        fresh = all(one.step is None for one in members)
        if fresh and not self.policy.searches:
            if last:
                assert self.restored is not None, "no rank has a state, and none was restored"
                assert (group.checkpoint, group.committed) == self.restored
        else:
            assert group.checkpoint is None
        kept = [one.step or 0 for one in self._usable()]
        assert max(one.step or 0 for one in members) == max(kept), "a step was lost"
        self.group, self.restored = group, None
        self._left, self._asked_to_leave = set(), False
        for one in members:
            one.status, one.done, one.since = "joining", False, None
            one.leave = one.aborted = False

    # -- the ranks' side ---------------------------------------------------------------------------

    def deliver(self, one: Process, count: int | None = None) -> None:
        """Deliver the first messages of a process's outbox, or all."""
        sent, one.outbox = one.outbox[:count], one.outbox[len(one.outbox[:count]) :]
        if sent:
            self.tell(*sent)

    def load(self, one: Process) -> None:
        """Let a process finish loading."""
        one.status = "ready"
        one.outbox.append(event.RankReady(self.now, one.number, None))

    def join(self, one: Process) -> None:
        """Let a rank connect to the other members, who are all joining."""
        one.status = "in"
        one.outbox.append(event.RankJoined(self.now, one.number))
        members = self.members()
        if all(other.status == "in" for other in members):
            assert self.group is not None
            start = max((other.step for other in members if other.step is not None), default=None)
            start = self.group.committed if start is None else start
            for other in members:
                other.step = None if self.policy.searches else start
            numbers = self.group.members
            split = split_among(sum(self.split), numbers, [BATCH] * self.count, self.limits)
            if split is not None:
                one.outbox.append(event.SplitChanged(self.now, tuple(split)))

    def members(self) -> list[Process]:
        """The living members of the group."""
        numbers = self.group.members if self.group is not None else []
        return [self.processes[number] for number in numbers if number in self.processes]

    def inside(self) -> list[Process]:
        """The living members that have not left the group."""
        return [one for one in self.members() if one.status in ("joining", "in")]

    def joined(self) -> bool:
        """Whether all ranks in the group have connected."""
        return bool(self.inside()) and all(one.status == "in" for one in self.inside())

    def healthy(self) -> bool:
        """Whether the group can make a step, or can still connect."""
        inside = self.inside()
        return (
            self.group is not None
            and len(inside) == len(self.group.members)
            and all(one.hang is None and one.killed is None for one in inside)
            and not any(one.aborted or one.done for one in inside)
        )

    def make_step(self) -> None:
        """Let all members finish a step, and end or leave if requested."""
        members = self.inside()
        assert self.group is not None
        for one in members:
            one.since = None
            if one.step is not None and not self.group.end:
                one.step = min(one.step + 1, self.total_steps)
        step = members[0].step
        done = step is not None and step >= self.total_steps
        if self.group.end or done or any(one.stop for one in members):
            for one in members:
                one.done = True
                one.outbox.append(event.RankDone(self.now, one.number, step))
                self.leave(one)
        elif any(one.leave for one in members):
            for one in members:
                self.leave(one)

    def finish_search(self) -> None:
        """Let all members finish their search."""
        for one in self.inside():
            one.done = True
            one.outbox.append(event.RankDone(self.now, one.number, None))
            self.leave(one)

    def leave(self, one: Process, **why: object) -> None:
        """Let a rank leave its group, and wait for another."""
        one.status, one.since = "ready", None
        one.outbox.append(event.RankReady(self.now, one.number, one.step, **why))  # type: ignore[arg-type]  # one of two

    def store_checkpoint(self) -> None:
        """Store the members' progress."""
        step = next(one.step for one in self.inside())
        if step is not None and step > self.stored_step:
            self.stored_step = step
            for number in self.group.members if self.group is not None else []:
                self.starts[number] = 1 if number in self.processes else 0
            self.tell(event.CheckpointStored(self.now, step))

    def plan_layout(self) -> None:
        """Answer the question for a layout."""
        asked, self.layout_asked = self.layout_asked, ()
        if len(asked) < self.least_for_layout:
            self.tell(event.NoLayout(self.now, asked, Infeasible("memory", lacks=len(asked))))
        else:
            self.layout_of = asked
            self.tell(event.LayoutReady(self.now, asked))

    def restore(self) -> None:
        """Fetch the newest checkpoint, as requested."""
        self.restore_asked = False
        self.restored = ("folder" if self.stored_step else None, self.stored_step)
        self.tell(event.CheckpointRestored(self.now, *self.restored))

    def die(
        self,
        one: Process,
        how: str = "was killed by SIGKILL",
        *,
        out_of_memory: bool = False,
        stage: str = "",
    ) -> None:
        """End a process. Its earlier messages still arrive."""
        del self.processes[one.number]
        memory = out_of_memory and one.killed is None and one.status == "in"
        said = one.killed or how
        ended = event.ProcessEnded(self.now, one.number, said, "its.log", memory, stage)
        self.tell(*one.outbox, ended)

    def fail(self, one: Process, *, final: bool = False) -> None:
        """Let a rank's code raise an error, which ends the process."""
        error = TrainingFailed(f"rank {one.number}: a cable came loose")
        said = "a cable came loose"
        failed = event.RankFailed(self.now, one.number, error, said, one.step, final)
        one.outbox.append(failed)
        self.die(one, "exited with 1")

    # -- fair play ---------------------------------------------------------------------------------

    def play_fairly(self, *, rounds: int = 5000) -> None:
        """Run to the end without new failures.

        Every process does what it can, killed ones end, and time advances, faster while nothing
        happens.
        """
        pause = 0.05
        for _ in range(rounds):
            if self.end is not None:
                return
            pause = 0.05 if self.act() | self.train() else min(2 * pause, 120.0)
            if self.end is None:
                self.tick(pause)
        raise AssertionError(f"no end after {rounds} rounds: …, {self.seen[-20:]}")

    def act(self) -> bool:
        """Let every process take its next action; whether one did."""
        acted = False
        for one in list(self.processes.values()):
            if self.end is not None:
                return True
            if one.killed is not None:
                self.die(one)
                acted = True
                continue
            if one.hang is None:
                acted |= self._act(one)
            if one.outbox:
                self.deliver(one)
                acted = True
        if self.end is None and self.restore_asked:
            self.restore()
            acted = True
        if self.end is None and self.layout_asked:
            self.plan_layout()
            acted = True
        if self.end is None and self.spare == "loading":
            self.spare = "loaded"
            self.tell(event.SpareLoaded(self.now))
            acted = True
        return acted

    def train(self) -> bool:
        """Make a step, or finish the search, if the group can."""
        able = self.end is None and self.healthy() and self.joined()
        if able and self.policy.searches:
            self.finish_search()
        elif able:
            self.make_step()
        return able

    def _act(self, one: Process) -> bool:
        if one.status == "loading":
            self.load(one)
        elif one.status in ("joining", "in") and one.aborted:
            self.leave(one, sum_error="another rank is gone")
        elif one.status == "joining" and self.healthy():
            self.join(one)
        else:
            return False
        return True
