"""Staging: checkpoints on the launcher's machine that the store does not have yet. Loads no torch.

    <work folder>/staging/<launch>/step-00000120-2/…     files of the ranks' parts in shared memory
    <work folder>/spill/<launch>/step-00000120-2/…       or on disk
    <work folder>/spill/<launch>/step-00000120-2.json    the mark of a checkpoint that is staged

`staging` links into the machine's shared memory (tmpfs), if there is one, which outlives processes.
Parts lie on disk if shared memory has no room, or while the store is away. A checkpoint is staged,
and counts for the next launch, when the launcher has marked it, after all ranks have written their
parts. A mark counts until the machine restarts, or for good once the files are synced to the disk.
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
from trainwright.tasks.train.checkpoint.files import FILE, State, parsed

STAGING, SPILL = "staging", "spill"
RESUME = "resume"
"""The folder, in the work folder, of the checkpoint that ranks begin with."""
SHARED_MEMORY = Path("/dev/shm")
LEFT_FREE_BYTES = 1 << 30
"""What parts leave of a disk or of shared memory."""
_FREE = "free"
"""files of earlier parts in shared memory: memory that is used again need not be cleared"""
_PREFIX, _ABANDONED_S = "trainwright-staging-", 86400.0
_OF = "of"
"""says, in shared memory, which work folder leads there: `<mount namespace> <path>`"""
_log = logging.getLogger(__name__)


def part_name(generation: int, step: int) -> str:
    """The folder of a checkpoint that a worker group has begun."""
    return f"step-{step:08d}-{generation}"


class Place:
    """Where one launch stages checkpoints."""

    def __init__(self, work: Path, launch: str) -> None:
        self.work, self.launch = work, launch
        self._folders = {place: work / place / launch for place in (STAGING, SPILL)}

    @property
    def disk(self) -> Path:
        """Its folder on disk."""
        return self._folders[SPILL]

    def create(self, name: str, file: str, size: int, *, spill: bool) -> BinaryIO:
        """Open a file of a part to be written; on disk with `spill`, else in shared memory.

        Where there is no room, the other one. Raises OSError if neither has any.
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
        raise OSError(errno.ENOSPC, f"{size} bytes have no room in {SHARED_MEMORY} and {self.disk}")

    def remove(self, name: str, *, again: bool) -> None:
        """The checkpoint is in the store, or of no use any more.

        Its files in shared memory are used `again`, unless a rank may still be writing them.
        """
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (self.disk / f"{name}.json").unlink()
        with contextlib.suppress(OSError):
            files = list((self._folders[STAGING] / name).iterdir()) if again else []
            free = self._folders[STAGING] / _FREE
            if files:  # those of another number of ranks are of no use
                shutil.rmtree(free, ignore_errors=True)
                free.mkdir()
            for file in files:
                file.replace(free / file.name)
        for folder in self._folders.values():
            shutil.rmtree(folder / name, ignore_errors=True)

    def stage(self, name: str, state: State, paths: list[str]) -> Staged:
        """Mark the checkpoint whose parts lie in these files. A full disk takes no mark."""
        one = Staged(self, name, state, {Path(path).name: Path(path) for path in paths})
        one.mark(boot=_boot())
        return one

    def found(self) -> list[Staged]:
        """The checkpoints that are marked, by step."""
        by_step: dict[int, Staged] = {}
        for mark in sorted(self.disk.glob("step-*.json")):
            try:
                said = json.loads(mark.read_text())
                if said["boot"] not in (None, _boot()):
                    raise ValueError("the machine was restarted since")
                paths = {Path(path).name: self.work / path for path in said["paths"]}
                if missing := [path for path in paths.values() if not path.is_file()]:
                    raise ValueError(f"{missing[0]} is missing")
                if strange := [name for name in paths if not FILE.match(name)]:
                    raise ValueError(f"it names a file {strange[0]!r}")
                state = parsed(json.dumps(said["state"]).encode())
                by_step[state.step] = Staged(self, mark.stem, state, paths)
            except (OSError, ValueError, TypeError, KeyError, CorruptArtefact) as error:
                _log.warning("%s is passed over: %s", mark, error)
        return [by_step[step] for step in sorted(by_step)]

    def forget(self) -> None:
        """Remove all that this launch has staged, and leave no empty place."""
        for folder in self._folders.values():
            shutil.rmtree(folder, ignore_errors=True)
        if not any(
            path.is_dir() for one in self._folders.values() for path in one.parent.glob("*")
        ):
            drop(self.work)


class Staged:
    """A checkpoint that is whole on this machine."""

    def __init__(self, place: Place, name: str, state: State, paths: Mapping[str, Path]) -> None:
        self.state, self.is_synced = state, False
        self._place, self._name, self._paths = place, name, paths

    @property
    def step(self) -> int:
        """How many steps were finished."""
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
        """Make it count for the next launch; `boot`: of this machine, None for good."""
        mark = self._place.disk / f"{self._name}.json"
        inside = [os.path.relpath(path, self._place.work) for path in self._paths.values()]
        said = {"state": vars(self.state), "paths": inside, "boot": boot}
        try:
            mark.parent.mkdir(parents=True, exist_ok=True)
            with mark.with_suffix(".part").open("w") as file:
                file.write(json.dumps(said))
                file.flush()
                if boot is None:
                    os.fsync(file.fileno())
            mark.with_suffix(".part").replace(mark)
        except OSError as error:
            _log.warning("step %d can't be kept for another launch: %s", self.step, error)
            with contextlib.suppress(OSError):
                mark.with_suffix(".part").unlink()

    def sync(self) -> None:
        """Make it outlive a restart of the machine, as far as it lies on disk."""
        self.is_synced = True
        try:
            for name, data in self.files():
                self.state.add_file(name, data)
                with self._paths[name].open("rb") as file:
                    os.fsync(file.fileno())
        except OSError as error:
            _log.warning("step %d can't be synced to disk: %s", self.step, error)
        else:
            self.mark(boot=None)


def _has_room(folder: Path, size: int) -> bool:
    """Whether so many bytes fit into a folder, or to where it will be."""
    there = next((one for one in (folder, *folder.parents) if one.exists()), None)
    return there is not None and shutil.disk_usage(there).free >= size + LEFT_FREE_BYTES


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# -- the place of all launches in a work folder ----------------------------------------------------


def prepare(work: Path) -> None:
    """Make a new place for staging, in shared memory if possible; remove abandoned ones there."""
    drop(work)
    with contextlib.suppress(OSError):
        for folder in SHARED_MEMORY.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                if _is_abandoned(folder):
                    shutil.rmtree(folder, ignore_errors=True)
        work.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=SHARED_MEMORY))
        (work / STAGING).symlink_to(folder)
        # Last: if this file exists, so does the link.
        (folder / _OF).write_bytes(_namespace() + b" " + os.fsencode(work.absolute()))


def _is_abandoned(folder: Path) -> bool:
    """Whether nobody can come back for it: its work folder is gone, or links to another one.

    Or nothing has changed there for a day. A work folder whose parent is missing too may lie on a
    disk that will be mounted again.
    """
    # Without the file it was begun just now; a foreign file may hold no path.
    with contextlib.suppress(FileNotFoundError, ValueError):
        namespace, _, work = (folder / _OF).read_bytes().partition(b" ")
        link = Path(os.fsdecode(work)) / STAGING
        ours = namespace == _namespace() and link.parent.parent.is_dir()
        if ours and not (link.is_symlink() and link.readlink() == folder):
            return True
    newest = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
    return time.time() - newest > _ABANDONED_S


def _namespace() -> bytes:
    """Which files a path means here: containers may share their memory and not their files."""
    return str(os.stat("/proc/self/ns/mnt").st_ino).encode()


def drop(work: Path) -> None:
    """Remove all that is staged, by whichever launch."""
    folder = work / STAGING
    if folder.is_symlink():
        if (there := folder.readlink()).parent == SHARED_MEMORY and there.name.startswith(_PREFIX):
            shutil.rmtree(there, ignore_errors=True)
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(work / SPILL, ignore_errors=True)
