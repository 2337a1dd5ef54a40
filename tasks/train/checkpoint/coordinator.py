"""The launcher's side of checkpoints: collects the ranks' parts, and answers their questions.

Once all members of the group that began a checkpoint have reported their parts, it is staged and
handed to the uploader. If a rank is lost before that, the checkpoint can't be completed: it is
dropped, and the next group takes another at once.

| a rank asks | answer |
|---|---|
| choose step best required | `choice`: what to do about a checkpoint while others are pending |
| settled | once all earlier messages of this rank were handled |
| align step last | once the journals of all ranks end with the last finished step |
| back | `checkpoint`: the folder of the newest one in the store, null if none; or `error` |
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainwright.tasks.errors import ServiceUnreachable, TrainwrightError
from trainwright.tasks.spec.train_spec import CheckpointPolicy
from trainwright.tasks.train.checkpoint.fence import STATE
from trainwright.tasks.train.checkpoint.files import CheckpointState
from trainwright.tasks.train.checkpoint.staged import RESUME, Staged, part_name
from trainwright.tasks.train.checkpoint.uploader import Uploader

SKIP, WRITE, SPILL, WAIT = 0, 1, 2, 3
"""A rank's choices: skip it, write to shared memory, write to disk, or ask again later."""


class RankConnection(Protocol):
    """The launcher's connection to a rank's process."""

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message."""
        ...


@dataclass(eq=False)
class PendingCheckpoint:
    """A checkpoint that a group has begun, with the parts reported so far."""

    generation: int
    step: int
    members: list[int]
    paths: dict[int, list[str]] = field(default_factory=dict)
    """by rank"""
    owners: list[RankConnection] = field(default_factory=list)
    state: CheckpointState | None = None

    @property
    def name(self) -> str:
        """The name of its folder."""
        return part_name(self.generation, self.step)


class Coordinator:
    """Handles the checkpoint messages of one launch's ranks. Thread-safe."""

    def __init__(
        self,
        uploader: Uploader,
        devices: list[str],
        policy: CheckpointPolicy,
        *,
        token: int | None,
        stop: threading.Event,
        patience_s: float,
    ) -> None:
        """`stop` and `patience_s`: see `Uploader.settle`."""
        self._uploader, self._devices, self._policy = uploader, devices, policy
        self._token, self._stop, self._patience_s = token, stop, patience_s
        self._lock = threading.RLock()
        self._members: dict[int, list[int]] = {}
        """by generation of the worker group"""
        self._lost: dict[int, set[int]] = {}
        """the lost members, by generation"""
        self._begun: dict[str, PendingCheckpoint] = {}
        """checkpoints with missing parts, by name"""
        self._staged: dict[Staged, PendingCheckpoint] = {}
        self._dropped: set[str] = set()
        """names of dropped checkpoints, whose late parts are released at once"""
        self._failed = ""
        """why the newest checkpoint could not be staged; empty if it was"""
        self.safe = uploader.stored
        """the step of the newest checkpoint that is staged or uploaded"""
        uploader.removed = self._removed

    def begin(self, generation: int, members: Collection[int]) -> None:
        """Register a new worker group."""
        with self._lock:
            self._members[generation], self._lost[generation] = list(members), set()

    def part(
        self,
        rank: int,
        owner: RankConnection,
        *,
        generation: int,
        step: int,
        paths: list[str],
        state: dict[str, Any] | None = None,
        failed: str | None = None,
    ) -> None:
        """Handle a rank's report: it wrote its part to these files, or failed to."""
        with self._lock:
            one = PendingCheckpoint(generation, step, self._members[generation])
            if one.name in self._dropped:
                one.owners.append(owner)
                self._release(one, again=False)
                return
            one = self._begun.setdefault(one.name, one)
            one.paths[rank] = paths
            one.owners.append(owner)
            if state is not None:
                one.state = CheckpointState(**state)
            if failed is not None:
                self._drop(one, failed)
            self._drop_if_lost(one)
            if one.name in self._begun and set(one.members) <= one.paths.keys():
                self._stage(one)

    def _stage(self, one: PendingCheckpoint) -> None:
        assert one.state is not None
        del self._begun[one.name]
        one.state.owner, one.state.token = self._uploader.area.launch, self._token
        paths = [path for member in one.members for path in one.paths[member]]
        staged = self._uploader.area.stage(one.name, one.state, paths)
        self._staged[staged], self.safe, self._failed = one, one.step, ""
        self._uploader.submit(staged)

    def lost(self, rank: int) -> None:
        """Handle the end of a rank's process: parts that it has not reported will not come."""
        with self._lock:
            for generation, members in self._members.items():
                if rank in members:
                    self._lost[generation].add(rank)
            for one in list(self._begun.values()):
                self._drop_if_lost(one)

    def _drop_if_lost(self, one: PendingCheckpoint) -> None:
        gone = sorted(self._lost[one.generation] - one.paths.keys())
        if gone and one.name in self._begun:
            self._drop(one, f"rank {gone[0]} was lost before its part was staged")

    def _drop(self, one: PendingCheckpoint, why: str | None) -> None:
        del self._begun[one.name]
        self._dropped.add(one.name)
        self._release(one, again=False)
        if why is None:
            return
        if not self._failed:  # one notice, even if several fail for the same reason
            self._uploader.notice(
                f"the checkpoint of step {one.step} was not saved; the previous checkpoint "
                f"remains the newest: {why}"
            )
        self._failed = f"the checkpoint of step {one.step} could not be stored: {why}"

    def _removed(self, staged: Staged) -> None:
        with self._lock:
            if (one := self._staged.pop(staged, None)) is not None:
                self._release(one, again=True)

    def _release(self, one: PendingCheckpoint, *, again: bool) -> None:
        self._uploader.area.remove(one.name, again=again)
        for owner in one.owners:
            owner.send("release", step=one.step, stored=self._uploader.stored)

    # -- questions ---------------------------------------------------------------------------------

    def answer(self, owner: RankConnection, about: str, number: int, **asked: Any) -> None:
        """Answer a rank's question `number`."""
        if about == "back":  # in a thread, because it waits for the store
            arguments = owner, number
            threading.Thread(target=self._back, args=arguments, name="back", daemon=True).start()
            return
        found = {}
        if about == "choose":
            found = {"choice": self._choose(**asked)}
        elif about == "align":
            journals, uploader = self._uploader.journals, self._uploader
            journals.align(asked["step"], asked["last"], self._devices, lambda: uploader.stored)
        owner.send("answer", number=number, **found)

    def _choose(self, step: int, *, best: bool, required: bool) -> int:
        """Decide about a checkpoint while two earlier ones are pending.

        Skips the newest pending one for it, if that one need not be kept. Otherwise skips this
        one, unless it is required.
        """

        def may_skip(other: CheckpointState) -> bool:
            every = self._policy.keep_every
            for_good = every is not None and other.step % every == 0
            return not for_good and (best or not (other.best and self._policy.keep_best))

        with self._lock:
            if self._begun:  # other ranks are still writing their parts
                newest = max(self._begun.values(), key=lambda one: (one.generation, one.step))
                skipped = newest.step if newest.state and may_skip(newest.state) else None
                if skipped is not None:
                    self._drop(newest, None)
            elif self._uploader.is_away:
                return SPILL
            else:
                waiting, skipped = self._uploader.skip(may_skip)
                if not waiting:
                    return WRITE  # one was uploaded in the meantime
        if skipped is not None:
            message = f"the checkpoint of step {skipped} is skipped in favour of step {step}: "
            self._uploader.notice(f"{message}the store is slow")
            return WRITE
        if not required:
            message = f"the checkpoint of step {step} is skipped: "
            self._uploader.notice(f"{message}two earlier ones are still being written")
        return WAIT if required else SKIP

    def _back(self, owner: RankConnection, number: int) -> None:
        try:
            self._rewind()
            owner.send("answer", number=number, checkpoint=self.folder)
        except TrainwrightError as error:
            owner.send("answer", number=number, error=error.document())

    @property
    def folder(self) -> str | None:
        """The folder of the checkpoint from which ranks start; None: they start at step 0."""
        folder = self._uploader.area.work / RESUME
        return str(folder) if (folder / STATE).exists() else None

    def restore(self) -> None:
        """All ranks were lost: make the next group start from the newest checkpoint."""
        self._rewind()
        start = f"the checkpoint of step {self.safe}" if self.folder else "step 0"
        self._uploader.notice(
            f"all ranks with the training's state were lost; resumes from {start}"
        )

    def _rewind(self) -> None:
        """Upload all staged checkpoints, and go back to the newest one in the store."""
        with self._lock:
            for one in list(self._begun.values()):
                self._drop(one, None)
            # No more parts of them can arrive, and their steps will be repeated.
            self._dropped.clear()
        self._uploader.go_back(self._stop, self._patience_s)
        self.safe = self._uploader.stored

    def settle(self) -> None:
        """Wait for all uploads at the end (`Uploader.settle`). Raises ServiceUnreachable."""
        self._uploader.settle(self._stop, self._patience_s)
        if self._failed:
            raise ServiceUnreachable(self._failed, service="store")

    def check(self) -> None:
        """Raise the error that ended the uploader, if any."""
        self._uploader.check()
