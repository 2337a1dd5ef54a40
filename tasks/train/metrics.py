"""What is recorded while training: rows by step and rank, rows by epoch, split events; as parquet parts in the run folder.

A part holds the rows since the last checkpoint and is written before it, so that a run that goes on from a checkpoint has every
row up to it, once: parts that begin later are dropped.
"""

from __future__ import annotations

import re
from typing import Any

from trainwright.tasks.objects import ObjectStore

_PART = re.compile(r"^metrics/(?:steps-rank\d+|epochs|splits)-(\d{8})\.parquet$")


Part = tuple[str, list[dict[str, Any]]]
"""A key and the rows that belong there."""


class Rows:
    """Rows of one kind that wait to be written."""

    def __init__(self, store: ObjectStore, kind: str) -> None:
        self._store, self._kind, self._rows = store, kind, list[dict[str, Any]]()

    def add(self, **row: Any) -> None:
        """Add a row; the first column is `step`."""
        self._rows.append(row)

    def take(self) -> Part | None:
        """What waits as one part, which is the caller's to write; None where nothing waits."""
        if not self._rows:
            return None
        rows, self._rows = self._rows, []
        return f"metrics/{self._kind}-{rows[0]['step']:08d}.parquet", rows

    def write(self) -> None:
        """Write what waits as one part, named by its first step."""
        if part := self.take():
            self._store.put(part[0], encode(part[1]))


def encode(rows: list[dict[str, Any]]) -> bytes:
    """Rows as parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return bytes(sink.getvalue().to_pybytes())


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
