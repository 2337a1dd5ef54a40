"""Staging: checkpoints on the launcher's machine before they are uploaded. Loads no torch.

    <work folder>/staging/<launch>/step-00000120-2/…     files of the ranks' parts in shared memory
    <work folder>/spill/<launch>/step-00000120-2/…       or on disk
    <work folder>/spill/<launch>/step-00000120-2.json    the mark of a staged checkpoint

`staging` is a link into the machine's shared memory (tmpfs), if it has one, which outlives
processes. Parts are written to disk if shared memory has no room, or while the store is
unreachable. After all ranks have written their parts, the launcher marks the checkpoint: it is
staged, and the next launch can upload it. A mark is valid until the machine restarts, and for good
once the files are synced to disk.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from trainwright.tasks.errors import CorruptArtefact
from trainwright.tasks.storage.objects import Content
from trainwright.tasks.train.checkpoint.files import FILE, CheckpointState, parsed

STAGING, SPILL = "staging", "spill"
RESUME = "resume"
"""The folder, in the work folder, of the checkpoint from which ranks start."""
SHARED_MEMORY = Path("/dev/shm")
LEFT_FREE_BYTES = 1 << 30
"""The space that parts must leave free on disk and in shared memory."""
_FREE = "free"
"""Folder of earlier parts' files for reuse, so that the kernel need not clear memory again."""
_PREFIX, _ABANDONED_S = "trainwright-staging-", 86400.0
_OF = "of"
"""A file in shared memory that names the work folder it belongs to: `<mount namespace> <path>`."""
_log = logging.getLogger(__name__)


def part_name(generation: int, step: int) -> str:
    """The folder name of a checkpoint that this worker group has begun."""
    return f"step-{step:08d}-{generation}"


class StagingArea:
    """The staging folders of one launch."""

    def __init__(self, work: Path, launch: str) -> None:
        self.work, self.launch = work, launch
        self._folders = {place: work / place / launch for place in (STAGING, SPILL)}

    @property
    def disk(self) -> Path:
        """The folder on disk."""
        return self._folders[SPILL]

    def create(self, name: str, file: str, size: int, *, spill: bool) -> BinaryIO:
        """Open a part's file for writing, on disk with `spill`, else in shared memory.

        If that has no room, uses the other one. Raises OSError if neither has room.
        """
        for place in (SPILL, STAGING) if spill else (STAGING, SPILL):
            path = self._folders[place] / name / file
            if _has_room(path.parent, size):
                path.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    (self._folders[place] / _FREE / file).replace(path)
                opened = open(str(path), "r+b" if path.exists() else "w+b")  # noqa: SIM115 - the caller closes it
                opened.truncate(size)
                return opened
        raise OSError(errno.ENOSPC, f"no room for {size} bytes in {SHARED_MEMORY} or {self.disk}")

    def remove(self, name: str, *, again: bool) -> None:
        """Remove a checkpoint that is uploaded or dropped.

        `again`: keep its files in shared memory for reuse; not while a rank may still write them.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (self.disk / f"{name}.json").unlink()
        with contextlib.suppress(OSError):
            files = list((self._folders[STAGING] / name).iterdir()) if again else []
            free = self._folders[STAGING] / _FREE
            if files:  # drop earlier ones: with another number of ranks, their names differ
                shutil.rmtree(free, ignore_errors=True)
                free.mkdir()
            for file in files:
                file.replace(free / file.name)
        for folder in self._folders.values():
            shutil.rmtree(folder / name, ignore_errors=True)

    def stage(self, name: str, state: CheckpointState, paths: list[str]) -> Staged:
        """Mark the checkpoint with these files as staged. On a full disk, it gets no mark."""
        one = Staged(self, name, state, {Path(path).name: Path(path) for path in paths})
        one.mark(boot=_boot())
        return one

    def found(self) -> list[Staged]:
        """The marked checkpoints that are intact, by step."""
        by_step: dict[int, Staged] = {}
        for mark in sorted(self.disk.glob("step-*.json")):
            try:
                found = json.loads(mark.read_text())
                if found["boot"] not in (None, _boot()):
                    raise ValueError("the machine has restarted since then")
                paths = {Path(path).name: self.work / path for path in found["paths"]}
                if missing := [path for path in paths.values() if not path.is_file()]:
                    raise ValueError(f"{missing[0]} is missing")
                if unknown := [name for name in paths if not FILE.match(name)]:
                    raise ValueError(f"it lists a file {unknown[0]!r}, which is not a tensor file")
                state = parsed(json.dumps(found["state"]).encode())
                by_step[state.step] = Staged(self, mark.stem, state, paths)
            except (OSError, ValueError, TypeError, KeyError, CorruptArtefact) as error:
                _log.warning("skips %s: %s", mark, error)
        return [by_step[step] for step in sorted(by_step)]

    def forget(self) -> None:
        """Remove all checkpoints of this launch, and the staging folders if they are empty then."""
        for folder in self._folders.values():
            shutil.rmtree(folder, ignore_errors=True)
        if not any(
            path.is_dir() for one in self._folders.values() for path in one.parent.glob("*")
        ):
            drop(self.work)


class Staged:
    """A complete checkpoint in the staging folder."""

    def __init__(
        self, area: StagingArea, name: str, state: CheckpointState, paths: Mapping[str, Path]
    ) -> None:
        self.state, self.is_synced = state, False
        self._area, self._name, self._paths = area, name, paths

    @property
    def step(self) -> int:
        """The number of finished steps."""
        return self.state.step

    @property
    def largest_bytes(self) -> int:
        """The size of its largest file."""
        sizes = (path.stat().st_size for path in self._paths.values() if path.exists())
        return max(sizes, default=0)

    def files(self) -> Iterator[tuple[str, Content]]:
        """Name and bytes of each file. Raises OSError."""
        for name, path in self._paths.items():
            with path.open("rb") as file:
                yield name, memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def mark(self, boot: str | None) -> None:
        """Mark it for the next launch, valid for one boot of this machine, or for good (None)."""
        mark = self._area.disk / f"{self._name}.json"
        inside = [os.path.relpath(path, self._area.work) for path in self._paths.values()]
        content = {"state": vars(self.state), "paths": inside, "boot": boot}
        try:
            mark.parent.mkdir(parents=True, exist_ok=True)
            with mark.with_suffix(".part").open("w") as file:
                file.write(json.dumps(content))
                file.flush()
                if boot is None:
                    os.fsync(file.fileno())
            mark.with_suffix(".part").replace(mark)
        except OSError as error:
            _log.warning("can't mark step %d for the next launch: %s", self.step, error)
            with contextlib.suppress(OSError):
                mark.with_suffix(".part").unlink()

    def sync(self) -> None:
        """Sync its files, so that those on disk survive a restart of the machine."""
        self.is_synced = True
        try:
            for name, data in self.files():
                self.state.add_file(name, data)
                with self._paths[name].open("rb") as file:
                    os.fsync(file.fileno())
        except OSError as error:
            _log.warning("can't sync step %d to disk: %s", self.step, error)
        else:
            self.mark(boot=None)


def _has_room(folder: Path, size: int) -> bool:
    """Whether `size` bytes fit into a folder, which may not exist yet."""
    there = next((one for one in (folder, *folder.parents) if one.exists()), None)
    return there is not None and shutil.disk_usage(there).free >= size + LEFT_FREE_BYTES


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# -- the staging folder of all launches ------------------------------------------------------------


def prepare(work: Path) -> None:
    """Create the staging folder, in shared memory if possible; remove abandoned ones there."""
    drop(work)
    with contextlib.suppress(OSError):
        for folder in SHARED_MEMORY.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                if _is_abandoned(folder):
                    shutil.rmtree(folder, ignore_errors=True)
        work.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=SHARED_MEMORY))
        (work / STAGING).symlink_to(folder)
        # Written last: if this file exists, so does the link.
        (folder / _OF).write_bytes(_namespace() + b" " + os.fsencode(work.absolute()))


def _is_abandoned(folder: Path) -> bool:
    """Whether no launch can need this folder in shared memory any more.

    That is if its work folder is gone or links to another folder, or if nothing in it has changed
    for a day. If the work folder's parent is missing too, it may be on a disk that is currently
    not mounted.
    """
    # The file is missing while the folder is being created; another program's may hold no path.
    with contextlib.suppress(FileNotFoundError, ValueError):
        namespace, _, work = (folder / _OF).read_bytes().partition(b" ")
        link = Path(os.fsdecode(work)) / STAGING
        ours = namespace == _namespace() and link.parent.parent.is_dir()
        if ours and not (link.is_symlink() and link.readlink() == folder):
            return True
    newest = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    return time.time() - newest > _ABANDONED_S


def _namespace() -> bytes:
    """The mount namespace. Containers may share memory without sharing files."""
    return str(os.stat("/proc/self/ns/mnt").st_ino).encode()


def drop(work: Path) -> None:
    """Remove the staged checkpoints of all launches."""
    folder = work / STAGING
    if folder.is_symlink():
        if (there := folder.readlink()).parent == SHARED_MEMORY and there.name.startswith(_PREFIX):
            shutil.rmtree(there, ignore_errors=True)
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(work / SPILL, ignore_errors=True)
