"""The warnings about a table, or about arrays and images."""

# ruff: noqa: TID253 -- only loaded by tasks.validate.expectations, in a separate process

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow import compute

from trainwright.tasks.data.dataset import Dataset
from trainwright.tasks.data.row_split import split_keys, validation_rows
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.artefacts.validation import DataWarning
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.validate.duckdb_table import DuckDBDatabase, DuckDBTable, quoted
from trainwright.tasks.validate.warnings.identifiers import identifiers
from trainwright.tasks.validate.warnings.leakage import leakage, sample
from trainwright.tasks.validate.warnings.neighbours import doubtful_labels
from trainwright.tasks.validate.warnings.repeated_rows import in_entries, in_table

_ENTRIES = 256


def table_warnings(
    table: DuckDBTable, spec: DataSpec, seed: int, schema: DataSchema | None
) -> list[DataWarning]:
    """The warnings about a table; without a schema there is no split, so none of repeated rows.

    There are none of a table of series, whose rows are no samples.
    """
    if table.rows < 2 or len(table.kinds) < 2 or spec.time is not None:
        return []
    sampled = sample(table)
    found = [one for one in leakage(table, sampled, spec.target) if one.column not in spec.ignore]
    if schema is not None:
        found += identifiers(table, schema)
    if schema is not None:
        found += in_table(table, spec.target, _held_out(table, spec, seed))
    return found + doubtful_labels(table, sampled, spec.target)


def _held_out(table: DuckDBTable, spec: DataSpec, seed: int) -> Any:
    """Whether each row is in the validation part, as ranks split the rows."""
    classes, keys = None, None
    if table.labels is not None:
        column = table.arrow(f"SELECT {quoted(spec.target)} FROM plain").column(0)
        values = column.unique()
        values = values.take(compute.array_sort_indices(values))
        classes = compute.index_in(column, value_set=values).to_numpy()
    if spec.split_by is not None:
        column = table.arrow(f"SELECT {quoted(spec.split_by)} FROM plain").column(0)
        keys = split_keys(column.combine_chunks(), spec)
    return validation_rows(spec, seed, table.rows, classes, keys)


def sample_warnings(dataset: Dataset) -> list[DataWarning]:
    """The warnings about arrays or images: those of repeated rows.

    Raises BadInput if an image can't be decoded.
    """
    if dataset.schema.task == "forecasting":
        return []
    rows = dataset.schema.rows

    def entries() -> Iterator[bytes]:
        for begin in range(0, rows, _ENTRIES):
            inputs, _ = dataset.batch(np.arange(begin, min(begin + _ENTRIES, rows)))
            for parts in zip(*inputs.values(), strict=True):
                yield b"".join(part.tobytes() for part in parts)

    targets: Any = dataset.targets
    labels = np.asarray(targets[:]) if dataset.schema.classes is not None else None
    held_out = np.zeros(rows, bool)
    held_out[np.asarray(dataset.split.validation[:])] = True
    with tempfile.TemporaryDirectory(prefix="trainwright-table-") as folder:
        database = DuckDBDatabase(Path(folder))
        try:
            return in_entries(database, entries(), labels, held_out)
        finally:
            database.close()
