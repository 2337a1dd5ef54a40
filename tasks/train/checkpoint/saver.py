"""Writes checkpoints while training goes on: a thread of each rank, which gets copies of the tensors.

The step waits for the copy alone; where the one before is still being written, for its digests, too, so that what waits is kept.
One checkpoint is being written, one may wait; a newer one takes the place of one that waits, which is skipped, and said. The last
and those kept for good are not skipped, and the best only for one that is better. Each rank writes its rows of metrics and, of a
large checkpoint, its shard; rank 0 makes the checkpoint of them when the launcher has heard that all parts are safe. How they get
into the store is `checkpoint_writer`.

The thread outlives worker groups. What was in flight when a group ended is made if every part
of it was or gets safe, and fails where a rank was lost before its part was in the store; the next group then writes another.
"""

from __future__ import annotations

import copy
import threading
import time
import traceback
from functools import partial
from typing import TYPE_CHECKING

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.errors import ServiceUnreachable, TrainingFailed, TrainwrightError
from trainwright.tasks.train.channel import Channel, busy_with_store
from trainwright.tasks.train.checkpoint import shared_memory
from trainwright.tasks.train.checkpoint.confirmations import FAILED
from trainwright.tasks.train.checkpoint.fence import Fence
from trainwright.tasks.train.checkpoint.files import (
    MODEL,
    OPTIMIZER,
    SHARDED_ABOVE_BYTES,
    State,
    file_name,
)
from trainwright.tasks.train.checkpoint.tensors import (
    HostCopy,
    optimizer_tensors,
    own_part,
    size_bytes,
)
from trainwright.tasks.train.checkpoint.writer import CheckpointWriter, PendingCheckpoint
from trainwright.tasks.train.exchange.collective import PeersLost
from trainwright.tasks.train.hosts.store_proxy import spill_of, store_of
from trainwright.tasks.train.record import metrics

if TYPE_CHECKING:
    from trainwright.tasks.train.rank.rank import Rank
    from trainwright.tasks.train.request import Order
    from trainwright.tasks.train.worker_group import WorkerGroup

SKIP, WRITE, REPLACE = 0, 1, 2
ANSWER_S = 10.0
"""how long the store may take to answer; on top, what the file takes at the slowest"""
SLOWEST_BYTES_PER_S = 5e6
STOPPED_PATIENCE_S = 5.0
TELL_EVERY_S = 10.0


class Saver:
    """A rank's writer of checkpoints. All members of a worker group call `save` after the same steps."""

    def __init__(
        self,
        rank: Rank,
        channel: Channel,
        order: Order,
        own: list[metrics.Rows],
        common: list[metrics.Rows],
    ) -> None:
        """Rows are written with each checkpoint: each rank's own, and by the first those that all have in common."""
        self._rank, self._channel, self._own, self._common = rank, channel, own, common
        self._policy, self._token = rank.spec.checkpoint, order.lease_token
        self._end_patience_s = order.request.store_patience_s
        largest = 2 * size_bytes(rank.model.state_dict())  # Adam's state
        store = store_of(order, channel, ANSWER_S + largest / SLOWEST_BYTES_PER_S)
        self._owner = order.claim
        spill = spill_of(order, channel, rank.number)
        self._writer = CheckpointWriter(
            rank.number, Fence(store, order.claim), spill, channel, self._policy
        )
        self._generation = -1
        self._left: list[metrics.Part] = []
        self._changed = threading.Condition()
        self._keeps = order.keeps
        self._free: list[HostCopy] = []
        self._waiting: PendingCheckpoint | None = None
        self._writing: PendingCheckpoint | None = None
        self._error: BaseException | None = None

    def join(self, group: WorkerGroup, left: list[metrics.Part]) -> None:
        """From now on these are the members. `left`: rows of devices that are not among them, which the first writes."""
        if self._generation < 0:
            self._writer.spill.clear()
            rank = self._rank
            places = (
                shared_memory.places(rank.work, self._owner, rank.number)
                if self._keeps
                else (None, None)
            )
            self._free = [HostCopy(place) for place in places]
            threading.Thread(target=self._work, name="saver", daemon=True).start()
        with self._changed:
            self._generation = group.generation
            self._writer.look_again()
            if group.broken:
                self._drop_waiting("the worker group that began it has ended")
            self._left = left

    @property
    def _first(self) -> bool:
        return self._rank.first

    def save(self, state: State, *, last: bool) -> None:
        """Take a copy of what is to be kept; with `last`, wait until the store has it.

        Raises ServiceUnreachable where the store is away at the end: what it lacks is in the spill folder then; TrainingFailed
        where the thread has ended.
        """
        self._check()
        policy, collective = self._policy, self._rank.collective
        for_good = policy.keep_every is not None and state.step % policy.keep_every == 0
        best = state.best and policy.keep_best
        own = (
            float(self._choose(state.step, best, required=last or for_good or best))
            if self._first
            else 0.0
        )
        # torch's default is the type of the model's parameters, and Horovod sums no bf16.
        chosen = torch.tensor([own], dtype=torch.float64)
        choice = int(collective.sum_(chosen, "checkpoint"))
        if choice != SKIP:
            self._enqueue(state, best, for_good, replace=choice == REPLACE)
        if last:
            self.settle()
            if self._first and self._writer.lost is not None:
                raise ServiceUnreachable(self._writer.lost, service="store")

    def forget_from(self, step: int) -> None:
        """After `settle`: rows of steps that are done again, and could not be written before."""
        with self._changed:
            self._writer.forget_from(step)
            self._left = []
            for copies in self._free:
                shared_memory.unmark(copies.place)

    def _choose(self, step: int, best: bool, *, required: bool) -> int:
        """Rank 0 says for all what becomes of this checkpoint: two at a time, and each rank is as far as rank 0."""
        with self._changed:
            while (other := self._waiting) is not None:
                if not other.for_good and (best or not other.best):
                    return REPLACE
                if not required:
                    self._writer.notice(
                        f"the checkpoint of step {step} is skipped: two earlier ones are still being written"
                    )
                    return SKIP
                self._wait(1.0)
        return WRITE

    def _drop_waiting(self, why: str) -> int | None:
        """Not the one that waits after all; its step. The rows it was to write go with the next."""
        job, self._waiting = self._waiting, None
        if job is None:
            return None
        self._writer.owe(job.rows)
        self._writer.look_again()
        self._free.append(job.copies)
        self._writer.say_part(job.state.step, job.generation, where=FAILED, why=why, files={})
        return job.state.step

    def _enqueue(self, state: State, best: bool, for_good: bool, *, replace: bool) -> None:
        files = {
            MODEL: self._rank.model.state_dict(),
            OPTIMIZER: optimizer_tensors(self._rank.optimizer),
        }
        number, size = self._rank.collective.rank, self._rank.collective.size
        if sum(map(size_bytes, files.values())) <= SHARDED_ABOVE_BYTES:
            own, size = files if self._first else {}, 1
        else:
            own = own_part(files, number, size)
        with self._changed:
            if (
                replace
                and (dropped := self._drop_waiting("a newer one takes its place")) is not None
                and self._first
            ):
                self._writer.notice(
                    f"the checkpoint of step {dropped} is skipped for that of {state.step}: the store is slow"
                )
            while (
                self._waiting is not None or not self._free
            ):  # where this rank is behind the first
                self._wait(1.0)
            copies = self._free.pop(0)  # so that the newest stays
        shared_memory.unmark(copies.place)
        taken = copies.take({file_name(name, number, size): part for name, part in own.items()})
        rows = [
            part
            for one in [*self._own, *(self._common if self._first else ())]
            for part in one.take()
        ]
        own_state = copy.deepcopy(state)
        own_state.owner, own_state.token = self._owner, self._token
        rows = [*self._left, *rows]
        job = PendingCheckpoint(
            own_state, taken, copies, rows, best, for_good, self._generation, self._first
        )
        if (
            self._writing is not None or self._writer.spill.waiting
        ):  # a slow store: it is kept while it waits
            job.digests = self._writer.mark(job)
        with self._changed:
            self._waiting, self._left = job, []
            self._changed.notify_all()

    def _wait(self, seconds: float) -> None:
        """Until something changes. Raises PeersLost if the launcher aborts this rank's worker group meanwhile."""
        self._check()
        if self._channel.abort_asked == self._generation:
            raise PeersLost("the worker group was aborted while this rank waited for a checkpoint")
        with busy_with_store(self._channel):
            self._changed.wait(min(seconds, 0.2))

    def _check(self) -> None:
        if (
            self._error is not None
        ):  # a launcher has ended the training for it; under torchrun there is none
            raise TrainingFailed("checkpoints can't be written") from self._error

    def settle(self) -> None:
        """Wait until nothing is on its way to the store; when that is away, as long as is sensible.

        Raises ServiceUnreachable: what the store lacks is in the spill folder then.
        """
        stopped, began, told = self._rank.stop_asked, time.monotonic(), time.monotonic()
        with self._changed:
            while self._waiting or self._writing or self._writer.spill.waiting:
                now = time.monotonic()
                patience_s = STOPPED_PATIENCE_S if self._rank.stop_asked else self._end_patience_s
                if not (self._waiting or self._writing) and now - began > patience_s:
                    break
                if now - told > TELL_EVERY_S:
                    told = now
                    self._writer.notice(
                        f"waits for the store ({now - began:.0f} s of {patience_s:.0f} s): {self._writer.away or 'it is slow'}"
                    )
                self._wait(0.2)
        folder = self._writer.spill.folder.parent
        left = f"{self._writer.away}; the last checkpoints are kept in {folder}: start again on this machine"
        if self._writer.spill.waiting and stopped:
            self._writer.notice(left)
        elif self._writer.spill.waiting:
            raise ServiceUnreachable(left, service="store")

    # The thread's side

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    while self._waiting is None and not self._writer.may_drain():
                        self._changed.wait(0.2 if self._writer.spill.waiting else None)
                    job, self._waiting = self._waiting, None
                    self._writing = job
                    self._changed.notify_all()
                if self._writer.may_drain():
                    self._writer.drain()
                if job is not None:
                    self._writer.write(job, partial(self._release, job.copies))
                with self._changed:
                    self._writing = None
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - a thread's boundary: told to the launcher, which ends the training
            traceback.print_exc()
            ours = (
                error
                if isinstance(error, TrainwrightError)
                else TrainingFailed(f"checkpoint: {error!r}")
            )
            try:  # before anyone else says that checkpoints can't be written
                self._channel.send("error", error=ours.document(), step=None, final=True)
            finally:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()

    def _release(self, copies: HostCopy) -> None:
        with self._changed:
            self._free.append(copies)
            self._changed.notify_all()
