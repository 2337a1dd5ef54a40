"""The metrics of a training as parquet: rows by step and rank, by epoch, and of split events.

metrics/steps-rank0-00000120.parquet is a part: rank 0's rows from step 120 on. Epochs and split
events have a part for each step with any. Parts are written before the checkpoint that follows
them. A run that resumes from a checkpoint deletes the parts that begin later, so it has every row
exactly once. Writing a part is idempotent.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING, Any

from trainwright.tasks.storage.objects import ObjectStore

if TYPE_CHECKING:
    from trainwright.tasks.train.checkpoint.files import CheckpointState

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
"""Placeholders in the row of a rank that was lost before it could record its measurements."""


def part_key(name: str) -> str:
    """The key of a part with a name such as `epochs-00000023`."""
    return f"metrics/{name}.parquet"


def common_parts(state: CheckpointState, since: int) -> list[tuple[str, list[Row]]]:
    """A checkpoint's epochs and split events from a step on, each with the name of its part.

    Of an event's layout, only the name. What ranks had averaged stands in result.json alone.
    """
    found = []
    splits = [
        {key: one for key, one in row.items() if key != "averaged"}
        | ({"layout": row["layout"]["name"]} if row.get("layout") else {})
        for row in state.events
    ]
    for kind, rows in (("epochs", state.epochs), ("splits", splits)):
        recent = [row for row in rows if row["step"] >= since]
        for step, own in groupby(recent, key=lambda row: int(row["step"])):
            found.append((f"{kind}-{step:08d}", list(own)))
    return found


def encode(rows: list[Row]) -> bytes:
    """Encode rows as parquet; a column without any value gets the type float64."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink, table = pa.BufferOutputStream(), pa.Table.from_pylist(rows)
    kinds = [
        one.with_type(pa.float64()) if pa.types.is_null(one.type) else one for one in table.schema
    ]
    pq.write_table(table.cast(pa.schema(kinds)), sink)
    return bytes(sink.getvalue().to_pybytes())


def warm_up() -> None:
    """Load pyarrow by writing a first table; it then also looks for pandas, which takes time."""
    encode([{"step": 0}])


def read_rows(store: ObjectStore, kind: str) -> list[Row]:
    """All rows of a kind, such as `epochs`, in the order of their parts."""
    import io

    import pyarrow.parquet as pq

    rows: list[Row] = []
    for item in store.list(f"metrics/{kind}-"):
        rows += pq.read_table(io.BytesIO(store.get(item.key))).to_pylist()
    return rows


def read_steps(store: ObjectStore) -> dict[int, list[Row]]:
    """The rows of steps by rank, including ranks that only an earlier plan had."""
    found = (
        re.match(r"metrics/steps-rank(\d+)-", item.key) for item in store.list("metrics/steps-rank")
    )
    return {
        rank: read_rows(store, f"steps-rank{rank}")
        for rank in sorted({int(one[1]) for one in found if one})
    }


def drop_from(store: ObjectStore, step: int) -> None:
    """Delete the parts that begin at this step or later, because those steps will be repeated."""
    for item in list(store.list("metrics/")):
        match = _PART.match(item.key)
        if match and int(match.group(1)) >= step:
            store.delete(item.key)
