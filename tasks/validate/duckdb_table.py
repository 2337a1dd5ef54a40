"""A table in DuckDB: parquet files that its views read, within bounded memory.

| view | columns |
|---|---|
| `plain` | those of the table |
| `numbered` | those of the table, and the row's number |
| `checked` | those of the table; of a target with classes also the label's rows and share |
| `labelled` | those of `checked`, and the row's number |

Decimals are numbers, and NaN is missing, as in pandas.
"""

# ruff: noqa: TID253 -- only loaded by tasks.validate.expectations, in a separate process

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import sqlalchemy
from pyarrow import parquet

from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.validate.column_summary import (
    MAX_LABELS,
    MAX_VALUES,
    ColumnSummary,
    LabelSummary,
    ValueKind,
    in_order,
)
from trainwright.tasks.validate.label_columns import rows_of_label, share_of_label

ROW = "row number"
MEMORY = "400MB"
"""DuckDB's own limit. Beyond it, DuckDB writes to the folder."""
_MOST_THREADS = 4
_COLUMNS_AT_ONCE = 100
_FLOATS = ("FLOAT", "DOUBLE")
_INTEGERS = (
    "TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT",
    "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT", "UHUGEINT",
)  # fmt: skip


class DuckDBDatabase:
    """A DuckDB database in a folder, with bounded memory. Close it after use.

    Queries raise BadInput if a file can't be read, TrainwrightError if memory or disk do not
    suffice.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, dict[str, str]()
        self.engine = sqlalchemy.create_engine(
            f"duckdb:///{folder / 'table.duckdb'}",
            connect_args=self.connect_args,
            poolclass=sqlalchemy.StaticPool,
        )
        self._connection: Any = self.engine.raw_connection().driver_connection

    @property
    def connect_args(self) -> dict[str, Any]:
        """What a further connection to the same database must be opened with."""
        settings = {
            "memory_limit": MEMORY,
            "threads": min(_MOST_THREADS, len(os.sched_getaffinity(0))),
            "temp_directory": str(self._folder / "spilled"),
        }
        return {"config": settings}

    def close(self) -> None:
        """Close the database."""
        self.engine.dispose()

    def query(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """The rows of the answer."""
        try:
            found: list[tuple[Any, ...]] = self._connection.execute(sql, list(values)).fetchall()
        except duckdb.Error as error:
            raise self.as_error(error) from error
        return found

    def arrow(self, sql: str) -> Any:
        """The answer as an Arrow table."""
        try:
            return self._connection.sql(sql).to_arrow_table()
        except duckdb.Error as error:
            raise self.as_error(error) from error

    def batches(self, view: str, rows: int) -> Iterator[Any]:
        """The rows of a view as record batches of about `rows`."""
        try:
            yield from self._connection.sql(f"SELECT * FROM {view}").to_arrow_reader(rows)
        except (duckdb.Error, pa.ArrowException) as error:
            raise self.as_error(error) from error

    def register(self, name: str, table: Any) -> None:
        """Give queries an Arrow table by a name."""
        self._connection.register(name, table)

    def as_error(self, error: Exception) -> TrainwrightError:
        """The error that a failed query means."""
        line = " ".join(str(error).split())
        for link, file in self._files.items():
            line = line.replace(link, file)
        line = line[:300]
        if isinstance(error, duckdb.OutOfMemoryException | duckdb.IOException):
            return TrainwrightError(
                f"validate: {MEMORY} of memory and the disk don't suffice: {line}"
            )
        return BadInput(f"data.uri: it can't be checked: {line}")


class DuckDBTable(DuckDBDatabase):
    """A table's rows, in the order of its files."""

    def __init__(self, files: Sequence[Path], folder: Path, without: Sequence[str] = ()) -> None:
        """Parquet files with the same columns, `without` some of them."""
        super().__init__(folder)
        self.labels: LabelSummary | None = None
        self.derived: tuple[str, ...] = ()
        self._open(files, without)

    def _open(self, files: Sequence[Path], without: Sequence[str]) -> None:
        links = []
        for number, file in enumerate(files):  # DuckDB would take a name as a pattern
            links.append(self._folder / f"part-{number:06}.parquet")
            links[-1].symlink_to(file.absolute())
            self._files[str(links[-1])] = str(file)
        listed = ", ".join(f"'{_text(str(link))}'" for link in links)
        counts = self.query(
            f"SELECT num_rows FROM parquet_file_metadata([{listed}]) ORDER BY file_name"
        )
        starts = [sum(count for (count,) in counts[:place]) for place in range(len(counts))]
        self.rows = sum(count for (count,) in counts)
        source = f"read_parquet([{listed}], hive_partitioning = false)"
        described = [
            one for one in self.query(f"DESCRIBE SELECT * FROM {source}") if one[0] not in without
        ]
        self.kinds = {name: _kind(kind) for name, kind, *_ in described}
        shown = ", ".join(_shown(name, kind) for name, kind, *_ in described)
        row = f"({starts}::BIGINT[])[(file_index + 1)::BIGINT] + file_row_number"
        self.query(f'CREATE VIEW numbered AS SELECT {shown}, {row} AS "{ROW}" FROM {source}')
        self.query(f"CREATE VIEW plain AS SELECT {shown} FROM {source}")

    def add_labels(self, target: str, *, classes: bool) -> None:
        """Make `checked` and `labelled`; count the rows of each class if the target has any."""
        label = quoted(target)
        shown, joined = "", ""
        if classes:
            self.query(
                f"CREATE TABLE label_counts AS SELECT {label} AS label, count(*) AS rows "
                f"FROM plain WHERE {label} IS NOT NULL GROUP BY 1"
            )
            shown = (
                f", label_counts.rows AS {quoted(rows_of_label(target))}"
                f", label_counts.rows / {self.rows} AS {quoted(share_of_label(target))}"
            )
            joined = f"LEFT JOIN label_counts ON given.{label} = label_counts.label"
            self.labels = self._labels()
            self.derived = (rows_of_label(target), share_of_label(target))
        for view, source in (("checked", "plain"), ("labelled", "numbered")):
            self.query(f"CREATE VIEW {view} AS SELECT given.*{shown} FROM {source} given {joined}")

    def _labels(self) -> LabelSummary:
        ((count, rarest),) = self.query("SELECT count(*), min(rows) FROM label_counts")
        values = []
        if count <= MAX_LABELS:
            values = in_order(value for (value,) in self.query("SELECT label FROM label_counts"))
        return LabelSummary(count, values, (rarest or 0) / max(1, self.rows))

    def summaries(self) -> list[ColumnSummary]:
        """The summary of each column."""
        names = list(self.kinds)
        return [
            summary
            for first in range(0, len(names), _COLUMNS_AT_ONCE)
            for summary in self._summaries(names[first : first + _COLUMNS_AT_ONCE])
        ]

    def _summaries(self, names: list[str]) -> list[ColumnSummary]:
        wanted = [(name, figure) for name in names for figure in _FIGURES[self.kinds[name]]]
        asked = ", ".join(figure.format(quoted(name)) for name, figure in wanted)
        (answers,) = self.query(f"SELECT {asked} FROM plain")
        figures: dict[str, list[Any]] = {name: [] for name in names}
        for (name, _), answer in zip(wanted, answers, strict=True):
            figures[name].append(answer)
        return [self._summary(name, *figures[name]) for name in names]

    def _summary(self, name: str, present: int, *figures: Any) -> ColumnSummary:
        kind = self.kinds[name]
        missing = 1 - present / self.rows if self.rows else 0.0
        if kind == "number" and figures[0]:
            count, low, high, mean, deviation = figures
            return ColumnSummary(
                name, kind, missing, count, float(low), float(high), float(mean), float(deviation)
            )
        if kind == "text" and 0 < figures[0] <= 2 * MAX_VALUES:  # an approximate count
            column = quoted(name)
            found = self.query(f"SELECT DISTINCT {column} FROM plain WHERE {column} IS NOT NULL")
            values = in_order(value for (value,) in found)
            values = values if len(values) <= MAX_VALUES else []
            return ColumnSummary(name, kind, missing, values=values)
        return ColumnSummary(name, kind, missing)

    def frame(self, columns: Sequence[str]) -> pd.DataFrame:
        """All rows of some columns of `checked`, with their numbers."""
        listed = "".join(f"{quoted(name)}, " for name in columns)
        view = "numbered" if all(name in self.kinds for name in columns) else "labelled"
        found = self.arrow(f'SELECT {listed}"{ROW}" FROM {view}')
        index = pd.Index(found.column(ROW).to_numpy())
        values = {name: found.column(name).to_pandas().to_numpy() for name in columns}
        return pd.DataFrame(values, index=index, columns=list(columns)).sort_index()

    def sample(self, rows: Sequence[int], columns: Sequence[str]) -> dict[int, dict[str, Any]]:
        """The values of some rows, by the row's number."""
        if not rows:
            return {}
        listed = "".join(f", {quoted(name)}" for name in columns)
        wanted = ", ".join(str(int(row)) for row in rows)
        found = self.query(f'SELECT "{ROW}"{listed} FROM labelled WHERE "{ROW}" IN ({wanted})')
        return {row: dict(zip(columns, values, strict=True)) for row, *values in found}


_FINITE = "FILTER (isfinite({0}))"
_PRESENT = "count({0})"
_FIGURES: dict[ValueKind, tuple[str, ...]] = {
    "number": (
        _PRESENT,
        f"count(*) {_FINITE}",
        f"min({{0}}) {_FINITE}",
        f"max({{0}}) {_FINITE}",
        f"avg({{0}}) {_FINITE}",
        f"stddev_pop({{0}}) {_FINITE}",
    ),
    "text": (_PRESENT, "approx_count_distinct({0})"),
    "flag": (_PRESENT,),
    "other": (_PRESENT,),
}


def can_hold(files: Sequence[Path], target: str) -> bool:
    """Whether DuckDB tells the columns apart: it ignores case, and needs names of its own."""
    if not files:
        return False
    names = [name.lower() for name in parquet.read_schema(files[0]).names]
    own = {ROW, rows_of_label(target).lower(), share_of_label(target).lower()}
    return 0 < len(set(names)) == len(names) and not own & set(names)


def quoted(name: str) -> str:
    """A column's name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def _text(value: str) -> str:
    return value.replace("'", "''")


def _shown(name: str, kind: str) -> str:
    """A column as the views show it."""
    column = quoted(name)
    if kind in _FLOATS:
        return f"CASE WHEN isnan({column}) THEN NULL ELSE {column} END AS {column}"
    return f"{column}::DOUBLE AS {column}" if kind.startswith("DECIMAL") else column


def _kind(kind: str) -> ValueKind:
    if kind in _FLOATS or kind in _INTEGERS or kind.startswith("DECIMAL"):
        return "number"
    return "flag" if kind == "BOOLEAN" else "text" if kind == "VARCHAR" else "other"
