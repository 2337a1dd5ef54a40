"""Warns of rows with the same inputs: in training and validation, or with different classes.

Rows are compared by a 64-bit hash of all inputs. All rows are compared.
"""

# ruff: noqa: TID253 -- only loaded by tasks.validate.expectations, in a separate process

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from trainwright.tasks.runs.artefacts.validation import DataWarning
from trainwright.tasks.validate.duckdb_table import ROW, DuckDBDatabase, DuckDBTable, quoted

NAMED = 5
_ROWS_AT_ONCE = 2_000_000
"""Hashes are grouped in parts of about this many rows, which bounds the memory."""

Array = np.ndarray[Any, Any]


def in_table(table: DuckDBTable, target: str, held_out: Array) -> list[DataWarning]:
    """The warnings for a table; those of classes if the table has labels.

    `held_out`: whether each row is in the validation part.
    """
    inputs = ", ".join(quoted(name) for name in table.kinds if name != target)
    table.register("parts", pa.table({"held_out": held_out}))
    table.query(
        f'CREATE TABLE hashes AS SELECT "{ROW}" AS row, hash({inputs}) AS inputs, '
        f"hash({quoted(target)}) AS target, held_out FROM numbered POSITIONAL JOIN parts"
    )
    return _warnings(table, held_out, classes=table.labels is not None)


def in_entries(
    database: DuckDBDatabase,
    entries: Iterable[bytes],
    labels: Array | None,
    held_out: Array,
) -> list[DataWarning]:
    """The same for the bytes of each row of arrays or images; of classes if there are labels."""
    digests = b"".join(hashlib.blake2b(one, digest_size=8).digest() for one in entries)
    rows = len(held_out)
    hashed = {"row": np.arange(rows), "inputs": np.frombuffer(digests, np.uint64)}
    target = np.zeros(rows, np.int64) if labels is None else labels
    database.register("given", pa.table({**hashed, "target": target, "held_out": held_out}))
    database.query("CREATE TABLE hashes AS FROM given")
    return _warnings(database, held_out, classes=labels is not None)


def _warnings(database: DuckDBDatabase, held_out: Array, *, classes: bool) -> list[DataWarning]:
    parts = len(held_out) // _ROWS_AT_ONCE + 1
    database.query(
        "CREATE TABLE repeated (inputs UBIGINT, rows BIGINT, held_out BIGINT, differ BOOLEAN)"
    )
    for part in range(parts):
        database.query(
            "INSERT INTO repeated SELECT inputs, count(*), count(*) FILTER (held_out), "
            f"min(target) <> max(target) FROM hashes WHERE inputs % {parts} = {part} "
            "GROUP BY inputs HAVING count(*) > 1"
        )
    found = []
    across = "repeated.held_out > 0 AND repeated.held_out < repeated.rows"
    ((count,),) = database.query(f"SELECT sum(held_out) FROM repeated WHERE {across}")
    if count:
        total = int(held_out.sum())
        message = (
            f"{count:,} of {total:,} validation rows have the same inputs as a training row; "
            "they make the validation metrics look too good"
        )
        rows = _rows(database, f"{across} AND hashes.held_out")
        found.append(DataWarning(kind="duplicates", message=message, rows=rows, count=count))
    ((count,),) = database.query("SELECT sum(rows) FROM repeated WHERE differ")
    if count and classes:
        message = f"{count:,} rows have the same inputs as a row of another class"
        found.append(
            DataWarning(
                kind="label_noise",
                message=message,
                rows=_rows(database, "differ"),
                count=count,
            )
        )
    return found


def _rows(database: DuckDBDatabase, condition: str) -> list[int]:
    """The first rows whose repeated inputs meet a condition."""
    found = database.query(
        f"SELECT row FROM hashes JOIN repeated USING (inputs) WHERE {condition} "
        f"ORDER BY row LIMIT {NAMED}"
    )
    return [int(row) for (row,) in found]
