"""Runs the ranks of one launch. Loads no torch.

A loop around the membership state machine: messages, ended processes, lost hosts and the clock
become events, and the loop carries out the instructions that come back. `rank_processes` starts
and ends the processes. Ranks end with the launcher, whatever ends it.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, assert_never

from trainwright.infra.memory_limit import kernel_oom_kills
from trainwright.tasks import progress
from trainwright.tasks.allocate.replan.next_layout import LayoutPlanner, NextLayout, StagePlanner
from trainwright.tasks.errors import RunHeld, TrainwrightError
from trainwright.tasks.train.awake import Awake
from trainwright.tasks.train.channel import STOP_SIGNAL
from trainwright.tasks.train.checkpoint.coordinator import Coordinator
from trainwright.tasks.train.launcher.group_layout import GroupLayouts
from trainwright.tasks.train.launcher.moved_cuts import MovedCuts, StageWindow
from trainwright.tasks.train.launcher.rank_process import RankProcess, Usage, error_of_rank
from trainwright.tasks.train.launcher.rank_processes import RankProcesses
from trainwright.tasks.train.membership import event, instruction
from trainwright.tasks.train.membership.state import MembershipPolicy
from trainwright.tasks.train.membership.state_machine import Membership
from trainwright.tasks.train.membership.transitions import stopped_before_a_step
from trainwright.tasks.train.pipeline.stage_shortage import stage_shortage
from trainwright.tasks.train.request import Order
from trainwright.tasks.train.worker_group import WorkerGroup, sums_on_devices

_END_GRACE_S = 3.0
_CHECK_LEASE_EVERY_S = 1.0
_TICK_S = 0.05
Message = dict[str, Any]


class Launcher:
    """Runs ranks inside a `with` block. The kernel ends them with the thread that entered it."""

    def __init__(
        self,
        order: Order,
        stop: threading.Event | None,
        still_mine: Callable[[], bool] | None,
        checkpoints: Coordinator | None = None,
        layout_planner: LayoutPlanner | None = None,
        stage_planner: StagePlanner | None = None,
        summed: Sequence[str] = (),
    ) -> None:
        """`checkpoints` coordinates the ranks' checkpoints; None: they save none.

        `layout_planner` plans layouts for the devices that are left; None: the plan's stays.
        `stage_planner` plans cuts by measured speeds; None: cuts stay.
        `summed`: as of `Membership`.
        """
        self._order, self._devices = order, order.request.plan.devices
        self._stop = stop or threading.Event()
        self._still_mine = still_mine or (lambda: True)
        self._checkpoints = checkpoints
        self._safe = checkpoints.safe if checkpoints is not None else 0
        """the step of the newest checkpoint that membership knows"""
        self._processes = RankProcesses(order, self._raise_if_over)
        self._membership = Membership(
            MembershipPolicy.of(order),
            checkpoint=checkpoints.folder if checkpoints is not None else None,
            committed=self._safe,
            summed=summed,
        )
        self._layouts = GroupLayouts(order.request, layout_planner)
        self._cuts = MovedCuts(order.request, stage_planner)
        self._asked_layout: tuple[tuple[int, ...], Future[NextLayout]] | None = None
        self._to_do: deque[instruction.Instruction] = deque()
        self._members: list[int] = []
        self._finished = False
        self._used: defaultdict[int, Usage] = defaultdict(Usage)
        """per device, by its processes that have ended"""
        self._lease_checked_at = time.monotonic()
        self._awake = Awake()
        self._oom_kills = kernel_oom_kills()

    @property
    def shares(self) -> list[str]:
        """How each rank is limited to its CPU share."""
        return [share.how for share in self._processes.shares]

    def __enter__(self) -> Launcher:
        try:
            self._processes.prepare()
            self._handle(*self._host_events(), event.Tick(time.monotonic()))
        except BaseException:
            self.__exit__()
            raise
        ids = [device.id for device in self._devices]
        progress.emit("ranks", backend=self._order.backend, devices=ids, cpu=self.shares)
        return self

    def __exit__(self, *_: object) -> None:
        members = [self._processes.by_number.get(number) for number in self._members]
        done = bool(members) and all(one is not None and one.done is not None for one in members)
        self._processes.close(_END_GRACE_S if done else 0.0)

    def _raise_if_over(self) -> None:
        """Called while hosts are prepared. Raises Interrupted or RunHeld to end that."""
        if self._stop.is_set():
            raise stopped_before_a_step(self._safe)
        if not self._still_mine():
            raise RunHeld("the lease on the devices was lost before training began")

    def watch(self) -> dict[int, Message]:
        """Run until all members of a worker group are done; each device's final report.

        Raises the error of a rank that a restart would not fix, Interrupted if the ranks could not
        stop in time, RunHeld if the lease on the devices was lost.
        """
        while not self._finished:
            try:
                self._turn()
            except KeyboardInterrupt:
                self._stop.set()
        return self._reports()

    def _turn(self) -> None:
        reporting = self._processes.reporting(_TICK_S)
        events = [*self._launch_events(), *self._host_events()]
        for process in reporting:
            events += self._events_of(process)
        since = self._awake.since()
        self._handle(*events, event.Tick(time.monotonic(), since))

    def _handle(self, *events: event.MembershipEvent) -> None:
        self._to_do += self._membership.handle(*events)
        while self._to_do:
            self._carry_out(self._to_do.popleft())

    def _reports(self) -> dict[int, Message]:
        """The members' reports, with the usage of all processes of each device."""
        found = {}
        for number in range(len(self._devices)):
            process, report = self._processes.by_number.get(number), Message()
            used = self._used[number]
            if process is not None:
                report = process.done or {} if number in self._members else {}
                used = used.then(process.usage)
            found[number] = report | asdict(used) | {"image": self._processes.image(number)}
        return found

    # -- events ------------------------------------------------------------------------------------

    def _launch_events(self) -> Iterator[event.MembershipEvent]:
        now = time.monotonic()
        if now - self._lease_checked_at > _CHECK_LEASE_EVERY_S:
            self._lease_checked_at = now
            if not self._still_mine():
                yield event.LeaseLost(now)
        if self._stop.is_set():
            yield event.StopRequested(now)
        self._layouts.measure(self._cuts.slower)
        if (better := self._cuts.found()) is not None:
            self._layouts.move(better.members, better.layout)
            yield event.LayoutPlanned(now, better.members, better.reason)
        if self._asked_layout is not None and self._asked_layout[1].done():
            yield self._planned(now, *self._asked_layout)
            self._asked_layout = None
        if self._checkpoints is not None:
            self._checkpoints.check()
            before, self._safe = self._safe, self._checkpoints.safe
            if self._safe > before:
                yield event.CheckpointStored(now, self._safe)

    def _planned(
        self, now: float, members: tuple[int, ...], layout: Future[NextLayout]
    ) -> event.MembershipEvent:
        """The answer to `PlanLayout`."""
        try:
            layout.result()
        except TrainwrightError as error:
            return event.NoLayout(now, members, error)
        return event.LayoutReady(now, members)

    def _host_events(self) -> Iterator[event.MembershipEvent]:
        lost, returned = self._processes.host_changes()
        if lost:
            yield event.HostsLost(time.monotonic(), lost)
        if returned:
            yield event.HostsReturned(time.monotonic(), returned)
        if ending := self._processes.ending():
            yield event.HostsEnding(time.monotonic(), ending)

    def _events_of(self, process: RankProcess) -> Iterator[event.MembershipEvent]:
        """The events of a process's messages, and of its end."""
        for message in process.channel.read():
            if process.number is not None:
                yield from self._event_of(process, process.number, message)
            elif message["kind"] == "loaded":
                yield event.SpareLoaded(time.monotonic())
        if process.channel.closed:
            self._processes.remove(process)
            counted = kernel_oom_kills()
            kills, self._oom_kills = counted - self._oom_kills, counted
            if process.number is not None:
                yield self._ended(process, process.number, kills)
            else:
                yield event.SpareEnded(time.monotonic())

    def _event_of(
        self, process: RankProcess, number: int, message: Message
    ) -> Iterator[event.MembershipEvent]:
        """The event of a rank's message, if it has one. Also forwards the message."""
        kind, now = message.pop("kind"), time.monotonic()
        match kind:
            case "heartbeat":
                process.usage = Usage.of(message)
                doing = {name: message[name] for name in ("waits_s", "computes_s", "writing")}
                yield event.RankHeartbeat(now, number, **doing)
            case "ready":
                short = message.get("out_of_memory")
                shortage = event.MemoryShortage(**short) if short is not None else None
                sum_error = message.get("sum_error", "")
                yield event.RankReady(now, number, message["step"], sum_error, shortage)
            case "joined":
                yield event.RankJoined(now, number)
            case "done":
                process.done = message
                if "cpu_s" in message:
                    process.usage = Usage.of(message)
                yield event.RankDone(now, number, message.get("step"))
            case "error":
                device, document = self._devices[number].id, message["error"]
                error = error_of_rank(number, device, document, process.log)
                said, final = document["message"], bool(message.get("final"))
                yield event.RankFailed(now, number, error, said, message["step"], final)
            case "ask":
                if not self._still_mine():
                    yield event.LeaseLost(now)
                elif self._checkpoints is not None:
                    self._checkpoints.answer(process.channel, **message)
            case "part" if self._checkpoints is not None:
                self._checkpoints.part(number, process.channel, **message)
            case "saving":
                yield event.LastCheckpointBegun(now)
            case "back":
                yield event.RolledBack(now, message["step"])
            case "stage times":
                members = tuple(message["members"])
                compute_s = dict(zip(members, message["compute_s"], strict=True))
                window = StageWindow(members, compute_s, message["steps_left"])
                self._cuts.note(window, self._layouts.current)
            case "weights":
                self._layouts.weigh(message["weights"])
            case _:
                if kind == "split":
                    self._layouts.follow(sum(message["batch_sizes"]))
                    yield event.SplitChanged(now, tuple(message["batch_sizes"]))
                progress.emit(kind, **message)

    def _ended(self, process: RankProcess, number: int, oom_kills: int) -> event.ProcessEnded:
        if self._checkpoints is not None:
            self._checkpoints.lost(number)
        self._used[number] = self._used[number].then(process.usage)
        how, short = process.how_it_ended(oom_kills), process.out_of_memory(oom_kills)
        self._emit_state(process, number, how)
        stage = stage_shortage(self._layouts.current, self._devices[number].id)
        return event.ProcessEnded(time.monotonic(), number, how, str(process.log), short, stage)

    def _emit_state(self, process: RankProcess, number: int, state: str) -> None:
        device, pid = self._devices[number].id, process.process.pid
        progress.emit("rank", rank=number, device=device, pid=pid, state=state)

    # -- instructions ------------------------------------------------------------------------------

    def _carry_out(self, what: instruction.Instruction) -> None:
        match what:
            case instruction.StartProcess(number):
                self._processes.start(number)
            case instruction.StartSpare():
                self._processes.start_spare()
            case instruction.AssignSpare(number):
                self._processes.assign_spare(number)
            case instruction.AnnounceLoaded(number):
                for process in self._living(number):
                    self._processes.shares[number].hold(process.process.pid)
                    self._emit_state(process, number, "loaded")
            case instruction.FormGroup(group):
                self._form(group)
            case instruction.AskToLeave(numbers, generation):
                self._send(*numbers, kind="leave", generation=generation)
            case instruction.AbortGroup(numbers, generation):
                self._send(*numbers, kind="abort", generation=generation)
            case instruction.AskToStop(numbers):
                for process in self._living(*numbers):
                    process.process.send_signal(STOP_SIGNAL)
            case instruction.Kill(number, reason):
                for process in self._living(number):
                    process.kill(reason)
            case instruction.GiveBack(numbers):
                self._processes.give_back(numbers)
            case instruction.RestoreCheckpoint():
                assert self._checkpoints is not None
                self._checkpoints.restore()
                self._safe, folder = self._checkpoints.safe, self._checkpoints.folder
                self._handle(event.CheckpointRestored(time.monotonic(), folder, self._safe))
            case instruction.PlanLayout(members):
                self._asked_layout = (members, self._layouts.layout_of_some(members))
            case instruction.Notice(message):
                progress.emit("notice", message=message)
            case instruction.Finish():
                self._finished = True
            case instruction.GiveUp(error):
                raise error
            case _:
                assert_never(what)

    def _form(self, group: WorkerGroup) -> None:
        group = self._layouts.of(group)
        machines = [self._processes.machines[number] for number in group.members]
        rendezvous = self._processes.rendezvous.open(group.generation, machines)
        transfers = (
            self._processes.rendezvous.open_transfers(group.generation)
            if self._layouts.need_transfers(group)
            else ""
        )
        where = {"machines": machines, "rendezvous": rendezvous, "transfers": transfers}
        on_devices = sums_on_devices(self._devices)
        group = group.model_copy(update={**where, "on_devices": on_devices})
        if group.generation > 1 and not group.end:
            said = {"generation": group.generation, "reason": group.reason}
            progress.emit("world", ranks=group.members, **said)
        self._members = group.members
        if self._checkpoints is not None:
            self._checkpoints.begin(group.generation, group.members)
        for process in self._living(*group.members):
            process.done = None
        self._send(*group.members, kind="join", **group.model_dump())

    def _send(self, *numbers: int, kind: str, **fields: Any) -> None:
        for process in self._living(*numbers):
            process.channel.send(kind, **fields)

    def _living(self, *numbers: int) -> list[RankProcess]:
        """The processes of these devices that have not ended."""
        found = (self._processes.by_number.get(number) for number in numbers)
        return [process for process in found if process is not None]
