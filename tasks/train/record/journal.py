"""The step journal: each rank's rows of steps on the launcher's machine, until they are uploaded.

<work folder>/journal/steps-rank0-00000120.jsonl is a segment: rank 0's rows from step 120 on, one
line of JSON per step. A rank starts a new segment at each checkpoint. A segment becomes one part
of the run's metrics with the same name. The launcher uploads the segments that end before a
checkpoint, then the checkpoint, and deletes the segments once the checkpoint is committed. If a
process is killed, its segments remain; only the last line may be incomplete.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from trainwright.tasks.train.record.metrics import NOT_MEASURED, Row

FOLDER = "journal"
_NAME = re.compile(r"^steps-rank(\d+)-(\d{8,})\.jsonl$")


def segment_path(work: Path, rank: int, begins: int) -> Path:
    """The path of a rank's segment whose first row is step `begins`."""
    return work / FOLDER / f"steps-rank{rank}-{begins:08d}.jsonl"


class StepJournal:
    """The journal of one rank, written by the rank itself."""

    def __init__(self, work: Path, rank: int) -> None:
        self._work, self._rank = work, rank
        self._begins: int | None = None
        self._file: IO[str] | None = None

    def add(self, **row: Any) -> None:
        """Append a step's row."""
        if self._begins is None:
            self._begins = int(row["step"])
        self._append(self._begins, json.dumps(row) + "\n")

    def cut(self) -> None:
        """Close the segment; the next row starts another."""
        self._begins = None
        if self._file is not None:
            self._file.close()
        self._file = None

    def _append(self, begins: int, text: str) -> None:
        if self._file is None:
            path = segment_path(self._work, self._rank, begins)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a")
        self._file.write(text)
        self._file.flush()


class Journals:
    """The journals of all ranks, as the launcher uses them."""

    def __init__(self, work: Path) -> None:
        self._work = work

    def _segments(self) -> Iterator[tuple[int, int, Path]]:
        for path in sorted((self._work / FOLDER).glob("steps-rank*.jsonl")):
            if match := _NAME.match(path.name):
                yield int(match[1]), int(match[2]), path

    def parts(self, before: int) -> list[tuple[str, list[Row]]]:
        """Name and rows of each segment that begins before a step."""
        found = [
            (path.stem, rows_in(path)) for _, begins, path in self._segments() if begins < before
        ]
        return [(name, rows) for name, rows in found if rows]

    def drop(self, before: int) -> None:
        """Delete the segments that begin before a step, after they were uploaded."""
        for _, begins, path in self._segments():
            if begins < before:
                path.unlink()

    def clear(self) -> None:
        """Delete all segments, because their steps will be repeated."""
        shutil.rmtree(self._work / FOLDER, ignore_errors=True)

    def align(
        self, step: int, last: Row | None, devices: list[str], committed: Callable[[], int]
    ) -> None:
        """Make every journal end with the last finished step; ranks continue with `step`.

        A lost rank's journal may lack the last step or be ahead of the others. Rows from `step` on
        are deleted, since those steps will be repeated. `last` describes the last finished step:
        `row`, `parts` (batch sizes by rank) and `members`. A member without a row for it gets one
        without measurements. Rows before step `committed()` are in the store.
        """
        newest = dict.fromkeys(range(len(devices)), -1)
        for rank, _, path in self._segments():
            rows = rows_in(path)
            kept = [row for row in rows if row["step"] < step]
            if len(kept) < len(rows) or not rows:
                _write(path, kept)
            newest[rank] = max([newest[rank], *(row["step"] for row in kept)])
        # Read after the segments were listed: a commit in between deletes segments.
        stored = committed() - 1
        for rank in last["members"] if last is not None else []:
            assert last is not None
            if max(newest[rank], stored) < last["row"]["step"]:
                own = {"rank": rank, "device": devices[rank], "batch_size": last["parts"][rank]}
                row = last["row"] | own | NOT_MEASURED
                _write(segment_path(self._work, rank, row["step"]), [row])


def _write(path: Path, rows: list[Row]) -> None:
    """Replace a segment by these rows, atomically; delete it if there are none."""
    if not rows:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.replace(path)


def rows_in(path: Path) -> list[Row]:
    """The rows of a segment without an incomplete last line; none if it was just deleted."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]
