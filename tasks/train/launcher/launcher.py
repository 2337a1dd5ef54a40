"""The launcher of one training: leads its processes from one world into the next, and hears them. Loads no torch.

How they are started and replaced is `rank_processes`; when a world ends and who forms the next, `membership`. Ranks die with the
launcher, whatever ends it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from trainwright.infra.memory_limit import kernel_oom_kills
from trainwright.tasks import progress
from trainwright.tasks.errors import Interrupted, RunHeld, TrainingFailed, TrainwrightError
from trainwright.tasks.train.launcher.checkpoint_parts import CheckpointParts
from trainwright.tasks.train.launcher.membership import Membership
from trainwright.tasks.train.launcher.rank_process import Worker, from_rank, together
from trainwright.tasks.train.launcher.rank_processes import RankProcesses
from trainwright.tasks.train.request import Order

STOP_GRACE_S = 3.0
"""For the step at hand, when they are told to stop."""
SAVE_GRACE_S = 30.0
"""How much longer, where the last checkpoint is being written."""
_END_GRACE_S = 3.0
_ASK_EVERY_S = 1.0
Message = dict[str, Any]


class Ranks:
    """Ranks that run while the block does. Its thread must live as long: the kernel ties their lives to it.

    `restore` brings the newest checkpoint here: its folder and step, or None and 0; it is asked when all ranks were lost.
    """

    def __init__(
        self,
        order: Order,
        stop: threading.Event | None,
        still_mine: Callable[[], bool] | None,
        restore: Callable[[], tuple[str | None, int]] | None = None,
        *,
        checkpoint: str | None = None,
        committed: int = 0,
    ) -> None:
        self._order, self._stop, self._still_mine = (
            order,
            stop or threading.Event(),
            still_mine or (lambda: True),
        )
        self._devices = order.request.plan.devices
        self._processes = RankProcesses(order, self._heed)
        self._membership = Membership(order, self._processes, restore, checkpoint, committed)
        self._split = list(self._membership.fleet.batch_sizes)
        self._used: dict[int, Message] = {}
        self._parts = CheckpointParts()
        self._saving = False
        self._stop_asked_at: float | None = None
        self._asked_at = time.monotonic()
        self._oom_kills = kernel_oom_kills()

    @property
    def shares(self) -> list[str]:
        """How each rank is held to its share of the CPU."""
        return [share.how for share in self._processes.shares]

    def __enter__(self) -> Ranks:
        try:
            self._processes.start()
        except BaseException:
            self.__exit__()
            raise
        progress.emit(
            "ranks",
            backend=self._order.backend,
            devices=[one.id for one in self._devices],
            cpu=self.shares,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close(_END_GRACE_S if self._membership.all_done() else 0.0)

    def watch(self) -> dict[int, Message]:
        """Until every member of a world is done; each one's last words.

        Raises what no other rank can make good, Interrupted where the ranks could not stop in time, RunHeld where the
        devices are no longer ours.
        """
        while True:
            try:
                self._obey()
                for worker in self._processes.speaking(0.05):
                    self._hear(worker)
                self._membership.kill_stuck(self._split)
                if self._membership.all_done():
                    return self._last_words()
                self._replace_lost()
                self._membership.grow()
                if self._membership.form(stopping=self._stop_asked_at is not None):
                    self._parts.begin(self._membership.generation, self._membership.members)
                    self._saving = False
            except KeyboardInterrupt:
                self._stop.set()

    def _last_words(self) -> dict[int, Message]:
        members, workers = self._membership.members, self._processes.by_number
        if self._membership.given_up is not None:
            step = workers[members[0]].done or {}
            again = "" if self._membership.held else ": run it again to go on from there"
            raise TrainingFailed(
                f"{self._membership.given_up}; the checkpoint of step {step.get('step')} is kept{again}",
                step=step.get("step"),
                **self._membership.held,
            )
        said = {number: workers[number].done or {} for number in members}
        for number in range(
            len(self._devices)
        ):  # with what killed processes had used, and those that are left out
            used, own = self._used.get(number, {}), said.get(number, {})
            said[number] = own | together(used, own or used.get("now", {}))
        return said

    def _replace_lost(self) -> None:
        if self._stop_asked_at is None and self._membership.given_up is None:
            self._processes.replace_lost(
                self._membership.fleet.may_restart, lasts=self._membership.lasts
            )

    def _stopped_early(self) -> Interrupted:
        step = self._membership.committed
        kept = (
            f"another step; the checkpoint of step {step} is kept"
            if step
            else "the first step; nothing was changed"
        )
        return Interrupted(f"stopped before {kept}")

    def _heed(self) -> None:
        """While hosts are waited for. Raises Interrupted and RunHeld."""
        if self._stop.is_set():
            raise self._stopped_early()
        self._require_mine()

    def _obey(self) -> None:
        now = time.monotonic()
        if now - self._asked_at > _ASK_EVERY_S:
            self._asked_at = now
            self._require_mine()
        if self._stop.is_set() and self._stop_asked_at is None:
            if self._membership.generation == 0:
                raise self._stopped_early()
            self._stop_asked_at = now
            for number in self._membership.members:
                if number in self._processes.by_number:
                    self._processes.by_number[number].process.send_signal(signal.SIGTERM)
        if self._stop_asked_at is not None and now - self._stop_asked_at > self._grace_s():
            raise Interrupted(
                "stopped; a step took too long to wait for its end, so the last checkpoint is what is kept"
            )

    def _grace_s(self) -> float:
        return STOP_GRACE_S + (SAVE_GRACE_S if self._saving else 0.0)

    def _require_mine(self) -> None:
        if not self._still_mine():
            raise RunHeld(
                "the lease on the devices was lost while training; the last checkpoint is kept"
            )

    # -- what the ranks say ------------------------------------------------------------------------------------------

    def _hear(self, worker: Worker) -> None:
        worker_is_known = self._processes.knows(worker)
        for message in worker.channel.read():
            worker.heard_at = time.monotonic()
            if worker_is_known:
                self._take(worker, message)
        if worker.channel.closed:
            self._processes.hang_up(worker)
            if worker_is_known:
                self._lost(worker)

    def _take(self, worker: Worker, message: Message) -> None:
        kind, number = message.pop("kind"), worker.number
        if kind == "alive":
            worker.heard(message)
            if number is not None:
                self._used[number] = self._used.get(number, {}) | {"now": message}
        elif kind == "spare":
            worker.state = "loaded"
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
            self._parts.answer(worker, **message)
        elif kind == "part" and number is not None:
            self._parts.note(number, message)
        elif kind == "saving":
            self._saving = True
        elif kind == "back":
            self._membership.went_back(message["step"])
        else:
            if kind == "checkpoint":
                self._membership.committed = max(self._membership.committed, message["step"])
                self._membership.fleet.reached_checkpoint(self._membership.members)
            elif kind == "split":
                self._split = message["batch_sizes"]
            progress.emit(kind, **message)

    def _freed(self, worker: Worker, message: Message) -> None:
        number = worker.number
        assert number is not None
        first_time = worker.state == "starting"
        worker.state, worker.step = "free", message["step"]
        worker.waits_s = worker.computes_s = None
        if first_time:
            self._processes.shares[number].hold(worker.process.pid)
            progress.emit(
                "rank",
                rank=number,
                device=self._devices[number].id,
                pid=worker.process.pid,
                state="loaded",
            )
            if self._membership.generation:
                self._membership.reasons.append(
                    f"rank {number} ({self._devices[number].id}) is back"
                )
        elif worker.done is None and not self._membership.leaving:
            self._membership.end_world()  # its sums have failed
        self._membership.why_ended = self._membership.why_ended or message.get("lost", "")
        if "no_memory_for" in message:
            predicted = self._devices[number].largest_batch(message["memory_bytes"])
            self._limit(number, message["no_memory_for"], message["fits"], predicted)
            self._membership.end_world()

    def _limit(self, number: int, batch: int, fits: int, predicted: int | None) -> None:
        """A device ran out of memory with this batch: from now on it gets what fits."""
        limit = self._membership.fleet.no_memory_for(number, batch, fits, predicted)
        line = f"rank {number} ({self._devices[number].id}) has no memory for a batch of {batch}"
        line += (
            f"; {limit} would fit, and it takes no more from now on"
            if limit
            else ", nor for any other"
        )
        self._membership.reasons.append(line)
        self._membership.last_cause = TrainingFailed(line, rank=number)

    def _lost(self, worker: Worker) -> None:
        """The end of a process has closed: it failed, was killed, or hung and was killed by us."""
        counted = kernel_oom_kills()
        kills, self._oom_kills = counted - self._oom_kills, counted
        how = worker.how_it_ended(kills)
        if worker is self._processes.spare:
            self._processes.spare = None
            return
        number = worker.number
        assert number is not None
        self._processes.lost(number)
        self._parts.lost(worker)
        used = self._used.pop(number, {})
        self._used[number] = together(used, used.pop("now", {}))
        if self._stop_asked_at is not None and self._order.mode == "ramp":
            raise Interrupted("stopped while the learning rate was searched")
        name = f"rank {number} ({self._devices[number].id})"
        progress.emit(
            "rank", rank=number, device=self._devices[number].id, pid=worker.process.pid, state=how
        )
        if worker.error is not None:
            self._failed(
                worker, from_rank(number, self._devices[number].id, worker.error, worker.log)
            )
            how = f"failed ({worker.error['message']})"
        else:
            self._membership.last_cause = TrainingFailed(
                f"{name} {how}; its log is {worker.log}", rank=number
            )
        self._membership.fleet.died(number)
        self._membership.reasons.append(f"{name} {how}")
        if worker.starved(kills) and worker.state == "in" and self._split[number] > 0:
            self._limit(number, self._split[number], 0, None)
        if number in self._membership.members and worker.state != "free":
            self._membership.end_world()

    def _failed(self, worker: Worker, error: TrainwrightError) -> None:
        """Raise an error that would come again: a wrong input, one before the first step, one that came twice."""
        again = error.exit_code == TrainingFailed.exit_code and worker.state not in (
            "starting",
            "free",
        )
        if (
            not again
            or error.details.get("final")
            or self._order.mode == "ramp"
            or self._membership.fleet.repeats(worker.step)
        ):
            raise error
        self._membership.last_cause = error
