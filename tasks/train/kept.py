"""The newest checkpoints, kept on this machine from the step that they are of: what a killed process, or the launcher, leaves.

<work folder>/kept/rank-N/{0,1}/: a rank's copies of the tensors lie in files that are mapped into its memory, so that they
outlive it, and mark.json says what of. A mark is written when its files are whole and goes before they are changed. Nothing is
forced to the disk, so what is from before the machine's last start does not count. `into_spill` makes a checkpoint
of them that `spill.recover` brings into the store. GPUs' copies lie in memory that the driver pins, and are not kept.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.tasks.folder_store import FolderStore
from trainwright.tasks.objects import sha256
from trainwright.tasks.train.checkpoint import parsed
from trainwright.tasks.train.fence import STATE, folder_name
from trainwright.tasks.train.metrics import Row, encode
from trainwright.tasks.train.spill import folder_of

if TYPE_CHECKING:
    from trainwright.tasks.train.checkpoint_writer import PendingCheckpoint

FOLDER, MARK = "kept", "mark.json"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass
class _Part:
    """What a mark says of the files beside it."""

    place: Path
    rank: int
    generation: int
    files: list[str]
    rows: dict[str, list[Row]]
    state: dict[str, Any]
    boot: str


def places(work: Path, rank: int) -> tuple[Path, Path]:
    """Where a rank keeps its two copies; what a killed process has left there is gone."""
    folder = work / FOLDER / f"rank-{rank}"
    shutil.rmtree(folder, ignore_errors=True)
    return folder / "0", folder / "1"


def unmark(place: Path | None) -> None:
    """What lies there is no copy of anything from now on."""
    if place is not None:
        (place / MARK).unlink(missing_ok=True)


def mark(place: Path, rank: int, job: PendingCheckpoint, rows: dict[str, list[Row]]) -> None:
    """The files there are this rank's part of a checkpoint; `rows`, by key, are those that the store lacks until then.

    Where the disk is full nothing is marked.
    """
    said = _Part(place, rank, job.generation, list(job.files), rows, asdict(job.state), _BOOT.read_text())
    text, part = (
        json.dumps({name: value for name, value in vars(said).items() if name != "place"}),
        place / f"{MARK}.part",
    )
    try:
        place.mkdir(parents=True, exist_ok=True)
        part.write_text(text)
        part.replace(place / MARK)
    except OSError:
        part.unlink(missing_ok=True)


def into_spill(work: Path, newer_than: int) -> int | None:
    """Move the newest checkpoint that all its ranks have kept to where `spill.recover` finds it; its step.

    None where there is none after the step `newer_than`.
    """
    found: dict[tuple[int, int, str], dict[int, _Part]] = defaultdict(dict)
    for path in (work / FOLDER).glob(f"rank-*/*/{MARK}"):
        try:
            part = _Part(path.parent, **json.loads(path.read_text()))
        except (ValueError, TypeError):  # cut short, as when the machine lost power, or of other software
            continue
        if part.boot == _BOOT.read_text():
            found[part.state["step"], part.generation, part.state["owner"]][part.rank] = part
    newer = {key: parts for key, parts in found.items() if key[0] > newer_than}
    whole = [key for key, parts in newer.items() if parts.keys() >= set(next(iter(parts.values())).state["members"])]
    if whole:
        _spill(work, newer[max(whole)])
    shutil.rmtree(work / FOLDER, ignore_errors=True)
    return max(whole)[0] if whole else None


def _spill(work: Path, parts: dict[int, _Part]) -> None:
    """Each rank's rows and files, and the state, which names the files, last."""
    first = min(parts)
    state = parsed(json.dumps(parts[first].state).encode())
    for rank, part in parts.items():
        spilled = FolderStore(folder_of(work, rank))
        for key, rows in part.rows.items():
            spilled.put(key, encode(rows))
        for name in part.files:
            data = (part.place / name).read_bytes()
            state.sha256[name], state.size_bytes[name] = sha256(data), len(data)
            target = spilled.root / folder_name(state.step) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (part.place / name).replace(target)
    FolderStore(folder_of(work, first)).put(f"{folder_name(state.step)}/{STATE}", state.encoded())
