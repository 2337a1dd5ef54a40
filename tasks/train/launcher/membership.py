"""Who is in the present world of a training, when it ends, and who forms the next one. Loads no torch.

a process dies, hangs, or its sums fail   -> all others are called out of the world, and meet in a smaller one at once
its replacement is loaded                 -> all leave between two steps, and meet in a larger one
the learning rate is searched             -> what is left of a broken world waits for replacements, and searches anew
too few are left, or too little memory    -> wait for replacements; then a last checkpoint, and a clear failure
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence

from trainwright.tasks import progress
from trainwright.tasks.errors import Interrupted, TrainingFailed, TrainwrightError
from trainwright.tasks.train.launcher.rank_process import Worker
from trainwright.tasks.train.launcher.rank_processes import SPARE_AFTER_S, RankProcesses
from trainwright.tasks.train.launcher.restarts import Fleet
from trainwright.tasks.train.launcher.watchdog import OUT_S, hung, stall_s, stuck
from trainwright.tasks.train.request import Order
from trainwright.tasks.train.worker_group import WorkerGroup

FRUITLESS = 3
"""So many worlds in a row may end without a step and without a lost process, where that takes so long as devices are waited for:
the next would end so, too."""
FRUITLESS_PAUSE_S = 1.0


class Membership:
    """The members of the present world, and what leads from it into the next.

    `restore` brings the newest checkpoint here: its folder and step, or None and 0; it is asked when all ranks were lost.
    """

    def __init__(
        self,
        order: Order,
        processes: RankProcesses,
        restore: Callable[[], tuple[str | None, int]] | None,
        checkpoint: str | None,
        committed: int,
    ) -> None:
        self._processes, self._workers = processes, processes.by_number
        self._restore, self._checkpoint, self.committed = restore, checkpoint, committed
        self._request, self._searches = order.request, order.mode == "ramp"
        devices, policy = order.request.plan.devices, order.request.job.train.faults
        self._patience_s = policy.wait_for_devices
        self.fleet = Fleet(
            [device.batch_size for device in devices],
            min_count=order.request.job.devices.min_count,
            restarts=policy.restarts,
        )
        self.generation = 0
        self.members: list[int] = []
        """of the present world, whoever of them is still in it"""
        self.given_up: str | None = None
        """why the training ends with the present world"""
        self.held: dict[str, dict[str, int]] = {}
        """`most_batch_sizes`: samples that devices were seen to hold, by id, where it ends for want of memory"""
        self.reasons: list[str] = []
        """what is said when the next world begins"""
        self.last_cause: TrainwrightError | None = None
        self.why_ended = ""
        """what a rank said first of the sums that failed"""
        self._began_at_step = self._fruitless = 0
        self._fruitless_since = self._ended_at = 0.0
        self._judged = 0
        self._formed_at: float | None = None
        self._broken_at: float | None = None
        self._leaving_at: float | None = None
        self._short_since: float | None = None
        self._told_short = False

    @property
    def leaving(self) -> bool:
        """Whether all were asked to leave between two steps."""
        return self._leaving_at is not None

    @property
    def lasts(self) -> bool:
        """Whether the training has gone on so long that a spare process pays."""
        return (
            not self._searches
            and self._formed_at is not None
            and time.monotonic() - self._formed_at > SPARE_AFTER_S
        )

    def is_done(self, number: int) -> bool:
        """Whether a device's process has said its last words."""
        return number in self._workers and self._workers[number].done is not None

    def all_done(self) -> bool:
        """Whether every member has."""
        return bool(self.members) and all(self.is_done(number) for number in self.members)

    def _present(self) -> list[Worker]:
        return [self._workers[number] for number in self.members if number in self._workers]

    def _inside(self) -> list[Worker]:
        return [worker for worker in self._present() if worker.state in ("joining", "in")]

    def _free(self) -> list[int]:
        """Devices whose processes wait for a world."""
        return sorted(number for number, worker in self._workers.items() if worker.state == "free")

    def _able(self) -> list[int]:
        """Those of them that have memory for at least one sample."""
        return [number for number in self._free() if self.fleet.limits.get(number) != 0]

    # -- out of one world --------------------------------------------------------------------------------------------

    def end_world(self) -> None:
        """The present world has broken: call all out of it."""
        if self._broken_at is None and self.members:
            self._broken_at = time.monotonic()
            for worker in self._inside():
                worker.channel.send("abort", generation=self.generation)

    def kill_stuck(self, split: Sequence[int]) -> None:
        """Kill who does not come out of a world that has ended, and who hangs in one that has not, with these batches."""
        now, leaving_at = time.monotonic(), self._leaving_at
        if (
            leaving_at is not None
            and now - leaving_at > OUT_S
            and any(one.state == "free" for one in self._present())
        ):
            self.end_world()
        if self._broken_at is not None:
            for worker in stuck(self._inside(), now - self._broken_at):
                worker.give_up("did not come out of a sum that a lost rank had broken")
        limit_s = stall_s(self._request, split)
        for worker, why in hung(self._inside(), now, limit_s, broken=self._broken_at is not None):
            worker.give_up(why)

    def grow(self) -> None:
        """Ask all to leave between two steps where somebody waits to join."""
        inside = self._inside()
        if (
            self._searches
            or not inside
            or self._leaving_at is not None
            or self._broken_at is not None
            or self.given_up is not None
        ):
            return
        if any(worker.state == "joining" or worker.done is not None for worker in inside):
            return
        if any(number not in self.members for number in self._able()):
            self._leaving_at = time.monotonic()
            for worker in inside:
                worker.channel.send("leave", generation=self.generation)

    # -- into the next -----------------------------------------------------------------------------------------------

    def form(self, *, stopping: bool) -> bool:
        """Lead those that are free into a new world, where none is in the one before any more; whether one was formed.

        Raises Interrupted and TrainingFailed where there is none to form.
        """
        if self._inside():
            return False
        able = self._able()
        coming = any(worker.state == "starting" for worker in self._workers.values())
        if coming and (self.generation == 0 or self._searches):
            return False
        state = [number for number in able if self._workers[number].step is not None]
        if stopping:
            if self._searches:
                raise Interrupted("stopped while the learning rate was searched")
            if not state:
                raise Interrupted(
                    "stopped while the ranks were being replaced; the last checkpoint is what is kept"
                )
            return self._meet(able, stopping=True, end=True)
        why = self.fleet.why_not(able)
        if why is None:
            self._short_since, self._told_short = None, False
            return self._meet(able)
        now = time.monotonic()
        self._short_since = self._short_since or now
        coming = coming or self._processes.may_return(self.fleet.may_restart)
        if coming and now - self._short_since < self._patience_s:
            if not self._told_short:
                self._told_short = True
                progress.emit(
                    "notice",
                    message=f"{why}: training waits up to {self._patience_s:.0f} s for others",
                )
            return False
        waited = f" and none came back in {now - self._short_since:.0f} s" if coming else ""
        self.given_up = f"{why}{waited}" + (f" ({self.last_cause})" if self.last_cause else "")
        if self.fleet.lacks_memory(self._free()):
            ids = [device.id for device in self._processes.devices]
            self.held = {
                "most_batch_sizes": {
                    ids[number]: limit for number, limit in self.fleet.limits.items()
                }
            }
        if not state:
            kept = "" if self._searches or not self.committed else "; the last checkpoint is kept"
            raise TrainingFailed(f"{self.given_up}{kept}", **self.held)
        return self._meet(state, end=True)

    def went_back(self, step: int) -> None:
        """The members have gone back to an earlier checkpoint."""
        self.committed, self._began_at_step = step, min(step, self._began_at_step)

    def _judge_world(self) -> bool:
        """Whether the next world may begin now, and not after a pause, for the last one came to nothing.

        Raises TrainingFailed where worlds end again and again, and nobody knows why but their ranks.
        """
        now, finished = time.monotonic(), max(worker.step or 0 for worker in self._workers.values())
        if self.reasons or finished > self._began_at_step or self.generation == 0:
            self._fruitless, self.why_ended = 0, ""
            return True
        if self._judged < self.generation:
            self._judged = self.generation
            self._fruitless_since = self._fruitless_since if self._fruitless else now
            self._fruitless, self._ended_at = self._fruitless + 1, now
        if self._fruitless >= FRUITLESS and now - self._fruitless_since >= self._patience_s:
            kept = "; the last checkpoint is kept" if self.committed else ""
            raise TrainingFailed(
                f"the ranks' sums failed {self._fruitless} times in a row, and no rank was lost: {self.why_ended}; hosts must "
                f"reach this machine and each other by any TCP port, and the ranks' logs say more{kept}"
            )
        return now - self._ended_at >= FRUITLESS_PAUSE_S

    def _meet(self, members: list[int], *, stopping: bool = False, end: bool = False) -> bool:
        if not end and not self._judge_world():
            return False
        anew = all(self._workers[number].step is None for number in members)
        if anew and self.generation and self._restore is not None:
            self._checkpoint, self.committed = self._restore()
        self.generation += 1
        self._began_at_step = max(
            (self._workers[number].step or 0 for number in members), default=0
        )
        machines = [self._processes.machines[number] for number in members]
        verb = "begins with" if self.generation == 1 else "goes on with"
        reason = "; ".join(
            [*self.reasons, f"{verb} {len(members)} of {len(self._processes.machines)}"]
        )
        group = WorkerGroup(
            generation=self.generation,
            members=members,
            machines=machines,
            rendezvous=self._processes.rendezvous.open(self.generation, machines),
            committed=self.committed,
            checkpoint=self._checkpoint if anew else None,
            reason=reason,
            end=end,
            broken=self._broken_at is not None,
            limits={
                number: limit
                for number, limit in self.fleet.limits.items()
                if number in members and not end
            },
        )
        if self.generation > 1 and not end:
            progress.emit("world", generation=self.generation, ranks=members, reason=reason)
        self.members, self.reasons = members, []
        self._broken_at = self._leaving_at = None
        self._formed_at = self._formed_at or time.monotonic()
        for number in members:
            worker = self._workers[number]
            worker.state, worker.done, worker.heard_at = "joining", None, time.monotonic()
            worker.waits_s = worker.computes_s = None
            worker.channel.send("join", **group.model_dump())
            if stopping:
                worker.process.send_signal(signal.SIGTERM)
        return True
