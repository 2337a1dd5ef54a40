"""Reads tables in record batches, so that a table may be larger than memory.

| source | columns |
|---|---|
| .parquet, or a folder with .parquet files at any depth, by path | those of the files |
| .csv | see `csv_table` |
| .npy | of a structured array, or of rows × columns with the names 0, 1, … |

Dictionary columns become plain values; decimals and float16 become float64.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.tasks.data.tables.arrow_numpy import to_arrow
from trainwright.tasks.data.tables.column_scan import shown_type
from trainwright.tasks.data.tables.csv_table import read_csv, require_names
from trainwright.tasks.runs.artefacts.data_schema import CsvForm
from trainwright.tasks.spec.csv_spec import CsvSpec

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

BATCH_ROWS = 1 << 16
_BATCH_VALUES = 1 << 24
MOST_COLUMNS = 20_000
MOST_MEAN_BYTES = 4 * 2**20
"""of the values of a column in a row group"""
_LARGE_GROUP_BYTES = 256 * 2**20
_BUFFER_BYTES = 2**20
_INDEX_NAME = re.compile(r"__index_level_\d+__")
"""what pandas calls an index without a name"""


@dataclass(frozen=True)
class TableSource:
    """A table's Arrow schema, and a function that reads its record batches from the start."""

    schema: Any
    batches: Callable[[], Iterator[Any]]
    unnamed: int = 0
    """columns without a name, which are left out, such as the index in a CSV file of pandas"""
    index: tuple[str, ...] = ()
    """columns of a parquet file that pandas wrote as a table's index, which are left out too"""
    csv: CsvForm | None = None
    notes: tuple[str, ...] = ()
    """for people: what is unusual about the file's form"""

    @classmethod
    def of(cls, table: Any) -> TableSource:
        """A table in memory."""
        return cls(table.schema, lambda: iter(table.to_batches(BATCH_ROWS)))

    def read(self) -> Any:
        """The whole table, in memory."""
        import pyarrow as pa

        return pa.Table.from_batches(self.batches(), self.schema)


def parquet_files(folder: Path) -> list[Path]:
    """The parquet files below a folder, in order of their paths; hidden ones are left out."""
    found = [
        (path.relative_to(folder).as_posix(), path)
        for path in folder.rglob("*")
        if path.suffix.lower() == ".parquet" and path.is_file()
    ]
    return [
        path
        for name, path in sorted(found)
        if not any(part.startswith((".", "_")) for part in name.split("/"))
    ]


def open_table(
    path: Path, used: Sequence[str] = (), csv: CsvSpec | None = None, left: Sequence[str] = ()
) -> TableSource:
    """The table in a file, or in a folder of parquet files. Raises ValueError, OSError.

    Without the columns of an index (`pandas_index`), unless they are `used`. `csv`: the form of a
    .csv file as far as it is given; columns of texts in `left` are no numbers in another form.
    """
    import pyarrow as pa

    suffix = path.suffix.lower()
    if path.is_dir() or suffix == ".parquet":
        index = pandas_index(path, used)
        source = open_parquet(path) if not index else _without(path, index)
        return replace(source, index=tuple(index))
    if suffix == ".npy":
        return _npy(path)
    if path.stat().st_size == 0:
        return TableSource(pa.schema([]), lambda: iter(()))
    schema, batches, form, notes = read_csv(path, csv or CsvSpec(), used, left)
    return replace(_made(schema, batches), csv=form, notes=tuple(notes))


def pandas_index(path: Path, used: Sequence[str]) -> list[str]:
    """The columns that pandas wrote as the index of a parquet file or of a folder's first one.

    Without those in `used`, and none if there is no other column.
    """
    from pyarrow import parquet

    files = parquet_files(path) if path.is_dir() else [path]
    if not files:
        return []
    schema = parquet.read_schema(files[0])
    try:
        about = json.loads((schema.metadata or {}).get(b"pandas", b"{}"))
        named = [one for one in about.get("index_columns", []) if isinstance(one, str)]
    except (ValueError, AttributeError):
        named = []
    found = [
        name
        for name in schema.names
        if (name in named or _INDEX_NAME.fullmatch(name)) and name not in used
    ]
    return found if len(found) < len(schema.names) else []


def _without(path: Path, names: Sequence[str]) -> TableSource:
    kept = [name for name in open_parquet(path).schema.names if name not in names]
    return open_parquet(path, kept)


def _made(schema: Any, batches: Callable[[], Iterator[Any]]) -> TableSource:
    """The source whose batches get a schema without dictionaries and uncommon numbers."""
    import pyarrow as pa

    require_names(schema)
    wanted = pa.schema([pa.field(one.name, _common(one.type)) for one in schema if one.name])

    def cast() -> Iterator[Any]:
        for batch in batches():
            columns = [
                column if column.type == one.type else column.cast(one.type)
                for column, one in zip(
                    (batch.column(name) for name in wanted.names), wanted, strict=True
                )
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=wanted)

    return TableSource(wanted, cast, len(schema) - len(wanted))


def _common(kind: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _common(kind.value_type)
    if pa.types.is_decimal(kind) or pa.types.is_float16(kind):
        return pa.float64()
    return pa.string() if pa.types.is_string_view(kind) else kind


def open_parquet(
    path: Path, columns: Sequence[str] | None = None, batch_rows: int = BATCH_ROWS
) -> TableSource:
    """The table in a parquet file or in a folder of them, in batches of at most `batch_rows`.

    Of the files' columns only those in `columns`, if given. Raises ValueError, OSError.
    """
    import pyarrow as pa
    from pyarrow import parquet

    folder, files = (path, parquet_files(path)) if path.is_dir() else (path.parent, [path])
    whole: Any = None
    for path in files:
        described = parquet.ParquetFile(path)
        _require_bounded(described.metadata, path.name)
        schema = described.schema_arrow.remove_metadata()
        require_names(schema)
        whole = schema if whole is None else _unified(whole, schema, path.relative_to(folder))
    assert whole is not None
    if columns is not None:
        whole = pa.schema([whole.field(name) for name in columns])
    batch_rows = max(1, min(batch_rows, _BATCH_VALUES // max(1, len(whole))))

    def batches() -> Iterator[Any]:
        for path in files:
            # A row group may be as large as the file: without both options, it is read whole.
            file = parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
            yield from (
                pa.RecordBatch.from_arrays(batch.columns, names=batch.schema.names)
                for batch in file.iter_batches(batch_rows, columns=columns, use_threads=False)
            )

    return _made(whole, batches)


def _require_bounded(file: Any, name: str) -> None:
    """Raise ValueError for more columns, or longer values, than can be checked in a bounded time.

    `file` describes a parquet file; no value is read.
    """
    if file.num_columns > MOST_COLUMNS:
        raise ValueError(
            f"{name} has {file.num_columns:,} columns; allowed: up to {MOST_COLUMNS:,}"
        )
    for number in range(file.num_row_groups):
        group = file.row_group(number)
        if group.total_byte_size < _LARGE_GROUP_BYTES:
            continue
        for place in range(group.num_columns):
            column = group.column(place)
            mean_bytes = column.total_uncompressed_size / max(1, column.num_values)
            if mean_bytes > MOST_MEAN_BYTES:
                raise ValueError(
                    f"{name} has values of {mean_bytes / 2**20:,.0f} MiB on average in the column "
                    f"{column.path_in_schema!r}; allowed: up to {MOST_MEAN_BYTES // 2**20} MiB"
                )


def _unified(whole: Any, schema: Any, name: Path) -> Any:
    """The schema of both. Raises ValueError if they have other columns, or types that differ."""
    import pyarrow as pa

    if other := sorted(set(whole.names) ^ set(schema.names)):
        raise ValueError(f"{name} and the files before it differ in the column {other[0]!r}")
    plain = [pa.schema([(one.name, _common(one.type)) for one in part]) for part in (whole, schema)]
    try:
        return pa.unify_schemas(plain, promote_options="permissive")
    except pa.ArrowTypeError:
        for one in plain[0]:
            other_type = plain[1].field(one.name).type
            try:
                pa.unify_schemas(
                    [pa.schema([one]), pa.schema([(one.name, other_type)])],
                    promote_options="permissive",
                )
            except pa.ArrowTypeError:
                raise ValueError(
                    f"the column {one.name!r} holds {shown_type(other_type)} in {name}, "
                    f"{shown_type(one.type)} before it"
                ) from None
        raise


def _npy(path: Path) -> TableSource:
    import numpy as np
    import pyarrow as pa

    with path.open("rb") as file:
        npy_header(file)
    array = np.load(path, allow_pickle=False, mmap_mode="r")
    if array.dtype.names is None and array.ndim != 2:
        raise ValueError(
            f"an array of shape {array.shape} is not a table; "
            "allowed: rows × columns, or a structured array"
        )

    def columns(part: Array) -> dict[str, Any]:
        names = part.dtype.names
        if names is not None:
            return {str(name): to_arrow(np.asarray(part[name])) for name in names}
        return {str(at): to_arrow(np.asarray(part[:, at])) for at in range(part.shape[1])}

    def batches() -> Iterator[Any]:
        for begin in range(0, len(array), BATCH_ROWS):
            yield pa.RecordBatch.from_pydict(columns(array[begin : begin + BATCH_ROWS]))

    return _made(pa.RecordBatch.from_pydict(columns(array[:0])).schema, batches)


def listed(names: Iterable[str]) -> str:
    """The names of columns for a message: the first 20, each cut at 60 characters."""
    known = list(names)
    shown = ", ".join(name if len(name) <= 60 else f"{name[:59]}…" for name in known[:20])
    return shown + (f", … ({len(known)} in all)" if len(known) > 20 else "")


def npy_header(file: Any) -> tuple[tuple[int, ...], bool, Any]:
    """Shape, whether by column, and type of the array in a .npy file, read from its start.

    Raises ValueError if it is none, or holds Python objects.
    """
    from numpy.lib import format as npy

    try:
        version = npy.read_magic(file)
    except ValueError:
        raise ValueError("it holds no NumPy array") from None
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, by_column, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects: pickles, which may run code")
    return shape, by_column, dtype
