"""What is recorded while training: rows by step and rank, rows by epoch, split events; as parquet parts in the run folder.

A part holds the rows since the last checkpoint and is written before it, so that a run that goes on from a checkpoint has every
row up to it, once: parts that begin later are dropped.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import IO, Any

from trainwright.tasks.objects import ObjectStore

JOURNAL = "journal"
_PART = re.compile(r"^metrics/(?:steps-rank\d+|epochs|splits)-(\d{8})\.parquet$")


class Rows:
    """Rows of one kind that wait to be written.

    With a journal, a file of this machine to which each row goes at once, a process that takes the place of a killed one finds
    what that one recorded. Once rows are written, the journal holds the newest step alone.
    """

    def __init__(self, store: ObjectStore, kind: str, journal: Path | None = None) -> None:
        self._store, self._kind, self._journal = store, kind, journal
        self._file: IO[str] | None = None
        self.rows = list[dict[str, Any]]()
        self.newest = -1
        """the last step that was recorded, written or not"""

    def add(self, **row: Any) -> None:
        """Add a row; the first column is `step`."""
        self.rows.append(row)
        self.newest = row["step"]
        self._note([row])

    def _note(self, rows: list[dict[str, Any]]) -> None:
        if self._journal is not None:
            if self._file is None:
                self._journal.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._journal.open("a")
            self._file.write("".join(json.dumps(row) + "\n" for row in rows))
            self._file.flush()

    def recover(self) -> None:
        """Take over what a killed process has noted; its last line may be cut short."""
        if self._journal is None or not self._journal.exists():
            return
        whole = self._journal.read_text().rpartition("\n")[0]
        lines = [json.loads(line) for line in whole.splitlines()]
        self.replace(
            [line for line in lines if "newest" not in line], max(line.get("newest", -1) for line in lines or [{}])
        )

    def replace(self, rows: list[dict[str, Any]], newest: int = -1) -> None:
        """These rows wait, and no others; `newest` was recorded before them."""
        self.rows = rows
        self.newest = rows[-1]["step"] if rows else newest
        if self._journal is not None:
            if self._file is not None:
                self._file.close()
                self._file = None
            self._journal.unlink(missing_ok=True)
            if rows or newest >= 0:
                self._note([*([{"newest": newest}] if newest >= 0 else []), *rows])

    def forget_from(self, step: int) -> None:
        """Forget the rows of a step and of those after it: they are done again."""
        if self.newest >= step:
            self.replace([row for row in self.rows if row["step"] < step], min(self.newest, step - 1))

    def write(self) -> None:
        """Write what waits as one part, named by its first step."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self.rows:
            sink = pa.BufferOutputStream()
            pq.write_table(pa.Table.from_pylist(self.rows), sink)
            key = f"metrics/{self._kind}-{self.rows[0]['step']:08d}.parquet"
            self._store.put(key, sink.getvalue().to_pybytes())
            self.replace([], self.newest)


def warm_up() -> None:
    """Load what writing takes (pyarrow looks for pandas at the first table), so that no step waits for it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([{"step": 0}]), pa.BufferOutputStream())


def journal_of(work: Path, rank: int) -> Path:
    """Where a rank notes its steps until they are written."""
    return work / JOURNAL / f"steps-rank{rank}.jsonl"


def read_rows(store: ObjectStore, kind: str) -> list[dict[str, Any]]:
    """All rows of a kind, in the order of their parts."""
    import io

    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = []
    for item in store.list(f"metrics/{kind}-"):
        rows += pq.read_table(io.BytesIO(store.get(item.key))).to_pylist()
    return rows


def drop_from(store: ObjectStore, step: int) -> None:
    """Drop the parts that begin at a step or later: they belong to work that is done again."""
    for item in list(store.list("metrics/")):
        match = _PART.match(item.key)
        if match and int(match.group(1)) >= step:
            store.delete(item.key)
