"""What is recorded while training: rows by step and rank, by epoch, of split events; as parquet.

metrics/steps-rank0-00000120.parquet is a part of the rows of rank 0 that begins with step 120;
epochs and split events have a part for each step that has any. Parts are written before the
checkpoint that follows them, so a run that goes on from a checkpoint has every row up to it, once:
parts that begin later are dropped. Whoever writes a part again writes the same rows.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING, Any

from trainwright.tasks.storage.objects import ObjectStore

if TYPE_CHECKING:
    from trainwright.tasks.train.checkpoint.files import State

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
"""The figures of a step in the row of a rank that was lost before it could record them."""


def part_key(name: str) -> str:
    """The key of a part: of `epochs-00000023`, say."""
    return f"metrics/{name}.parquet"


def common_parts(state: State, since: int) -> list[tuple[str, list[Row]]]:
    """Epochs and split events of a checkpoint from a step on, by the names of their parts."""
    found = []
    for kind, rows in (("epochs", state.epochs), ("splits", state.events)):
        recent = [row for row in rows if row["step"] >= since]
        for step, own in groupby(recent, key=lambda row: int(row["step"])):
            found.append((f"{kind}-{step:08d}", list(own)))
    return found


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
    """Load what the first part needs: pyarrow, which looks for pandas at its first table."""
    encode([{"step": 0}])


def read_rows(store: ObjectStore, kind: str) -> list[Row]:
    """All rows of a kind, in the order of their parts."""
    import io

    import pyarrow.parquet as pq

    rows: list[Row] = []
    for item in store.list(f"metrics/{kind}-"):
        rows += pq.read_table(io.BytesIO(store.get(item.key))).to_pylist()
    return rows


def read_steps(store: ObjectStore) -> dict[int, list[Row]]:
    """The rows of steps by rank, also of ranks that only an earlier plan had."""
    found = (
        re.match(r"metrics/steps-rank(\d+)-", item.key) for item in store.list("metrics/steps-rank")
    )
    return {
        rank: read_rows(store, f"steps-rank{rank}")
        for rank in sorted({int(one[1]) for one in found if one})
    }


def drop_from(store: ObjectStore, step: int) -> None:
    """Delete the parts that begin at a step or later: they belong to work that is done again."""
    for item in list(store.list("metrics/")):
        match = _PART.match(item.key)
        if match and int(match.group(1)) >= step:
            store.delete(item.key)
