"""Reads what a run has recorded so far, also while it is running.

Sources are the parts in the run folder and, on the training machine, rows not uploaded yet. Rows
are keyed by step and rank: after a restart, a repeated step replaces the earlier row.
"""

from __future__ import annotations

import io
import json
import math
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from trainwright.tasks.runs.run import Run
from trainwright.tasks.storage.objects import ObjectInfo
from trainwright.tasks.train.record import events
from trainwright.tasks.train.record.journal import FOLDER as JOURNAL

if TYPE_CHECKING:
    import pyarrow as pa

MOST_ROWS = 2000
_CACHE_BYTES = 64 * 2**20
_GONE_STEPS = 500  # a rank this many steps behind the newest is considered gone
Row = dict[str, Any]


class Parts:
    """Reads parts and caches those whose version (etag) the store reports. Thread-safe."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str, str], pa.Table] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def table(self, run: Run, part: ObjectInfo) -> pa.Table:
        """The rows of a part."""
        import pyarrow.parquet as pq

        key = (run.uri, part.key, part.etag or "")
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        table = pq.read_table(io.BytesIO(run.objects.get(part.key)))
        if part.etag is not None:
            with self._lock:
                if key not in self._kept:
                    self._kept[key] = table
                    self._bytes += table.nbytes
                while self._bytes > _CACHE_BYTES:
                    self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return table


def recorded(
    run: Run, parts: Parts, from_step: int = 0, *, running: bool = True, most: int = MOST_ROWS
) -> dict[str, Any]:
    """Rows from a step on, for charts.

    `rows` holds every `stride`-th step, at most `most` rows; `newest` each rank's last row;
    `epochs` and `splits` are complete. From `next_step` on, rows may still be missing. With
    `running`, rows that are not uploaded yet are included.
    """
    # Read the journals before the parts: rows move from journals to parts.
    waiting = _journals(run) if running else {}
    listed = list(run.objects.list("metrics/"))
    tables = {rank: _since(run, parts, own, from_step) for rank, own in _by_rank(listed).items()}
    newest: dict[int, Row] = {rank: row for rank, table in tables.items() if (row := _last(table))}
    for rank, rows in waiting.items():
        newest[rank] = max(
            [*rows, *([newest[rank]] if rank in newest else [])], key=lambda row: row["step"]
        )
    last = max((row["step"] for row in newest.values()), default=-1)
    stride = 2 ** max(0, math.ceil(math.log2(max(1, (last + 1) * len(newest) / most))))
    found = {
        (row["step"], row["rank"]): row
        for table in tables.values()
        for row in _every(table, from_step, stride)
    }
    for rows in waiting.values():
        found |= {
            (row["step"], row["rank"]): row
            for row in rows
            if row["step"] >= from_step and row["step"] % stride == 0
        }
    behind = min(
        (row["step"] for row in newest.values() if row["step"] > last - _GONE_STEPS), default=-1
    )
    return {
        "rows": [found[key] for key in sorted(found)],
        "newest": [newest[rank] for rank in sorted(newest)],
        "epochs": _ordered(run, parts, listed, "metrics/epochs-"),
        "splits": _ordered(run, parts, listed, "metrics/splits-"),
        "stride": stride,
        "next_step": behind + 1,
    }


def happened(run: Run, *, running: bool = True) -> list[Row]:
    """The run's events, oldest first: the local file's while it runs here, else the folder's."""
    own = run.work_path / events.KEY
    if running and own.exists():
        return events.parse(own.read_bytes())
    try:
        return events.parse(run.objects.get(events.KEY))
    except FileNotFoundError:
        return []


def _by_rank(listed: Iterable[ObjectInfo]) -> dict[int, list[ObjectInfo]]:
    """The parts with rows of steps, by rank, in the order of their first steps."""
    found = dict[int, list[ObjectInfo]]()
    for part in listed:
        name = part.key.removeprefix("metrics/steps-rank")
        rank = name.partition("-")[0]
        if name != part.key and rank.isdigit():
            found.setdefault(int(rank), []).append(part)
    return found


def _since(run: Run, parts: Parts, own: list[ObjectInfo], from_step: int) -> list[pa.Table]:
    """The parts that may hold rows from a step on.

    A part ends where its successor begins; the last one is always included.
    """
    first = [int(part.key.removesuffix(".parquet").rpartition("-")[2]) for part in own]
    wanted = [
        part
        for number, part in enumerate(own)
        if number + 1 == len(own) or first[number + 1] > from_step
    ]
    found = []
    for part in wanted:
        try:
            found.append(parts.table(run, part))
        except FileNotFoundError:  # deleted meanwhile by a restart
            continue
    return found


def _last(tables: list[pa.Table]) -> Row | None:
    return next(
        (
            table.slice(table.num_rows - 1).to_pylist()[0]
            for table in reversed(tables)
            if table.num_rows
        ),
        None,
    )


def _every(tables: list[pa.Table], from_step: int, stride: int) -> Iterable[Row]:
    import pyarrow as pa

    for table in tables:
        steps = table["step"].to_numpy()
        yield from table.filter(pa.array((steps >= from_step) & (steps % stride == 0))).to_pylist()


def _journals(run: Run) -> dict[int, list[Row]]:
    """By rank, the local rows that are not uploaded yet, without an incomplete last line."""
    found = dict[int, list[Row]]()
    for path in sorted((run.work_path / JOURNAL).glob("steps-rank*.jsonl")):
        try:
            text = path.read_text()
        except FileNotFoundError:
            continue
        for line in text.rpartition("\n")[0].splitlines():
            row = json.loads(line)
            found.setdefault(row["rank"], []).append(row)
    return found


def _ordered(run: Run, parts: Parts, listed: Iterable[ObjectInfo], prefix: str) -> list[Row]:
    rows: list[Row] = []
    for part in listed:
        if part.key.startswith(prefix):
            try:
                rows += parts.table(run, part).to_pylist()
            except FileNotFoundError:
                continue
    return sorted(rows, key=lambda row: row["step"])
