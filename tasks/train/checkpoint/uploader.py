"""Uploads staged checkpoints in order. It is the only writer to the store while ranks train.

For each checkpoint, it uploads rows of metrics, then the files, state.json, and last the index
(`fence`). While the store is unreachable, it retries after pauses. Checkpoints staged meanwhile are
synced to disk, and those that the policy would not keep are dropped.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from trainwright.tasks.errors import CorruptArtefact, ServiceUnreachable, TrainwrightError
from trainwright.tasks.spec.train_spec import CheckpointPolicy
from trainwright.tasks.storage.objects import ObjectStore
from trainwright.tasks.train.checkpoint import files, staged
from trainwright.tasks.train.checkpoint.fence import (
    Entry,
    Fence,
    folder_name,
    read_index,
    retained,
)
from trainwright.tasks.train.checkpoint.staged import RESUME, Staged, StagingArea
from trainwright.tasks.train.record import metrics
from trainwright.tasks.train.record.journal import Journals

ANSWER_S, SLOWEST_BYTES_PER_S = 10.0, 5e6
"""Timeout of a request to the store: this plus a file's duration at the slowest rate."""
PAUSE_S, LONGEST_PAUSE_S = 1.0, 15.0
STOPPED_PATIENCE_S = 5.0
ASK_EVERY_S, TELL_EVERY_S = 1.0, 10.0
_END_S = 2.0
_log = logging.getLogger(__name__)


def upload(
    fence: Fence, one: Staged, journals: Journals, policy: CheckpointPolicy, since: int
) -> None:
    """Upload a checkpoint. `since` is the step of the newest one in the store.

    All writes are idempotent. Raises RunHeld, ServiceUnreachable, and CorruptArtefact if a file is
    missing, or has changed since it was synced.
    """
    state, folder = one.state, folder_name(one.step)
    for name, rows in [*journals.parts(one.step), *metrics.common_parts(state, since)]:
        fence.put(metrics.part_key(name), metrics.encode(rows))
    try:
        for name, data in one.files():
            known = state.sha256.get(name)
            digest = state.add_file(name, data)
            if known not in (None, digest):
                raise CorruptArtefact(f"{name}: changed since it was staged (sha256 differs)")
            fence.put(f"{folder}/{name}", data, digest)
    except OSError as error:
        raise CorruptArtefact(str(error)) from error
    files.write_state(fence, state, policy)


def recover(store: ObjectStore, work: Path, policy: CheckpointPolicy) -> list[int]:
    """Upload the checkpoints that an earlier launch left on this machine; returns their steps.

    Uploads nothing if another launch has trained the run since then: it acts in the name of the
    launch that staged them, so it can't overwrite newer work. Raises RunHeld and
    ServiceUnreachable; then it can be repeated.
    """
    index, _ = read_index(store)
    fence, newest, saved = Fence(store, index.owner), index.newest, []
    found = [one for one in StagingArea(work, index.owner).found() if one.step > newest]
    for one in _kept(found, policy):
        try:
            upload(fence, one, Journals(work), policy, newest)
        except CorruptArtefact as error:
            _log.warning("skips step %d, which is staged on this machine: %s", one.step, error)
            continue
        newest = one.step
        saved.append(newest)
    staged.drop(work)
    return saved


def _kept(found: list[Staged], policy: CheckpointPolicy) -> list[Staged]:
    entries = [Entry(one.step, "", one.state.best) for one in found]
    kept = {entry.step for entry in retained(entries, policy)}
    return [one for one in found if one.step in kept]


def rewind(fence: Fence, work: Path, *, resume: bool = True) -> files.CheckpointState | None:
    """Go back to the newest intact checkpoint: download its files to RESUME, return its state.

    Metrics recorded after it are deleted. Returns None if training starts at step 0, as it always
    does without `resume`.
    """
    shutil.rmtree(work / RESUME, ignore_errors=True)
    state = files.fetch_latest(fence.store, work / RESUME) if resume else None
    fence.forget(after=state.step if state is not None else -1)
    metrics.drop_from(fence.store, state.step if state is not None else 0)
    Journals(work).clear()
    return state


class Uploader:
    """The thread that uploads. Runs as a context manager."""

    def __init__(
        self,
        open_store: Callable[[float | None], ObjectStore],
        area: StagingArea,
        policy: CheckpointPolicy,
        *,
        stored: int,
        require_mine: Callable[[], None],
        report: Callable[..., None],
    ) -> None:
        """`open_store` takes the timeout of requests in seconds (None: the default);
        `require_mine` raises RunHeld if the lease is lost; `report` receives `notice` and
        `checkpoint` events.
        """
        self._open, self.area, self._policy = open_store, area, policy
        self._require_mine, self._report = require_mine, report
        self.stored, self.journals = stored, Journals(area.work)
        self.removed: Callable[[Staged], None] = lambda one: None
        """called for each checkpoint that is uploaded or dropped"""
        self._fence: Fence | None = None
        self._largest = 0
        self._changed = threading.Condition()
        self._queue: list[Staged] = []
        """staged checkpoints in order, including the current one"""
        self._current: Staged | None = None
        """the one that the thread is working on"""
        self._away, self._away_since = "", 0.0
        """while the store is unreachable: the error, and since when"""
        self._retry_at, self._pause_s = 0.0, 0.0
        self._closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="uploader", daemon=True)

    def __enter__(self) -> Uploader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=_END_S)

    def check(self) -> None:
        """Raise the error that ended the thread, if any."""
        if self._error is not None:
            raise self._error

    @property
    def is_away(self) -> bool:
        """Whether the store was unreachable and the pending uploads are not complete yet."""
        return bool(self._away)

    @property
    def has_all(self) -> bool:
        """Whether all staged checkpoints are uploaded."""
        return not self._queue

    def submit(self, one: Staged) -> None:
        """Queue a staged checkpoint."""
        with self._changed:
            self._queue.append(one)
            self._changed.notify_all()

    def skip(self, may_skip: Callable[[files.CheckpointState], bool]) -> tuple[bool, int | None]:
        """Drop the newest checkpoint in the queue, if `may_skip` allows it.

        Returns whether one was waiting, and its step if it was dropped.
        """
        with self._changed:
            waiting = [one for one in self._queue if one is not self._current]
            if not waiting or not may_skip(waiting[-1].state):
                return bool(waiting), None
            self._queue.remove(waiting[-1])
        self.removed(waiting[-1])
        return True, waiting[-1].step

    def settle(self, stop: threading.Event, patience_s: float) -> None:
        """Wait until all is uploaded. Raises ServiceUnreachable after `patience_s` without a store.

        The next start on this machine uploads the rest then. If `stop` was set before the call, the
        failure is reported as a notice and not raised.
        """
        stopped = stop.is_set()
        began = reported = checked = time.monotonic()
        while True:
            try:
                self.check()
                with self._changed:
                    if not self._queue:
                        return
                    self._changed.wait(0.2)
                    uploading = self._current is not None or not self._away
                now = time.monotonic()
                patience = min(patience_s, STOPPED_PATIENCE_S) if stop.is_set() else patience_s
                if not uploading and now - began > patience:
                    break
                if now - checked > ASK_EVERY_S:
                    checked = now
                    self._require_mine()
                if now - reported > TELL_EVERY_S:
                    reported = now
                    waited = f"{now - began:.0f} s of {patience:.0f} s"
                    self.notice(f"waits for the store ({waited}): {self._away or 'it is slow'}")
            except KeyboardInterrupt:
                stop.set()
        message = (
            f"the checkpoint of step {self._queue[-1].step} could not be stored: {self._away}; "
            f"it is kept in {self.area.disk}: start again on this machine to upload it"
        )
        if not stopped:
            raise ServiceUnreachable(message, service="store")
        self.notice(message)

    def go_back(self, stop: threading.Event, patience_s: float) -> None:
        """Upload all, then `rewind`. No rank may take a checkpoint meanwhile."""
        self.settle(stop, patience_s)
        state = rewind(Fence(self._open(None), self.area.launch), self.area.work)
        self.stored = state.step if state is not None else 0
        if self._fence is not None:
            self._fence.look_again()

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            metrics.warm_up()
            while (found := self._next()) is not None:
                act, one = found
                act(one)
                with self._changed:
                    self._current = None
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - end of a thread: `check` raises it
            if not isinstance(error, TrainwrightError):
                traceback.print_exc()
            with self._changed:
                self._error, self._current = error, None
                self._changed.notify_all()

    def _next(self) -> tuple[Callable[[Staged], None], Staged] | None:
        """Wait for the next task: drop, upload or sync a checkpoint."""
        with self._changed:
            while not self._closing:
                wait_s = self._retry_at - time.monotonic() if self._away else 0.0
                surplus = set(self._queue) - set(_kept(self._queue, self._policy))
                unsynced = [one for one in self._queue if not one.is_synced]
                found: tuple[Callable[[Staged], None], Staged] | None = None
                if self._away and surplus:
                    found = self._remove, surplus.pop()
                elif self._queue and wait_s <= 0:
                    found = self._store, self._queue[0]
                elif unsynced:
                    found = Staged.sync, unsynced[0]
                if found is not None:
                    self._current = found[1]
                    return found
                self._changed.wait(wait_s if wait_s > 0 else None)
        return None

    def _store(self, one: Staged) -> None:
        fence = self._fence_for(one)
        try:
            self._require_mine()
            upload(fence, one, self.journals, self._policy, self.stored)
        except ServiceUnreachable as error:
            fence.look_again()
            self._is_away(str(error))
            return
        except CorruptArtefact as error:
            fence.look_again()
            self.notice(f"the checkpoint of step {one.step} is lost: {error}")
        else:
            self.stored = one.step
            self.journals.drop(one.step)
            self._report("checkpoint", step=one.step, path=folder_name(one.step))
        self._remove(one)
        if self._away and not self._queue:
            away_s = time.monotonic() - self._away_since
            self._away, self._pause_s = "", 0.0
            self.notice(f"the store is back after {away_s:.0f} s, and all checkpoints are uploaded")

    def _remove(self, one: Staged) -> None:
        with self._changed:
            self._queue.remove(one)
        self.removed(one)

    def _fence_for(self, one: Staged) -> Fence:
        """A fence whose timeout suits the largest file so far."""
        if self._fence is None or one.largest_bytes > self._largest:
            self._largest = one.largest_bytes
            store = self._open(ANSWER_S + self._largest / SLOWEST_BYTES_PER_S)
            self._fence = Fence(store, self.area.launch)
        return self._fence

    def _is_away(self, error: str) -> None:
        now = time.monotonic()
        if not self._away:
            self._away_since = now
            self.notice(f"{error}; until it is back, checkpoints are kept in {self.area.disk}")
        self._away = error
        self._pause_s = min(LONGEST_PAUSE_S, max(PAUSE_S, 2 * self._pause_s))
        self._retry_at = now + self._pause_s

    def notice(self, message: str) -> None:
        """Send a notice to the listeners of the training's progress."""
        self._report("notice", message=message)
