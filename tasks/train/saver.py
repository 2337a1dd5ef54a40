"""Writes checkpoints while training goes on: a thread of each rank, which gets copies of the tensors.

The step waits for the copy alone. One checkpoint is being written, one may wait; a newer one takes the place of one that waits,
which is skipped, and said; those that are the best, the last or kept for good are not skipped. Each rank writes its rows of
metrics and, of a large checkpoint, its shard; rank 0 makes the checkpoint of them when the launcher has heard that all parts are
safe. What the store does not take goes to `spill` and from there to the store when it is back, in its order.

The thread outlives worlds. What was in flight when a world ended is made if every part of it was or gets safe, and fails where
a rank was lost before its part was in the store; the next world then writes another.
"""

from __future__ import annotations

import copy
import threading
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.tasks.errors import CorruptArtefact, ServiceUnreachable, TrainingFailed, TrainwrightError
from trainwright.tasks.objects import sha256
from trainwright.tasks.train import metrics
from trainwright.tasks.train.checkpoint import (
    MODEL,
    OPTIMIZER,
    SHARDED_ABOVE_BYTES,
    State,
    file_name,
    parsed,
    write_state,
)
from trainwright.tasks.train.collective import PeersLost
from trainwright.tasks.train.confirmations import FAILED, SPILLED, STORED
from trainwright.tasks.train.fence import STATE, Entry, Fence, folder_name, retained
from trainwright.tasks.train.launcher_store import spill_of, store_of
from trainwright.tasks.train.spill import Spilled
from trainwright.tasks.train.tensors import HostCopy, Tensors, encode, optimizer_tensors, own_part, size_bytes

if TYPE_CHECKING:
    from trainwright.tasks.train.channel import Channel
    from trainwright.tasks.train.rank import Rank
    from trainwright.tasks.train.request import Order
    from trainwright.tasks.train.world import World

SKIP, WRITE, REPLACE = 0, 1, 2
ANSWER_S = 10.0
"""how long the store may take to answer; on top, what the file takes at the slowest"""
SLOWEST_BYTES_PER_S = 5e6
PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0
STOPPED_PATIENCE_S = 5.0
TELL_EVERY_S = 10.0


@dataclass
class _Job:
    """A checkpoint on its way: this rank's part of the tensors, as they were, and its rows of metrics."""

    state: State
    files: dict[str, Tensors]
    copies: HostCopy
    rows: list[metrics.Part]
    required: bool
    generation: int
    first: bool


class Saver:
    """A rank's writer of checkpoints. All members of a world call `save` after the same steps."""

    def __init__(
        self, rank: Rank, channel: Channel, order: Order, own: list[metrics.Rows], common: list[metrics.Rows]
    ) -> None:
        """Rows are written with each checkpoint: each rank's own, and by the first those that all have in common."""
        self._rank, self._channel, self._own, self._common = rank, channel, own, common
        self._policy, self._token = rank.spec.checkpoint, order.lease_token
        self._end_patience_s = order.request.store_patience_s
        largest = 2 * size_bytes(rank.model.state_dict())  # Adam's state
        self._fence = Fence(store_of(order, channel, ANSWER_S + largest / SLOWEST_BYTES_PER_S), order.claim)
        self._spill = spill_of(order, channel, rank.number)
        self._generation = -1
        self._best: set[int] = set()
        self._owed: list[metrics.Part] = []
        self._left: list[metrics.Part] = []
        self._kept_here: dict[str, metrics.Part] = {}
        self._lost: str | None = None
        self._away_since = self._retry_at = self._pause_s = 0.0
        self._away = ""
        self._changed = threading.Condition()
        self._free = [HostCopy(), HostCopy()]
        self._waiting: _Job | None = None
        self._writing: _Job | None = None
        self._error: BaseException | None = None

    def join(self, world: World, left: list[metrics.Part]) -> None:
        """From now on these are the members. `left`: rows of devices that are not among them, which the first writes."""
        if self._generation < 0:
            self._spill.clear()
            threading.Thread(target=self._work, name="saver", daemon=True).start()
        with self._changed:
            self._generation = world.generation
            if world.broken:
                self._drop_waiting("the world that began it has ended")
            self._left = left

    @property
    def _first(self) -> bool:
        return self._rank.first

    def save(self, state: State, *, last: bool) -> None:
        """Take a copy of what is to be kept; with `last`, wait until the store has it.

        Raises ServiceUnreachable where the store is away at the end: what it lacks is in the spill folder then.
        """
        policy, collective = self._policy, self._rank.collective
        for_good = policy.keep_every is not None and state.step % policy.keep_every == 0
        required = last or for_good or (state.best and policy.keep_best)
        chosen = torch.tensor([float(self._choose(required, state.step)) if self._first else 0.0])
        choice = int(collective.sum_(chosen, "checkpoint"))
        if choice != SKIP:
            self._enqueue(state, required, replace=choice == REPLACE)
        if last:
            self.settle()
            if self._first and self._lost is not None:
                raise ServiceUnreachable(self._lost, service="store")

    def forget_from(self, step: int) -> None:
        """After `settle`: rows of steps that are done again, and could not be written before."""
        with self._changed:
            for part in self._owed:
                part.rows = [row for row in part.rows if row["step"] < step]
            self._owed = [part for part in self._owed if part.rows]
            self._left, self._lost = [], None

    def _choose(self, required: bool, step: int) -> int:
        """Rank 0 says for all what becomes of this checkpoint: two at a time, and each rank is as far as rank 0."""
        with self._changed:
            while self._waiting is not None:
                if not self._waiting.required:
                    return REPLACE
                if not required:
                    self._notice(f"the checkpoint of step {step} is skipped: two earlier ones are still being written")
                    return SKIP
                self._wait(1.0)
        return WRITE

    def _drop_waiting(self, why: str) -> int | None:
        """Not the one that waits after all; its step. The rows it was to write go with the next."""
        job, self._waiting = self._waiting, None
        if job is None:
            return None
        self._owed += job.rows
        self._free.append(job.copies)
        self._say_part(job.state.step, job.generation, where=FAILED, why=why, files={})
        return job.state.step

    def _enqueue(self, state: State, required: bool, *, replace: bool) -> None:
        files = {MODEL: self._rank.model.state_dict(), OPTIMIZER: optimizer_tensors(self._rank.optimizer)}
        number, size = self._rank.collective.rank, self._rank.collective.size
        if sum(map(size_bytes, files.values())) <= SHARDED_ABOVE_BYTES:
            own, size = files if self._first else {}, 1
        else:
            own = own_part(files, number, size)
        with self._changed:
            if replace and (dropped := self._drop_waiting("a newer one takes its place")) is not None and self._first:
                self._notice(f"the checkpoint of step {dropped} is skipped for that of {state.step}: the store is slow")
            while self._waiting is not None or not self._free:  # where this rank is behind the first
                self._wait(1.0)
            copies = self._free.pop()
        taken = {file_name(name, number, size): part for name, part in copies.take(own).items()}
        rows = [part for one in [*self._own, *(self._common if self._first else ())] for part in one.take()]
        kept = copy.deepcopy(state)
        kept.owner, kept.token = self._fence.owner, self._token
        with self._changed:
            self._waiting = _Job(kept, taken, copies, [*self._left, *rows], required, self._generation, self._first)
            self._left = []
            self._changed.notify_all()

    def _wait(self, seconds: float) -> None:
        """Until something changes. Raises PeersLost where the launcher calls this rank out of its world meanwhile."""
        if self._error is not None:
            raise TrainingFailed("checkpoints can't be written") from self._error
        if self._channel.out_asked == self._generation:
            raise PeersLost("called out of the world while waiting for a checkpoint")
        self._channel.writing = True
        self._changed.wait(min(seconds, 0.2))
        self._channel.writing = False

    def settle(self) -> None:
        """Wait until nothing is on its way to the store; when that is away, as long as is sensible.

        Raises ServiceUnreachable: what the store lacks is in the spill folder then.
        """
        stopped, began, told = self._rank.stop_asked, time.monotonic(), time.monotonic()
        patience_s = STOPPED_PATIENCE_S if stopped else self._end_patience_s
        with self._changed:
            while self._waiting or self._writing or self._spill.waiting:
                now = time.monotonic()
                if not (self._waiting or self._writing) and now - began > patience_s:
                    break
                if now - told > TELL_EVERY_S:
                    told = now
                    self._notice(
                        f"waits for the store ({now - began:.0f} s of {patience_s:.0f} s): {self._away or 'it is slow'}"
                    )
                self._wait(0.2)
        left = (
            f"{self._away}; the last checkpoints are kept in {self._spill.folder.parent}: start again on this machine"
        )
        if self._spill.waiting and stopped:
            self._notice(left)
        elif self._spill.waiting:
            raise ServiceUnreachable(left, service="store")

    # The thread's side

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    while self._waiting is None and not (self._spill.waiting and time.monotonic() >= self._retry_at):
                        self._changed.wait(0.2 if self._spill.waiting else None)
                    job, self._waiting = self._waiting, None
                    self._writing = job
                    self._changed.notify_all()
                if self._spill.waiting and time.monotonic() >= self._retry_at:
                    self._drain()
                if job is not None:
                    self._write(job)
                with self._changed:
                    self._writing = None
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - a thread's boundary: told to the launcher, which ends the training
            traceback.print_exc()
            ours = error if isinstance(error, TrainwrightError) else TrainingFailed(f"checkpoint: {error!r}")
            with self._changed:
                self._error = error
                self._changed.notify_all()
            self._channel.send("error", error=ours.document(), step=None, final=True)

    def _write(self, job: _Job) -> None:
        step, files = job.state.step, dict[str, Any]()
        said: dict[str, Any] = {"where": STORED}
        self._channel.ask("write")  # a holder that lost its lease does not begin
        with self._changed:
            self._owed += job.rows
        try:
            while self._owed:
                part = self._owed[0]
                self._kept_here[part.key] = part
                self._put(part.key, metrics.encode(part.rows), job)
                self._owed.remove(part)
            for name, tensors in job.files.items():
                data = encode(tensors)
                files[name] = {"sha256": sha256(data), "size_bytes": len(data)}
                self._put(f"{folder_name(step)}/{name}", data, job)
            if any(one.step == step for one in self._spill.waiting):
                said = {"where": SPILLED}
        except ServiceUnreachable as error:  # neither the store nor this machine's disk takes it
            said = {"where": FAILED, "why": str(error)}
            self._drop(step, list(files))
        with self._changed:
            self._free.append(job.copies)
            self._changed.notify_all()
        if job.state.best:
            self._best.add(step)
        self._say_part(step, job.generation, files=files, **said)
        if job.first:
            self._make(job.state, job.generation)
        self._prune()

    def _say_part(self, step: int, generation: int, **said: Any) -> None:
        self._channel.send("part", step=step, generation=generation, **said)

    def _is_stored(self, key: str) -> None:
        if (part := self._kept_here.pop(key, None)) is not None:
            part.of.stored(part)

    def _put(self, key: str, data: bytes, job: _Job) -> None:
        if not self._spill.waiting:  # else it has to wait its turn
            try:
                self._fence.put(key, data)
            except ServiceUnreachable as error:
                self._is_away(error)
            else:
                self._is_stored(key)
                return
        try:
            self._spill.add(key, data, job.state.step, job.generation)
        except ServiceUnreachable as error:
            raise ServiceUnreachable(f"{self._away}; and {error}", service="store") from error

    def _make(self, state: State, generation: int) -> None:
        """The first of its world, when every rank's part is safe: state.json."""
        found = self._channel.ask("parts", step=state.step, generation=generation)
        if found["failed"] is not None:
            self._drop(state.step, [])
            self._not_kept(state.step, found["failed"])
            return
        state.sha256 = {name: file["sha256"] for name, file in found["files"].items()}
        state.size_bytes = {name: file["size_bytes"] for name, file in found["files"].items()}
        if found["stored"] and not self._spill.waiting:
            try:
                self._commit(state)
            except ServiceUnreachable as error:
                self._is_away(error)
            else:
                return
        try:
            self._spill.add(f"{folder_name(state.step)}/{STATE}", state.encoded(), state.step, generation)
        except ServiceUnreachable as error:
            self._not_kept(state.step, f"{self._away}; and {error}")
        else:
            self._lost = None

    def _commit(self, state: State) -> None:
        write_state(self._fence, state, self._policy)
        self._lost = None
        self._channel.send("checkpoint", step=state.step, path=folder_name(state.step))

    def _not_kept(self, step: int, why: str) -> None:
        if self._lost is None:  # once, however many are lost to the same cause
            self._notice(f"the checkpoint of step {step} is not kept; training goes on with the one before: {why}")
        self._lost = f"the checkpoint of step {step} could not be kept: {why}"

    def _drop(self, step: int, names: list[str]) -> None:
        """What was written of a checkpoint that will not be, as far as it can be reached."""
        self._spill.drop({step})
        try:
            for name in names:
                self._fence.store.delete(f"{folder_name(step)}/{name}")
        except (ServiceUnreachable, OSError):
            traceback.print_exc()  # it counts for nothing, and goes with the next checkpoint

    def _prune(self) -> None:
        """The policy also holds for what waits for the store."""
        entries = [Entry(step, "", step in self._best) for step in {one.step for one in self._spill.waiting}]
        self._spill.drop({one.step for one in entries} - {one.step for one in retained(entries, self._policy)})

    def _drain(self) -> None:
        """Bring what waits into the store, in its order, as far as that goes now."""
        while self._spill.waiting:
            one = self._spill.waiting[0]
            try:
                if one.key.endswith(f"/{STATE}"):
                    found = self._channel.ask("stored", step=one.step, generation=one.generation)
                    if found["failed"] is not None:
                        self._spill.drop({one.step})
                        self._not_kept(one.step, found["failed"])
                        continue
                    if not found["stored"]:
                        self._retry_at = time.monotonic() + PAUSE_S
                        return
                    self._commit(parsed(self._spill.read(one)))
                else:
                    self._channel.ask("write")
                    self._fence.put(one.key, self._spill.read(one))
                    self._is_stored(one.key)
            except ServiceUnreachable as error:
                self._is_away(error)
                return
            except CorruptArtefact as error:
                self._give_up(one, error)
                continue
            self._spill.done(one)
            if not one.key.endswith(f"/{STATE}") and not self._lacks(one.step):
                self._say_part(one.step, one.generation, where=STORED)
        self._pause_s = 0.0
        self._notice(f"the store is back after {time.monotonic() - self._away_since:.0f} s, and has what it lacked")

    def _lacks(self, step: int) -> bool:
        return any(one.step == step and not one.key.endswith(f"/{STATE}") for one in self._spill.waiting)

    def _give_up(self, one: Spilled, error: CorruptArtefact) -> None:
        self._spill.done(one)
        self._spill.drop({one.step})
        self._say_part(one.step, one.generation, where=FAILED, why=str(error))
        self._notice(f"the checkpoint of step {one.step} is lost: {error}")

    def _is_away(self, error: ServiceUnreachable) -> None:
        now = time.monotonic()
        if not self._spill.waiting and self._pause_s == 0.0:
            self._away_since = now
            self._notice(f"{error}; until it is back, checkpoints are kept in {self._spill.folder}")
        self._away = str(error)
        self._pause_s = min(LONGEST_PAUSE_S, max(PAUSE_S, 2 * self._pause_s))
        self._retry_at = now + self._pause_s

    def _notice(self, message: str) -> None:
        self._channel.send("notice", message=message)
