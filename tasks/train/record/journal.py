"""Rows of steps on the launcher's machine until the store has them: one line of JSON a step.

<work folder>/journal/steps-rank0-00000120.jsonl is a segment of rank 0 that begins with step 120. A
rank begins a new segment at each checkpoint, so a segment becomes one part of the run's metrics,
under the same name. The launcher uploads the segments that end before a checkpoint, then the
checkpoint, and deletes them when that is committed. A killed process leaves its segments; only the
last line may be incomplete.
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
    """The segment of a rank whose first row is of step `begins`."""
    return work / FOLDER / f"steps-rank{rank}-{begins:08d}.jsonl"


class StepJournal:
    """The journal of one rank, written by the rank itself."""

    def __init__(self, work: Path, rank: int) -> None:
        self._work, self._rank = work, rank
        self._begins: int | None = None
        self._file: IO[str] | None = None

    def add(self, **row: Any) -> None:
        """Append the row of a step."""
        if self._begins is None:
            self._begins = int(row["step"])
        self._append(self._begins, json.dumps(row) + "\n")

    def cut(self) -> None:
        """Close the segment: the next row begins another."""
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
        """The segments that begin before a step: the name of each one's part, and its rows."""
        found = [
            (path.stem, rows_in(path)) for _, begins, path in self._segments() if begins < before
        ]
        return [(name, rows) for name, rows in found if rows]

    def drop(self, before: int) -> None:
        """Delete the segments that begin before a step: the store has them."""
        for _, begins, path in self._segments():
            if begins < before:
                path.unlink()

    def clear(self) -> None:
        """Delete all segments: their steps are done again."""
        shutil.rmtree(self._work / FOLDER, ignore_errors=True)

    def align(
        self, step: int, last: Row | None, devices: list[str], committed: Callable[[], int]
    ) -> None:
        """Make every journal end with the last finished step; ranks go on with `step`.

        A rank that was lost may lack the last step, or be ahead of the others. Rows of steps that
        are done again go. `last` describes the last step as every member saw it: `row`, `parts`
        (batch sizes by rank) and `members`; a member without a row of it gets one without figures.
        Rows before step `committed()` are in the store.
        """
        newest = dict.fromkeys(range(len(devices)), -1)
        for rank, _, path in self._segments():
            rows = rows_in(path)
            kept = [row for row in rows if row["step"] < step]
            if len(kept) < len(rows) or not rows:
                _write(path, kept)
            newest[rank] = max([newest[rank], *(row["step"] for row in kept)])
        # After the segments were listed: a segment is deleted when its checkpoint has counted.
        stored = committed() - 1
        for rank in last["members"] if last is not None else []:
            assert last is not None
            if max(newest[rank], stored) < last["row"]["step"]:
                own = {"rank": rank, "device": devices[rank], "batch_size": last["parts"][rank]}
                row = last["row"] | own | NOT_MEASURED
                _write(segment_path(self._work, rank, row["step"]), [row])


def _write(path: Path, rows: list[Row]) -> None:
    """A segment of these rows and no others, all at once."""
    if not rows:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.replace(path)


def rows_in(path: Path) -> list[Row]:
    """The rows of a segment, without a last, incomplete line; none if it was deleted meanwhile."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]
