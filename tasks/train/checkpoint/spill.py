"""Where a rank keeps what the store would not take: files below <work folder>/spill/rank-N/, under the keys they are to have.

Within a training, `saver` uploads them in their order when the store is back; what a training left behind, `recover` does at
the next start on the same machine.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from trainwright.tasks.errors import CorruptArtefact
from trainwright.tasks.spec.job import CheckpointPolicy
from trainwright.tasks.storage.folder import FolderStore
from trainwright.tasks.storage.objects import Content, ObjectStore, get_verified, sha256
from trainwright.tasks.train.checkpoint.fence import STATE, Fence, folder_name, read_index
from trainwright.tasks.train.checkpoint.files import State, parsed, write_state

_log = logging.getLogger(__name__)


def folder_of(work: Path, rank: int) -> Path:
    """Where a rank's files lie, below the launcher's work folder."""
    return work / "spill" / f"rank-{rank}"


@dataclass(frozen=True)
class Spilled:
    """A file that waits; `step` is the checkpoint's that it is part of, `generation` that of the world that began it."""

    key: str
    step: int
    generation: int
    sha256: str


class Spill:
    """One rank's files, in the order in which they came."""

    def __init__(self, work: Path, rank: int, files: ObjectStore | None = None) -> None:
        """`files`: how that folder is written, where it is another machine's."""
        self.folder = folder_of(work, rank)
        self._files = files or FolderStore(self.folder)
        self.waiting: list[Spilled] = []

    def clear(self) -> None:
        """Drop what a killed process in this place has left: its rows are in the journal, its checkpoints failed with it."""
        for item in list(self._files.list()):
            self._files.delete(item.key)

    def add(self, key: str, data: Content, step: int, generation: int = 0) -> None:
        """Keep a file here. Raises ServiceUnreachable where the disk is full, and leaves nothing then."""
        self._files.put(key, data)
        self.waiting = [one for one in self.waiting if one.key != key] + [
            Spilled(key, step, generation, sha256(data))
        ]

    def read(self, one: Spilled) -> bytes:
        """A file that waits. Raises CorruptArtefact."""
        return get_verified(self._files, one.key, one.sha256)

    def done(self, one: Spilled) -> None:
        """Forget a file."""
        self.waiting.remove(one)
        self._files.delete(one.key)

    def drop(self, steps: set[int]) -> None:
        """Forget the checkpoints of these steps. The rows recorded until them stay."""
        for one in [
            one for one in self.waiting if one.step in steps and one.key.startswith("checkpoints/")
        ]:
            self.done(one)


def recover(store: ObjectStore, work: Path, policy: CheckpointPolicy) -> list[int]:
    """Bring what an earlier launch spilled on this machine into the store; the steps of those checkpoints.

    Only if nobody has trained the run since: what another launch went on from is not overtaken. Raises ServiceUnreachable.
    """
    folders = [FolderStore(path) for path in sorted((work / "spill").glob("rank-*"))]
    found = [(item.size, item.key, folder) for folder in folders for item in folder.list()]
    # Of rows that two had kept, the longer: who wrote for a lost rank had what that one wrote last, too.
    where = {key: folder for _, key, folder in sorted(found, key=lambda one: one[0])}
    states = [_read(where[key], key) for key in sorted(where) if key.endswith(f"/{STATE}")]
    fence = Fence(store, read_index(store)[0].owner)
    wanted = [state for state in states if state is not None and state.owner == fence.owner]
    saved = []
    if wanted:
        for key in [key for key in where if key.startswith("metrics/")]:
            store.create(key, where[key].get(key))  # what is there was written later
    for state in wanted:
        try:
            for name, digest in state.sha256.items():
                key = f"{folder_name(state.step)}/{name}"
                if key in where:
                    fence.put(key, get_verified(where[key], key, digest), digest)
                elif not any(item.key == key for item in store.list(key)):
                    raise CorruptArtefact(f"{key}: missing here and in the store")
        except CorruptArtefact as error:
            _log.warning(
                "the checkpoint of step %d, kept on this machine, is passed over: %s",
                state.step,
                error,
            )
            continue
        write_state(fence, state, policy)
        saved.append(state.step)
    if len(wanted) < len(states):
        _log.warning(
            "%d checkpoints kept on this machine are passed over: the run went on elsewhere",
            len(states) - len(wanted),
        )
    shutil.rmtree(work / "spill", ignore_errors=True)
    return saved


def _read(folder: FolderStore, key: str) -> State | None:
    try:
        return parsed(folder.get(key))
    except (CorruptArtefact, json.JSONDecodeError) as error:
        _log.warning("%s/%s: %s", folder.uri, key, error)
        return None
