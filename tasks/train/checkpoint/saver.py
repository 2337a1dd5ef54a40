"""The ranks' side of checkpoints: between two steps, a rank writes its part to the staging folder.

On GPUs, and on a host other than the launcher's, the part is copied to host memory first; a thread
writes it, or sends it to the launcher. The first rank decides for all ranks. Up to two checkpoints
may be pending; for a third, it asks the launcher, which may skip one of them.
"""

from __future__ import annotations

import copy
import queue
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch  # noqa: TID253 - only ranks import this

from trainwright.estimator.memory.step_memory import SHARDED_ABOVE_BYTES
from trainwright.tasks.errors import TrainwrightError
from trainwright.tasks.storage.objects import Content
from trainwright.tasks.train.channel import Channel, busy_with_store
from trainwright.tasks.train.checkpoint.checkpoint_transfer import send_file
from trainwright.tasks.train.checkpoint.coordinator import SKIP, SPILL, WAIT, WRITE
from trainwright.tasks.train.checkpoint.files import CheckpointState
from trainwright.tasks.train.checkpoint.staged import StagingArea, part_name
from trainwright.tasks.train.checkpoint.tensors import (
    as_file,
    host_copies,
    shard_name,
)
from trainwright.tasks.train.exchange.collective import PeersLost

if TYPE_CHECKING:
    from trainwright.tasks.train.rank.rank import Rank
    from trainwright.tasks.train.request import Order
    from trainwright.tasks.train.worker_group import WorkerGroup

AT_ONCE = 2
"""The most checkpoints that may be pending, that is not yet uploaded."""
Files = dict[str, list[Content]]
"""The pieces of each file, by name."""


class Saver:
    """Takes checkpoints. All members of a group call `save` after the same steps."""

    def __init__(self, rank: Rank, channel: Channel, order: Order) -> None:
        self._rank, self._channel, self._policy = rank, channel, rank.spec.checkpoint
        self._sharded, self._generation = order.sharded, -1
        self._area = (
            StagingArea(Path(order.request.work_folder), order.launch) if order.launch else None
        )
        self._directly = self._area is not None and rank.device.type == "cpu"
        self._changed = threading.Condition()
        self._under_way: set[int] = set()
        self.stored = 0
        """the step of the newest checkpoint that the launcher reported as uploaded"""
        self._for_thread: queue.Queue[tuple[Files, bool, dict[str, Any]]] = queue.Queue()
        if not self._directly:
            threading.Thread(target=self._run, name="saver", daemon=True).start()
        channel.released = self._released

    def join(self, group: WorkerGroup) -> None:
        """Enter a new worker group."""
        self._generation = group.generation

    def save(self, state: CheckpointState, *, last: bool) -> None:
        """Take a checkpoint, or skip it. The last one, and those to be kept, are never skipped."""
        every = self._policy.keep_every
        best = state.best and self._policy.keep_best
        required = last or best or (every is not None and state.step % every == 0)
        # An explicit type: torch's default is that of the parameters, and Horovod can't sum bf16.
        chosen = torch.zeros(1, dtype=torch.float64)
        if self._rank.first:
            chosen += self._choose(state.step, best=best, required=required)
        choice = int(self._rank.collective.sum_(chosen, "checkpoint"))
        if choice != SKIP:
            self._take(state, spill=choice == SPILL)
        if last:
            self._wait_for_thread()

    def settle(self) -> None:
        """Wait until the launcher has handled all parts of this rank."""
        self._wait_for_thread()
        self._channel.ask("settled")

    def _choose(self, step: int, **asked: Any) -> int:
        while len(self._under_way) >= AT_ONCE:
            choice: int = self._channel.ask("choose", step=step, **asked)["choice"]
            if choice != WAIT:
                return choice
            with self._changed:
                self._wait()
        return WRITE

    def _take(self, state: CheckpointState, *, spill: bool) -> None:
        number, size = self._rank.collective.rank, self._rank.collective.size
        if not self._sharded or self._rank.state_bytes() <= SHARDED_ABOVE_BYTES:
            size = 1
        tensors = self._rank.written_state(range(size))
        report: dict[str, Any] = {"generation": self._generation, "step": state.step}
        if self._rank.first:
            report["state"] = copy.deepcopy(vars(state)) | {"sha256": {}, "size_bytes": {}}
        self._under_way.add(state.step)
        if not self._directly:
            tensors = {file: host_copies(own) for file, own in tensors.items()}
        files = {shard_name(file, number, size): as_file(own) for file, own in tensors.items()}
        if self._directly:
            self._write(files, spill, report)
        else:
            self._for_thread.put((files, spill, report))

    def _write(self, files: Files, spill: bool, report: dict[str, Any]) -> None:
        """Write this rank's part, and report it to the launcher."""
        name, paths = part_name(report["generation"], report["step"]), list[str]()
        try:
            for file, pieces in files.items():
                size = sum(map(len, pieces))
                if self._area is None:
                    paths.append(send_file(self._channel, name, file, pieces, spill=spill))
                    continue
                with self._area.create(name, file, size, spill=spill) as opened:
                    opened.writelines(pieces)
                    paths.append(opened.name)
        except (OSError, TrainwrightError) as error:
            self._channel.send("part", paths=[], failed=str(error), **report)
        else:
            self._channel.send("part", paths=paths, **report)

    def _run(self) -> None:
        while True:
            self._write(*self._for_thread.get())
            with self._changed:
                self._for_thread.task_done()
                self._changed.notify_all()

    def _wait_for_thread(self) -> None:
        with self._changed:
            while self._for_thread.unfinished_tasks:
                self._wait()

    def _wait(self) -> None:
        """Wait for a change. Raises PeersLost if the launcher aborts the group meanwhile."""
        if self._channel.abort_asked == self._generation:
            raise PeersLost("the group was aborted while a checkpoint waited for others")
        with busy_with_store(self._channel):
            self._changed.wait(0.2)

    def _released(self, step: int, stored: int) -> None:
        with self._changed:
            self._under_way.discard(step)
            self.stored = stored
            self._changed.notify_all()
