"""The parquet files of a table: its own, or those that its rows are written to."""

# ruff: noqa: TID253 -- only loaded by tasks.validate.expectations, in a separate process

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from trainwright.tasks import units
from trainwright.tasks.data.formats import INDEX
from trainwright.tasks.data.sources import table_of
from trainwright.tasks.data.tables.table_source import (
    BATCH_ROWS,
    TableSource,
    parquet_files,
)
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.spec.data_spec import DataSpec

_GROUP_ROWS = 2 * BATCH_ROWS
_KEPT_FREE = 64 * 2**20


def table_files(spec: DataSpec, folder: Path) -> list[Path] | None:
    """The parquet files of a local table in the order of its rows; None if it is no table.

    Rows of another kind of file, or of files with different types, are written to `folder`. Raises
    BadInput if the table can't be read.
    """
    path = Path(spec.uri)
    if spec.uri.startswith("builtin:") or path.suffix.lower() == ".npz":
        return None
    if path.is_dir() and (path / INDEX).is_file():
        return None
    try:
        source = table_of(spec)
        if not len(source.schema):
            return None
        if path.is_dir() or path.suffix.lower() == ".parquet":
            files = parquet_files(path) if path.is_dir() else [path]
            first, *others = [parquet.read_schema(file).remove_metadata() for file in files]
            if all(first.names) and all(one.equals(first) for one in others):
                return files
        return [_written(source, folder / "rows.parquet")]
    except (pa.ArrowException, OSError, ValueError, EOFError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadInput(f"data.uri: got {spec.uri}; it can't be read: {reason}") from error


def _written(source: TableSource, path: Path) -> Path:
    """The file, with all rows in groups of a size that fits into memory."""
    with parquet.ParquetWriter(path, source.schema) as writer:
        held: list[Any] = []
        for batch in source.batches():
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
        raise TrainwrightError(
            f"TMPDIR: the check writes the table's rows to {path.parent.parent.parent}, which has "
            f"{units.size(free)} free; free some, or give the table as parquet"
        )
    writer.write_table(pa.Table.from_batches(held))
    held.clear()
