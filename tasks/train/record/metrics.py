"""What is recorded while training: rows by step and rank, rows by epoch, split events; as parquet parts in the run folder.

A part holds rows of steps up to a checkpoint and is written before it, so that a run that goes on from a checkpoint has every
row up to it, once: parts that begin later are dropped. Whoever writes a part anew, because it can't know whether a lost rank
had, writes the same rows under the same key.
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from trainwright.tasks.storage.objects import ObjectStore
from trainwright.tasks.train.record.journal import Journal

_PART = re.compile(r"^metrics/(?:steps-rank\d+|epochs|splits)-(\d{8})\.parquet$")
Row = dict[str, Any]
NOT_MEASURED: Row = {
    "compute_s": 0.0,
    "wait_s": 0.0,
    "communication_s": 0.0,
    "step_time_s": 0.0,
    "samples_per_s": None,
    "memory_bytes": None,
    "energy_j": None,
}
"""A step's row of a rank that was lost before it could say more."""


@dataclass(eq=False)
class Part:
    """Rows on their way to their key."""

    of: Rows
    rows: list[Row]

    @property
    def key(self) -> str:
        """Named by the first step."""
        return f"metrics/{self.of.kind}-{self.rows[0]['step']:08d}.parquet"


class Rows:
    """Rows of one kind that wait to be written; the first column is `step`.

    With a journal, which holds every row until the store does, a process that takes the place of a killed one finds what that
    one recorded. `by_step`: each step's rows are a part, so that any rank may write it.
    """

    def __init__(
        self,
        store: ObjectStore,
        kind: str,
        journal: Journal | None = None,
        *,
        by_step: bool = False,
    ) -> None:
        self._store, self.kind, self._journal, self._by_step = store, kind, journal, by_step
        self._lock = threading.Lock()
        self._fresh = True
        self._rows, self._sealed = list[Row](), list[Row]()
        self._taken = list[Part]()
        self._stored = -1
        self.newest = -1
        """the step of the last row"""

    @property
    def waiting(self) -> list[Row]:
        """All that the store does not have."""
        return [*(row for part in self._taken for row in part.rows), *self._sealed, *self._rows]

    def add(self, **row: Any) -> None:
        """Add a row."""
        with self._lock:
            self._rows.append(row)
            self.newest = row["step"]
            if self._journal is not None:
                self._journal.append(_lines([row]))

    def recover(self) -> bool:
        """Take over what a killed process has noted; its last line may be cut short. Whether this was the time to do so."""
        fresh, self._fresh = self._fresh, False
        noted = self._journal.read() if fresh and self._journal is not None else None
        if noted is not None:
            lines = noted.rpartition("\n")[0].splitlines()
            found = [json.loads(line) for line in lines]
            self._stored = max((row["stored"] for row in found if "stored" in row), default=-1)
            self._rows = [row for row in found if "stored" not in row]
            self.newest = max([self._stored, *(row["step"] for row in self._rows)])
            self._note_anew()
        return fresh

    def seal(self) -> None:
        """What waits stays a part of its own."""
        self._sealed, self._rows = [*self._sealed, *self._rows], []

    def replace(self, rows: list[Row]) -> None:
        """These rows wait, and no others."""
        with self._lock:
            self._rows, self._sealed, self._taken = list(rows), [], []
            self.newest = rows[-1]["step"] if rows else -1
            self._note_anew()

    def forget_from(self, step: int) -> None:
        """Forget the rows of a step and of those after it, which are done again. None of them may be on their way."""
        if self.newest < step:
            return
        with self._lock:
            self._rows = [row for row in self._rows if row["step"] < step]
            self._sealed = [row for row in self._sealed if row["step"] < step]
            self._stored = min(self._stored, step - 1)
            self.newest = max([self._stored, *(row["step"] for row in self.waiting)])
            self._note_anew()

    def take(self) -> list[Part]:
        """What waits, which is the caller's to write, in this order; `stored` hears of each part that is."""
        with self._lock:
            found: list[Part] = []
            for rows in (self._sealed, self._rows):
                groups = (
                    (list(own) for _, own in groupby(rows, lambda row: row["step"]))
                    if self._by_step
                    else [rows]
                )
                found += [Part(self, own) for own in groups if own]
            self._sealed, self._rows = [], []
            self._taken += found
            return found

    def stored(self, part: Part) -> None:
        """The store has this part."""
        with self._lock:
            if part in self._taken:
                self._taken.remove(part)
                self._stored = max(self._stored, part.rows[-1]["step"])
                self._note_anew()

    def detach(self) -> None:
        """From now on leave the journal as it is: it is another process's again."""
        if self._journal is not None:
            self._journal.close()
        self._journal = None

    def write(self) -> None:
        """Write what waits."""
        for part in self.take():
            self._store.put(part.key, encode(part.rows))
            self.stored(part)

    def _note_anew(self) -> None:
        if self._journal is not None:
            self._journal.replace(_lines([{"stored": self._stored}, *self.waiting]))


def _lines(rows: list[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def encode(rows: list[Row]) -> bytes:
    """Rows as parquet; a column without any value is one of numbers."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink, table = pa.BufferOutputStream(), pa.Table.from_pylist(rows)
    kinds = [
        one.with_type(pa.float64()) if pa.types.is_null(one.type) else one for one in table.schema
    ]
    pq.write_table(table.cast(pa.schema(kinds)), sink)
    return bytes(sink.getvalue().to_pybytes())


def warm_up() -> None:
    """Load what writing takes (pyarrow looks for pandas at the first table), so that no step waits for it."""
    encode([{"step": 0}])


def read_rows(store: ObjectStore, kind: str) -> list[dict[str, Any]]:
    """All rows of a kind, in the order of their parts."""
    import io

    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    for item in store.list(f"metrics/{kind}-"):
        rows += pq.read_table(io.BytesIO(store.get(item.key))).to_pylist()
    return rows


def read_steps(store: ObjectStore) -> dict[int, list[dict[str, Any]]]:
    """The rows of steps by rank, of ranks that only an earlier plan had, too."""
    found = (
        re.match(r"metrics/steps-rank(\d+)-", item.key) for item in store.list("metrics/steps-rank")
    )
    return {
        rank: read_rows(store, f"steps-rank{rank}")
        for rank in sorted({int(one[1]) for one in found if one})
    }


def drop_from(store: ObjectStore, step: int) -> None:
    """Drop the parts that begin at a step or later: they belong to work that is done again."""
    for item in list(store.list("metrics/")):
        match = _PART.match(item.key)
        if match and int(match.group(1)) >= step:
            store.delete(item.key)
