"""Brings checkpoints into the store: the work of `saver`'s thread, which owns what is here while it lasts.

What the store does not take goes to `spill`, and from there to the store when it is back, in its order. The first rank of a world
makes the checkpoint of the parts when the launcher has heard that all are safe.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainwright.tasks.errors import CorruptArtefact, ServiceUnreachable
from trainwright.tasks.storage.objects import Content, sha256
from trainwright.tasks.train.checkpoint import shared_memory
from trainwright.tasks.train.checkpoint.confirmations import FAILED, SPILLED, STORED
from trainwright.tasks.train.checkpoint.fence import STATE, Entry, Fence, folder_name, retained
from trainwright.tasks.train.checkpoint.files import State, parsed, write_state
from trainwright.tasks.train.checkpoint.spill import Spill, Spilled
from trainwright.tasks.train.checkpoint.tensors import HostCopy
from trainwright.tasks.train.record import metrics

if TYPE_CHECKING:
    from trainwright.tasks.spec.job import CheckpointPolicy
    from trainwright.tasks.train.channel import Channel

PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0


@dataclass
class PendingCheckpoint:
    """A checkpoint on its way: this rank's part of the tensors, as they were, and its rows of metrics."""

    state: State
    files: dict[str, memoryview]
    copies: HostCopy
    rows: list[metrics.Part]
    best: bool
    """so far, and kept as that"""
    for_good: bool
    generation: int
    first: bool
    digests: shared_memory.Files | None = None
    """once they are known"""


class CheckpointWriter:
    """What a rank has brought into the store, and what the store lacks."""

    def __init__(
        self, rank: int, fence: Fence, spill: Spill, channel: Channel, policy: CheckpointPolicy
    ) -> None:
        self._rank, self._fence, self.spill, self._channel, self._policy = (
            rank,
            fence,
            spill,
            channel,
            policy,
        )
        self._best: set[int] = set()
        self._owed: list[metrics.Part] = []
        self._kept_here: dict[str, metrics.Part] = {}
        self.lost: str | None = None
        """why the newest checkpoint could not be stored"""
        self.away = ""
        """why the store could not be reached last"""
        self._away_since = self._retry_at = self._pause_s = 0.0

    def look_again(self) -> None:
        """Ranks may have written parts of checkpoints that came to nothing."""
        self._fence.look_again()

    def owe(self, rows: list[metrics.Part]) -> None:
        """These rows go with the next checkpoint."""
        self._owed.extend(rows)

    def forget_from(self, step: int) -> None:
        """Rows of steps that are done again."""
        for part in self._owed:
            part.rows = [row for row in part.rows if row["step"] < step]
        self._owed = [part for part in self._owed if part.rows]
        self._kept_here = {key: part for key, part in self._kept_here.items() if part.rows}
        self.lost = None

    def may_drain(self) -> bool:
        """Whether something waits for the store, and it is time to try again."""
        return bool(self.spill.waiting) and time.monotonic() >= self._retry_at

    def mark(self, job: PendingCheckpoint) -> shared_memory.Files:
        """Digests of this rank's part; where its copies outlive the process, it counts as kept from now on.

        Any thread may call it: rows on their way from one list to the other are in the store if they are found in neither.
        """
        files = {
            name: {"sha256": sha256(data), "size_bytes": len(data)}
            for name, data in job.files.items()
        }
        if job.copies.place is not None and job.copies.lasts:
            unstored = {
                part.key: part.rows for part in [*self._kept_here.values(), *self._owed, *job.rows]
            }
            shared_memory.mark(
                job.copies.place, self._rank, job.generation, job.state, files, unstored
            )
        return files

    def write(self, job: PendingCheckpoint, release: Callable[[], None]) -> None:
        """Bring this rank's part into the store, or into the spill folder; `release` is called when its copies are free."""
        step, said = job.state.step, {"where": STORED}
        files = self.mark(job) if job.digests is None else job.digests
        self.owe(job.rows)
        self._channel.ask("write")  # a holder that lost its lease does not begin
        try:
            while self._owed:
                part = self._owed[0]
                self._kept_here[part.key] = part
                self._put(part.key, metrics.encode(part.rows), job)
                self._owed.remove(part)
            for name, data in job.files.items():
                self._put(f"{folder_name(step)}/{name}", data, job, files[name]["sha256"])
            if any(one.step == step for one in self.spill.waiting):
                said = {"where": SPILLED}
        except ServiceUnreachable as error:  # neither the store nor this machine's disk takes it
            said = {"where": FAILED, "why": str(error)}
            self._drop(step, list(files))
        release()
        if job.state.best:
            self._best.add(step)
        self.say_part(step, job.generation, files=files, **said)
        if job.first:
            self._make(job.state, job.generation)
        self._prune()

    def say_part(self, step: int, generation: int, **said: Any) -> None:
        """Tell the launcher what has become of this rank's part of a checkpoint."""
        self._channel.send("part", step=step, generation=generation, **said)

    def _is_stored(self, key: str) -> None:
        if (part := self._kept_here.pop(key, None)) is not None:
            part.of.stored(part)

    def _put(
        self, key: str, data: Content, job: PendingCheckpoint, digest: str | None = None
    ) -> None:
        if not self.spill.waiting:  # else it has to wait its turn
            try:
                self._fence.put(key, data, digest)
            except ServiceUnreachable as error:
                self._is_away(error)
            else:
                self._is_stored(key)
                return
        try:
            self.spill.add(key, data, job.state.step, job.generation)
        except ServiceUnreachable as error:
            raise ServiceUnreachable(f"{self.away}; and {error}", service="store") from error

    def _make(self, state: State, generation: int) -> None:
        """The first of its world, when every rank's part is safe: state.json."""
        found = self._channel.ask("parts", step=state.step, generation=generation)
        if found["failed"] is not None:
            self._drop(state.step, [])
            self._not_kept(state.step, found["failed"])
            return
        state.sha256 = {name: file["sha256"] for name, file in found["files"].items()}
        state.size_bytes = {name: file["size_bytes"] for name, file in found["files"].items()}
        if found["stored"] and not self.spill.waiting:
            try:
                self._commit(state)
            except ServiceUnreachable as error:
                self._is_away(error)
            else:
                return
        try:
            self.spill.add(
                f"{folder_name(state.step)}/{STATE}", state.encoded(), state.step, generation
            )
        except ServiceUnreachable as error:
            self._not_kept(state.step, f"{self.away}; and {error}")
        else:
            self.lost = None

    def _commit(self, state: State) -> None:
        write_state(self._fence, state, self._policy)
        self.lost = None
        self._channel.send("checkpoint", step=state.step, path=folder_name(state.step))

    def _not_kept(self, step: int, why: str) -> None:
        self._fence.look_again()
        if self.lost is None:  # once, however many are lost to the same cause
            self.notice(
                f"the checkpoint of step {step} is not kept; training goes on with the one before: {why}"
            )
        self.lost = f"the checkpoint of step {step} could not be stored: {why}"

    def _drop(self, step: int, names: list[str]) -> None:
        """What was written of a checkpoint that will not be, as far as it can be reached."""
        self._fence.look_again()
        self.spill.drop({step})
        try:
            self._fence.store.delete(*(f"{folder_name(step)}/{name}" for name in names))
        except (ServiceUnreachable, OSError):
            traceback.print_exc()  # it counts for nothing, and goes with the next checkpoint

    def _prune(self) -> None:
        """The policy also holds for what waits for the store."""
        entries = [
            Entry(step, "", step in self._best) for step in {one.step for one in self.spill.waiting}
        ]
        if dropped := {one.step for one in entries} - {
            one.step for one in retained(entries, self._policy)
        }:
            self.spill.drop(dropped)
            self._fence.look_again()

    def drain(self) -> None:
        """Bring what waits into the store, in its order, as far as that goes now."""
        while self.spill.waiting:
            one = self.spill.waiting[0]
            try:
                if one.key.endswith(f"/{STATE}"):
                    found = self._channel.ask("stored", step=one.step, generation=one.generation)
                    if found["failed"] is not None:
                        self.spill.drop({one.step})
                        self._not_kept(one.step, found["failed"])
                        continue
                    if not found["stored"]:
                        self._retry_at = time.monotonic() + PAUSE_S
                        return
                    self._commit(parsed(self.spill.read(one)))
                else:
                    self._channel.ask("write")
                    self._fence.put(one.key, self.spill.read(one), one.sha256)
                    self._is_stored(one.key)
            except ServiceUnreachable as error:
                self._is_away(error)
                return
            except CorruptArtefact as error:
                self._give_up(one, error)
                continue
            self.spill.done(one)
            if not one.key.endswith(f"/{STATE}") and not self._lacks(one.step):
                self.say_part(one.step, one.generation, where=STORED)
        self._pause_s = 0.0
        self.notice(
            f"the store is back after {time.monotonic() - self._away_since:.0f} s, and has what it lacked"
        )

    def _lacks(self, step: int) -> bool:
        return any(
            one.step == step and not one.key.endswith(f"/{STATE}") for one in self.spill.waiting
        )

    def _give_up(self, one: Spilled, error: CorruptArtefact) -> None:
        self.spill.done(one)
        self.spill.drop({one.step})
        self._fence.look_again()
        self.say_part(one.step, one.generation, where=FAILED, why=str(error))
        self.notice(f"the checkpoint of step {one.step} is lost: {error}")

    def _is_away(self, error: ServiceUnreachable) -> None:
        now = time.monotonic()
        if not self.spill.waiting and self._pause_s == 0.0:
            self._away_since = now
            self.notice(f"{error}; until it is back, checkpoints are kept in {self.spill.folder}")
        self.away = str(error)
        self._pause_s = min(LONGEST_PAUSE_S, max(PAUSE_S, 2 * self._pause_s))
        self._retry_at = now + self._pause_s

    def notice(self, message: str) -> None:
        """Tell whoever watches the training."""
        self._channel.send("notice", message=message)
