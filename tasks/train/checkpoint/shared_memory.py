"""Checkpoints on their way to the store, kept on this machine: what a killed launcher, or ranks that are all killed, leave.

<work folder>/kept/<claim>/rank-N/{0,1}/: the files of a rank's part, which are mapped into its memory and so outlive it, and
mark.json, which says what of, with their digests. A launch writes below its own claim (`fence`) alone. A mark is written when its
files are hashed, and goes before they are changed; the two places are for what is being written and for what waits. Files that
differ from their mark are no checkpoint. `bring` puts the newest one that is whole into the store. GPUs' copies lie in memory
that the driver pins, and are not kept.

`kept` is a link into the machine's shared memory (tmpfs), where there is one: that outlives processes as a disk does, and the
kernel does not write it back. It holds twice the state, as copies in the ranks' own memory would. The next training drops what
nobody can come back for, since its work folder is gone, and what nobody came back for in a day.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.tasks.errors import CorruptArtefact
from trainwright.tasks.spec.job import CheckpointPolicy
from trainwright.tasks.storage.objects import ObjectStore, sha256
from trainwright.tasks.train.checkpoint.fence import Fence, folder_name, read_index
from trainwright.tasks.train.checkpoint.files import State, list_states, parsed, write_state
from trainwright.tasks.train.record.metrics import Row, encode

FOLDER, MARK = "kept", "mark.json"
_OF = "of"
"""says, in shared memory, which work folder leads there: `<mount namespace> <path>`"""
SHARED_MEMORY = Path("/dev/shm")
_PREFIX, _LEFT_S = "trainwright-kept-", 86400.0
Files = dict[str, dict[str, Any]]
"""`sha256` and `size_bytes` of each file, by its name"""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """One rank's part of a checkpoint, as its mark says."""

    place: Path
    rank: int
    generation: int
    files: Files
    rows: dict[str, list[Row]]
    """by key: those that the store lacked"""
    state: dict[str, Any]


def prepare(work: Path) -> None:
    """A new place for what is kept, in shared memory where the machine has it; what others have left there long ago goes."""
    drop(work)
    with contextlib.suppress(OSError):
        for folder in SHARED_MEMORY.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):
                if _is_left(folder):
                    shutil.rmtree(folder, ignore_errors=True)
        work.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=SHARED_MEMORY))
        (work / FOLDER).symlink_to(folder)
        # Last: where it stands, the link is there.
        (folder / _OF).write_bytes(_namespace() + b" " + os.fsencode(work.absolute()))


def _is_left(folder: Path) -> bool:
    """Whether nobody comes back for it: its work folder is gone or has another by now, or nothing changed there for a day.

    A work folder whose parent is not there either may be on a disk that comes back.
    """
    with contextlib.suppress(
        FileNotFoundError, ValueError
    ):  # begun just now, or an earlier version's; no path
        namespace, _, work = (folder / _OF).read_bytes().partition(b" ")
        link = Path(os.fsdecode(work)) / FOLDER
        ours = namespace == _namespace() and link.parent.parent.is_dir()
        if ours and not (link.is_symlink() and link.readlink() == folder):
            return True
    return (
        time.time() - max(path.stat().st_mtime for path in (folder, *folder.rglob("*"))) > _LEFT_S
    )


def _namespace() -> bytes:
    """What paths mean to this process: containers may share their memory, and not their files."""
    return str(os.stat("/proc/self/ns/mnt").st_ino).encode()


def drop(work: Path) -> None:
    """Nothing is kept any more."""
    folder = work / FOLDER
    if folder.is_symlink():
        if (there := folder.readlink()).parent == SHARED_MEMORY and there.name.startswith(_PREFIX):
            shutil.rmtree(there, ignore_errors=True)
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def places(work: Path, claim: str, rank: int) -> tuple[Path, Path]:
    """Where a rank keeps its two copies; what a killed process has left there is gone."""
    folder = work / FOLDER / claim / f"rank-{rank}"
    shutil.rmtree(folder, ignore_errors=True)
    return folder / "0", folder / "1"


def unmark(place: Path | None) -> None:
    """What lies there is no copy of anything from now on."""
    if place is not None:
        (place / MARK).unlink(missing_ok=True)


def mark(
    place: Path, rank: int, generation: int, state: State, files: Files, rows: dict[str, list[Row]]
) -> None:
    """The files there are this rank's part of a checkpoint. Where the disk does not take the mark, there is none."""
    said = {
        "rank": rank,
        "generation": generation,
        "files": files,
        "rows": rows,
        "state": vars(state),
    }
    part = place / f"{MARK}.part"
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(said))
        part.replace(place / MARK)


def forget(work: Path, claim: str) -> None:
    """What this launch has kept is of no use any more."""
    shutil.rmtree(work / FOLDER / claim, ignore_errors=True)
    drop_empty(work)


def drop_empty(work: Path) -> None:
    """Leave no place behind in which nothing is kept."""
    if not any(
        path.is_dir() for path in (work / FOLDER).glob("*")
    ):  # else another launch's is there
        drop(work)


def bring(store: ObjectStore, work: Path, policy: CheckpointPolicy) -> int | None:
    """Put the newest checkpoint that is here and whole into the store, where that has none as new; its step.

    Only what the launch that may add checkpoints has kept (as in `spill.recover`: in its name, so that nothing overtakes another
    launch). Then nothing is kept any more. Raises ServiceUnreachable, RunHeld; it can be done again then.
    """
    fence = Fence(store, read_index(store)[0].owner)
    newest = max((state.step for state in list_states(store)), default=0)
    brought = None
    for parts in _checkpoints(work / FOLDER / fence.owner) if fence.owner else []:
        step = parts[0].state["step"]
        if step <= newest or brought is not None:
            break
        try:
            _bring(fence, parts, policy)
            brought = step
        except (CorruptArtefact, OSError) as error:
            _log.warning(
                "the checkpoint of step %d, kept on this machine, is passed over: %s", step, error
            )
    drop(work)
    return brought


def _checkpoints(folder: Path) -> list[list[Part]]:
    """The parts of each checkpoint that all its ranks have marked, the first rank's first; the newest checkpoint first."""
    found: dict[tuple[int, int], dict[int, Part]] = defaultdict(dict)
    for path in sorted(folder.glob(f"rank-*/*/{MARK}")):
        try:
            part = Part(path.parent, **json.loads(path.read_text()))
            found[part.state["step"], part.generation][part.rank] = part
        except (OSError, ValueError, TypeError, KeyError):
            continue  # cut short, as when the machine lost power
    whole = {key: parts for key, parts in found.items() if _members(parts) <= parts.keys()}
    return [
        [whole[key][rank] for rank in sorted(_members(whole[key]))]
        for key in sorted(whole, reverse=True)
    ]


def _members(parts: dict[int, Part]) -> set[int]:
    return set(next(iter(parts.values())).state["members"])


def _bring(fence: Fence, parts: list[Part], policy: CheckpointPolicy) -> None:
    files = {name: file for part in parts for name, file in part.files.items()}
    digests = {
        key: {name: file[key] for name, file in files.items()} for key in ("sha256", "size_bytes")
    }
    state = parsed(
        json.dumps(parts[0].state | digests).encode()
    )  # which knows how a file may be named
    for part in parts:
        for name in part.files:
            data = (part.place / name).read_bytes()
            if sha256(data) != state.sha256[name]:
                raise CorruptArtefact(
                    f"{part.place / name}: changed since it was marked (sha256 differs)"
                )
            fence.put(f"{folder_name(state.step)}/{name}", data, state.sha256[name])
    for part in parts:
        for key, rows in part.rows.items():
            fence.store.create(key, encode(rows))  # what is there was written later
    write_state(fence, state, policy)
