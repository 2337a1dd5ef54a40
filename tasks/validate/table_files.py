"""The parquet files of a table: its own, or those that its rows are written to.

Row groups are small enough to be held in memory one by one.
"""

# ruff: noqa: TID253 -- only loaded by tasks.validate.expectations, in a separate process

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet

from trainwright.tasks.data.formats import INDEX, to_arrow
from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.job import DataSpec
from trainwright.tasks.validate.drift.profile import BATCH_ROWS

_GROUP_ROWS = 2 * BATCH_ROWS
_KEPT_FREE = 64 * 2**20


def table_files(spec: DataSpec, folder: Path) -> list[Path] | None:
    """The parquet files of a local table in the order of its rows; None if it is no table.

    The rows of a .csv or .npy file are written to `folder`. Raises BadInput if it can't be read.
    """
    path = Path(spec.uri)
    if spec.uri.startswith("builtin:") or path.suffix.lower() == ".npz":
        return None
    if path.is_dir():
        return None if (path / INDEX).is_file() else sorted(path.rglob("*.parquet"))
    if path.suffix.lower() == ".parquet":
        return [path]
    try:
        schema, batches = _rows(path)
        return [_written(schema, batches, folder / "rows.parquet")] if len(schema) else None
    except (pa.ArrowException, OSError, ValueError, EOFError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadInput(f"data.uri: got {spec.uri}; it can't be read: {reason}") from error


def _rows(path: Path) -> tuple[Any, Iterator[Any]]:
    """The schema and the record batches of a .csv or .npy file."""
    if path.stat().st_size == 0:
        return pa.schema([]), iter(())
    if path.suffix.lower() == ".csv":
        options = csv.ConvertOptions(strings_can_be_null=True)
        reader = csv.open_csv(path, convert_options=options)
        _require_text(reader.schema)
        return reader.schema, iter(reader)
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.dtype.names is None and array.ndim != 2:
        raise ValueError(
            f"an array of shape {array.shape} is not a table; "
            "allowed: rows × columns, or a structured array"
        )
    batches = (
        _batch(array[first : first + BATCH_ROWS]) for first in range(0, len(array), BATCH_ROWS)
    )
    return _batch(array[:0]).schema, batches


def _require_text(schema: Any) -> None:
    for entry in schema:
        if pa.types.is_binary(entry.type):
            raise ValueError(f"the column {entry.name!r} is not UTF-8 text")


def _batch(array: np.ndarray[Any, Any]) -> Any:
    names = array.dtype.names
    columns = {str(name): array[name] for name in names} if names else dict(_numbered(array))
    return pa.record_batch({name: to_arrow(column) for name, column in columns.items()})


def _numbered(array: np.ndarray[Any, Any]) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    return ((str(number), array[:, number]) for number in range(array.shape[1]))


def _written(schema: Any, batches: Iterator[Any], path: Path) -> Path:
    """The file, with the rows of all batches. Raises BadInput if the disk is full."""
    with parquet.ParquetWriter(path, schema) as writer:
        held: list[Any] = []
        for batch in batches:
            held.append(batch)
            if sum(one.num_rows for one in held) >= _GROUP_ROWS:
                _write(writer, held, path)
        _write(writer, held, path)
    return path


def _write(writer: Any, held: list[Any], path: Path) -> None:
    if not held:
        return
    needed = sum(batch.nbytes for batch in held) + _KEPT_FREE
    if (free := shutil.disk_usage(path.parent).free) < needed:
        raise BadInput(
            f"TMPDIR: the check writes the table's rows to {path.parent.parent}, "
            f"which has {free / 2**20:,.0f} MiB free; free some, or give the table as parquet"
        )
    writer.write_table(pa.Table.from_batches(held))
    held.clear()
