"""The launcher of one training: keeps a process for each device, and leads them from one world into the next. Loads no torch.

    a process dies, hangs, or its sums fail   -> all others are called out of the world, and meet in a smaller one at once
    its replacement is loaded                 -> all leave between two steps, and meet in a larger one
    too few are left, or too little memory    -> wait for replacements; then a last checkpoint, and a clear failure

Ranks die with the launcher, whatever ends it.
"""

from __future__ import annotations

import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainwright.infra.memory import kernel_oom_kills
from trainwright.tasks import progress
from trainwright.tasks.errors import Interrupted, RunHeld, TrainingFailed, TrainwrightError
from trainwright.tasks.train import cpu_share
from trainwright.tasks.train.confirmations import Confirmations
from trainwright.tasks.train.cpu_share import CpuShare
from trainwright.tasks.train.fleet import Fleet
from trainwright.tasks.train.hosts import LOOPBACK_WAY, Hosts, machine
from trainwright.tasks.train.processes import Worker, from_rank, own_environment, start_worker, together
from trainwright.tasks.train.remote import RemoteShare
from trainwright.tasks.train.request import Order
from trainwright.tasks.train.watchdog import LONG_STEPS, OUT_S, hung, stuck
from trainwright.tasks.train.world import Meeting, World

STOP_GRACE_S = 3.0
"""For the step at hand, when they are told to stop."""
SAVE_GRACE_S = 30.0
"""How much longer, where the last checkpoint is being written."""
SPARE_AFTER_S = 3.0
"""A spare process is started when a training lasts longer than this."""
_END_GRACE_S = 3.0
_ASK_EVERY_S = 1.0
_MOST_SPARES = 10
Message = dict[str, Any]


class Ranks:
    """Ranks that run while the block does. Its thread must live as long: the kernel ties their lives to it.

    `restore` brings the newest checkpoint here: its folder and step, or None and 0; it is asked when all ranks were lost.
    """

    def __init__(
        self, order: Order, stop: threading.Event | None, still_mine: Callable[[], bool] | None,
        restore: Callable[[], tuple[str | None, int]] | None = None, *, checkpoint: str | None = None, committed: int = 0,
    ) -> None:  # fmt: skip
        self._order, self._stop, self._still_mine = order, stop or threading.Event(), still_mine or (lambda: True)
        self._restore, self._checkpoint, self._committed = restore, checkpoint, committed
        self._work = Path(order.request.work_folder)
        self._devices = order.request.plan.devices
        self._policy = order.request.job.train.faults
        longest_s = max((device.step_time_s.high for device in self._devices), default=0.0)
        self._stall_s = max(self._policy.stall_timeout, LONG_STEPS * longest_s)
        self._fleet = Fleet(
            [device.batch_size for device in self._devices],
            min_count=order.request.job.devices.min_count, restarts=self._policy.restarts,
        )  # fmt: skip
        self._split = list(self._fleet.batch_sizes)
        self._machines = [machine(device) for device in self._devices]
        self._hosts: Hosts | None = None
        self._way = LOOPBACK_WAY
        self._meeting = Meeting(order.backend, self._work)
        self._shares: list[CpuShare | RemoteShare] = []
        self._workers: dict[int, Worker] = {}
        self._spare: Worker | None = None
        self._spares = 0
        self._selector = selectors.DefaultSelector()
        self._generation = 0
        self._members: list[int] = []
        """of the present world, whoever of them is still in it"""
        self._formed_at: float | None = None
        self._broken_at: float | None = None
        self._leaving_at: float | None = None
        self._short_since: float | None = None
        self._given_up: str | None = None
        self._reasons: list[str] = []
        self._last_cause: TrainwrightError | None = None
        self._used: dict[int, Message] = {}
        self._parts: dict[int, Confirmations] = {}
        """by the generation of the world"""
        self._asking: dict[int, tuple[Worker, int]] = {}
        """who waits for an answer of these, and to which question"""
        self._saving = False
        self._stop_asked_at: float | None = None
        self._asked_at = time.monotonic()
        self._oom_kills = kernel_oom_kills()

    @property
    def shares(self) -> list[str]:
        """How each rank is held to its share of the CPU."""
        return [share.how for share in self._shares]

    def __enter__(self) -> Ranks:
        cpu_share.remove_stale_cgroups()
        (self._work / "logs").mkdir(parents=True, exist_ok=True)
        try:
            if not all(device.local for device in self._devices):
                self._reach_hosts()
            for rank, device in enumerate(self._devices):
                hosts = self._hosts if not device.local else None
                self._shares.append(hosts.share(rank) if hosts else CpuShare(str(rank), device.cores))
            groups = [str(share.group) if share.group else None for share in self._shares]
            order = self._order.model_copy(update={"cgroups": groups})
            self._order_file.write_text(order.model_dump_json(by_alias=True))
            if self._hosts is not None:
                self._hosts.give_order(order)
            for number in range(len(self._devices)):
                self._workers[number] = self._start(number)
        except BaseException:
            self.__exit__()
            raise
        progress.emit("ranks", backend=self._order.backend, devices=[one.id for one in self._devices], cpu=self.shares)
        return self

    @property
    def _order_file(self) -> Path:
        return self._work / "order.json"

    def _reach_hosts(self) -> None:
        def heed() -> None:
            if self._stop.is_set():
                raise Interrupted("stopped before the first step; nothing was changed")
            self._require_mine()

        self._hosts = hosts = Hosts(self._order, self._work, heed)
        self._way = hosts.way
        self._meeting = Meeting(self._order.backend, self._work, hosts.address, hosts.peers)

    def _start(self, number: int | None) -> Worker:
        """The one place where a process is started: a device's, here or on its host, or a spare one."""
        name = f"rank-{number}" if number is not None else "spare"
        threads = max(1, int(self._devices[number].cores or 1)) if number is not None else 1
        slot = number if number is not None else len(self._devices) + self._spares
        log = self._work / "logs" / f"{name}.log"
        if self._hosts is not None and number is not None and not self._devices[number].local:
            worker = Worker(number, *self._hosts.start(number, own_environment(slot, threads), log), log)
        else:
            worker = start_worker(self._order_file, number, slot=slot, threads=threads, log=log, way=self._way)
        self._selector.register(worker.channel.socket, selectors.EVENT_READ, worker)
        return worker

    # -- the loop ----------------------------------------------------------------------------------------------------

    def watch(self) -> dict[int, Message]:
        """Until every member of a world is done; each one's last words.

        Raises what no other rank can make good, Interrupted where the ranks could not stop in time, RunHeld where the
        devices are no longer ours.
        """
        while True:
            try:
                self._obey()
                for key, _ in self._selector.select(timeout=0.05):
                    self._hear(key.data)
                self._call_out()
                self._find_hung()
                if self._members and all(self._is_done(number) for number in self._members):
                    return self._last_words()
                self._replace_lost()
                self._grow()
                self._form()
            except KeyboardInterrupt:
                self._stop.set()

    def _last_words(self) -> dict[int, Message]:
        if self._given_up is not None:
            step = self._workers[self._members[0]].done or {}
            raise TrainingFailed(
                f"{self._given_up}; the checkpoint of step {step.get('step')} is kept: run it again to go on from there",
                step=step.get("step"),
            )
        said = {number: self._workers[number].done or {} for number in self._members}
        for number in range(len(self._devices)):  # with what killed processes had used
            used = self._used.get(number, {})
            if number in said:
                used = together(used, said[number])
            said[number] = said.get(number, {}) | used
        return said

    def _is_done(self, number: int) -> bool:
        return number in self._workers and self._workers[number].done is not None

    def _obey(self) -> None:
        now = time.monotonic()
        if now - self._asked_at > _ASK_EVERY_S:
            self._asked_at = now
            self._require_mine()
        if self._stop.is_set() and self._stop_asked_at is None:
            if self._generation == 0:
                raise Interrupted("stopped before the first step; nothing was changed")
            self._stop_asked_at = now
            for number in self._members:
                if number in self._workers:
                    self._workers[number].process.send_signal(signal.SIGTERM)
        if self._stop_asked_at is not None and now - self._stop_asked_at > self._grace_s():
            raise Interrupted(
                "stopped; a step took too long to wait for its end, so the last checkpoint is what is kept"
            )

    def _grace_s(self) -> float:
        return STOP_GRACE_S + (SAVE_GRACE_S if self._saving else 0.0)

    def _require_mine(self) -> None:
        if not self._still_mine():
            raise RunHeld("the lease on the devices was lost while training; the last checkpoint is kept")

    # -- what the ranks say ------------------------------------------------------------------------------------------

    def _hear(self, worker: Worker) -> None:
        worker_is_known = worker is self._spare or worker in self._workers.values()
        for message in worker.channel.read():
            worker.heard_at = time.monotonic()
            if worker_is_known:
                self._take(worker, message)
        if worker.channel.closed:
            self._selector.unregister(worker.channel.socket)
            worker.channel.close()
            if worker_is_known:
                self._lost(worker)

    def _take(self, worker: Worker, message: Message) -> None:
        kind, number = message.pop("kind"), worker.number
        if kind == "alive":
            worker.heard(message)
            if number is not None:
                self._used[number] = self._used.get(number, {}) | {"now": message}
        elif kind == "spare":
            pass  # it is loaded; a device may be its own by now
        elif kind == "free":
            self._freed(worker, message)
        elif kind == "joined":
            worker.state = "in"
        elif kind == "done":
            worker.done = message
        elif kind == "error":
            worker.error, worker.step = worker.error or message["error"], message["step"]
            if message.get("final") and number is not None:
                raise from_rank(number, self._devices[number].id, worker.error, worker.log)
        elif kind == "ask":
            self._require_mine()
            self._answer(worker, **message)
        elif kind == "part" and number is not None:
            self._parts[message["generation"]].note(number, message)
            self._tell_parts()
        elif kind == "saving":
            self._saving = True
        elif kind == "back":
            self._committed = message["step"]
        else:
            if kind == "checkpoint":
                self._committed = max(self._committed, message["step"])
                self._fleet.reached_checkpoint(self._members)
            elif kind == "split":
                self._split = message["batch_sizes"]
            progress.emit(kind, **message)

    def _answer(self, worker: Worker, about: str, number: int, step: int = 0, generation: int = 0) -> None:
        if about == "parts":  # when all are in
            self._parts[generation].ask(step)
            self._asking[generation] = worker, number
            self._tell_parts()
        else:
            found = self._parts[generation].known(step) if about == "stored" else {}
            worker.channel.send("answer", number=number, **found)

    def _tell_parts(self) -> None:
        for generation, (worker, number) in list(self._asking.items()):
            if (found := self._parts[generation].answer()) is not None:
                del self._asking[generation]
                worker.channel.send("answer", number=number, **found)

    def _freed(self, worker: Worker, message: Message) -> None:
        number = worker.number
        assert number is not None
        first_time = worker.state == "starting"
        worker.state, worker.step, worker.waits_s = "free", message["step"], None
        if first_time:
            self._shares[number].hold(worker.process.pid)
            progress.emit("rank", rank=number, device=self._devices[number].id, pid=worker.process.pid, state="loaded")
            if self._generation:
                self._reasons.append(f"rank {number} ({self._devices[number].id}) is back")
        elif worker.done is None and self._leaving_at is None:
            self._break()  # its sums have failed
        if "no_memory_for" in message:
            predicted = self._devices[number].largest_batch(message["memory_bytes"])
            self._limit(number, message["no_memory_for"], message["fits"], predicted)
            self._break()

    def _limit(self, number: int, batch: int, fits: int, predicted: int | None) -> None:
        """A device ran out of memory with this batch: from now on it gets what fits."""
        limit = self._fleet.no_memory_for(number, batch, fits, predicted)
        line = f"rank {number} ({self._devices[number].id}) has no memory for a batch of {batch}"
        line += f"; {limit} would fit, and it takes no more from now on" if limit else ", nor for any other"
        self._reasons.append(line)
        self._last_cause = TrainingFailed(line, rank=number)

    def _lost(self, worker: Worker) -> None:
        """The end of a process has closed: it failed, was killed, or hung and was killed by us."""
        counted = kernel_oom_kills()
        kills, self._oom_kills = counted - self._oom_kills, counted
        how = worker.how_it_ended(kills)
        if worker is self._spare:
            self._spare = None
            return
        number = worker.number
        assert number is not None
        self._shares[number].let_go()
        del self._workers[number]
        for parts in self._parts.values():
            parts.lost(number)
        self._asking = {key: one for key, one in self._asking.items() if one[0] is not worker}
        self._tell_parts()
        used = self._used.pop(number, {})
        self._used[number] = together(used, used.pop("now", {}))
        if self._stop_asked_at is not None and self._order.mode == "ramp":
            raise Interrupted("stopped while the learning rate was searched")
        name = f"rank {number} ({self._devices[number].id})"
        progress.emit("rank", rank=number, device=self._devices[number].id, pid=worker.process.pid, state=how)
        if worker.error is not None:
            self._failed(worker, from_rank(number, self._devices[number].id, worker.error, worker.log))
            how = f"failed ({worker.error['message']})"
        else:
            self._last_cause = TrainingFailed(f"{name} {how}; its log is {worker.log}", rank=number)
            if self._order.mode == "ramp":
                raise self._last_cause
        self._fleet.died(number)
        self._reasons.append(f"{name} {how}")
        if worker.starved(kills) and worker.state == "in" and self._split[number] > 0:
            self._limit(number, self._split[number], 0, None)
        if number in self._members and worker.state != "free":
            self._break()

    def _failed(self, worker: Worker, error: TrainwrightError) -> None:
        """Raise an error that would come again: a wrong input, one before the first step, one that came twice."""
        again = error.exit_code == TrainingFailed.exit_code and worker.state not in ("starting", "free")
        if not again or error.details.get("final") or self._order.mode == "ramp" or self._fleet.repeats(worker.step):
            raise error
        self._last_cause = error

    def _break(self) -> None:
        if self._broken_at is None and self._members:
            self._broken_at = time.monotonic()
            self._say_out()

    def _say_out(self) -> None:
        for worker in self._inside():
            worker.channel.send("out", generation=self._generation)

    def _inside(self) -> list[Worker]:
        return [
            worker for number in self._members
            if (worker := self._workers.get(number)) is not None and worker.state in ("joining", "in")
        ]  # fmt: skip

    # -- out of one world, into the next -----------------------------------------------------------------------------

    def _call_out(self) -> None:
        """Kill who does not come out of a world that has ended."""
        now, leaving_at = time.monotonic(), self._leaving_at
        if leaving_at is not None and now - leaving_at > OUT_S and any(one.state == "free" for one in self._present()):
            self._break()
        if self._broken_at is not None:
            for worker in stuck(self._inside(), now - self._broken_at):
                self._kill(worker, "did not come out of a sum that a lost rank had broken")

    def _present(self) -> list[Worker]:
        return [self._workers[number] for number in self._members if number in self._workers]

    def _kill(self, worker: Worker, why: str) -> None:
        if worker.lost_because is None:
            worker.lost_because = why
            worker.kill()

    def _find_hung(self) -> None:
        """Kill who gives no sign of life, and for whom the others have waited too long."""
        inside = self._inside()
        if not inside or self._order.mode == "ramp":
            return
        for worker, why in hung(inside, time.monotonic(), self._stall_s):
            self._kill(worker, why)

    def _replace_lost(self) -> None:
        """A process for each device without one; a spare where the training lasts."""
        if self._order.mode == "ramp" or self._stop_asked_at is not None or self._given_up is not None:
            return
        for number in range(len(self._devices)):
            if number not in self._workers and self._fleet.may_restart(number) and not self._is_gone(number):
                self._workers[number] = self._appointed(number) or self._start(number)
        if not any(device.local for device in self._devices):
            return
        lasts = self._formed_at is not None and time.monotonic() - self._formed_at > SPARE_AFTER_S
        loading = any(worker.state == "starting" for worker in self._workers.values())  # who is needed loads first
        if self._spare is None and lasts and not loading and self._spares < _MOST_SPARES and self._policy.restarts > 0:
            self._spares += 1
            self._spare = self._start(None)

    def _is_gone(self, number: int) -> bool:
        """Whether a device's host is lost."""
        return self._hosts is not None and self._hosts.is_gone(number)

    def _appointed(self, number: int) -> Worker | None:
        """The spare process, now this device's; it is on this machine."""
        if not self._devices[number].local:
            return None
        worker, self._spare = self._spare, None
        if worker is not None:
            worker.number, worker.state = number, "starting"
            worker.channel.send("device", number=number)
            self._spares -= 1
        return worker

    def _grow(self) -> None:
        """Ask all to leave between two steps where somebody waits to join."""
        inside = self._inside()
        if not inside or self._leaving_at is not None or self._broken_at is not None or self._given_up is not None:
            return
        if any(worker.state == "joining" or worker.done is not None for worker in inside):
            return
        if any(number not in self._members for number in self._able()):
            self._leaving_at = time.monotonic()
            for worker in inside:
                worker.channel.send("leave", generation=self._generation)

    def _able(self) -> list[int]:
        """Devices whose processes wait for a world, and that have memory for at least one sample."""
        return sorted(
            number for number, worker in self._workers.items()
            if worker.state == "free" and self._fleet.limits.get(number) != 0
        )  # fmt: skip

    def _form(self) -> None:
        """Lead those that are free into a new world, where none is in the one before any more."""
        if self._inside():
            return
        able = self._able()
        coming = [number for number, worker in self._workers.items() if worker.state == "starting"]
        if coming and (self._generation == 0 or self._order.mode == "ramp"):
            return
        state = [number for number in able if self._workers[number].step is not None]
        if self._stop_asked_at is not None:
            if not state:
                raise Interrupted("stopped while the ranks were being replaced; the last checkpoint is what is kept")
            self._meet(able, end=True)
            return
        why = self._fleet.why_not(able)
        if why is None:
            self._short_since = None
            self._meet(able)
            return
        now = time.monotonic()
        self._short_since = self._short_since or now
        if coming and now - self._short_since < self._policy.wait_for_devices:
            return
        waited = f" and none came back in {now - self._short_since:.0f} s" if coming else ""
        self._given_up = f"{why}{waited}" + (f" ({self._last_cause})" if self._last_cause else "")
        if not state:
            raise TrainingFailed(f"{self._given_up}; the last checkpoint is kept")
        self._meet(state, end=True)

    def _meet(self, members: list[int], *, end: bool = False) -> None:
        anew = all(self._workers[number].step is None for number in members)
        if anew and self._generation and self._restore is not None:
            self._checkpoint, self._committed = self._restore()
        self._generation += 1
        count, of, machines = len(members), len(self._devices), [self._machines[number] for number in members]
        verb = "begins with" if self._generation == 1 else "goes on with"
        reason = "; ".join([*self._reasons, f"{verb} {count} of {of}"])
        world = World(
            generation=self._generation, members=members, machines=machines,
            meeting=self._meeting.open(self._generation, machines),
            committed=self._committed, checkpoint=self._checkpoint if anew else None, reason=reason, end=end,
            broken=self._broken_at is not None,
            limits={number: limit for number, limit in self._fleet.limits.items() if number in members and not end},
        )  # fmt: skip
        if self._generation > 1:
            progress.emit("world", generation=self._generation, ranks=members, reason=reason)
        self._parts[self._generation] = Confirmations(members)
        self._members, self._reasons, self._saving = members, [], False
        self._broken_at = self._leaving_at = None
        self._formed_at = self._formed_at or time.monotonic()
        for number in members:
            worker = self._workers[number]
            worker.state, worker.waits_s, worker.done, worker.heard_at = "joining", None, None, time.monotonic()
            worker.channel.send("world", **world.model_dump())
            if self._stop_asked_at is not None:
                worker.process.send_signal(signal.SIGTERM)

    # -- the end -----------------------------------------------------------------------------------------------------

    def __exit__(self, *_: object) -> None:
        all_done = bool(self._members) and all(self._is_done(number) for number in self._members)
        deadline = time.monotonic() + (_END_GRACE_S if all_done else 0.0)
        for share in self._shares:
            share.let_go()
        workers = [*self._workers.values(), *([self._spare] if self._spare is not None else [])]
        for worker in workers:
            if worker.done is not None:
                worker.channel.send("end")
            else:
                worker.kill()
        for worker in workers:
            try:
                worker.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
        for worker in workers:
            worker.process.wait()
            worker.channel.close()
        for share in self._shares:
            share.remove()
        self._selector.close()
        if self._hosts is not None:
            self._hosts.close()
        self._meeting.close()
