"""Fields of a job that do not fit its data, found by the names of columns, before it is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainwright.estimator.near_names import meant
from trainwright.tasks.data.formats import INDEX
from trainwright.tasks.data.tables.column_scan import is_text
from trainwright.tasks.data.tables.csv_form import file_form
from trainwright.tasks.data.tables.csv_table import csv_reader, empty, formed
from trainwright.tasks.data.tables.table_source import listed, parquet_files
from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.data_spec import DataSpec

_FIRST_BYTES = 1 << 20


def require_job_fields(spec: DataSpec) -> None:
    """Raise BadInput for fields of a job that its data can't have, whatever its rows hold.

    The data is local (see `sources.localized`). What can't be read is left to the data's check.
    """
    path = Path(spec.uri)
    if spec.uri.startswith("builtin:") or (path / INDEX).is_file():
        return
    if path.is_file() and not path.stat().st_size:
        raise BadInput(f"data.uri: got {spec.uri}, an empty file; allowed: a file with data")
    if path.suffix.lower() == ".npz":
        return
    for name in ("image_size", "augment"):
        if (value := getattr(spec, name)) not in (None, "auto", "none"):
            raise BadInput(f"data.{name}: got {value}; allowed only for images")
    schema = _first_schema(path, spec)
    if schema is None:
        return
    for name in ("split_by", "text", "time", "series"):
        column = getattr(spec, name)
        if column is not None and column not in schema.names:
            raise BadInput(
                f"data.{name}: got {column!r}; allowed: a column of {spec.uri}: "
                f"{listed(schema.names) or 'it has none'}"
            )
    require_ignored(spec, schema.names)
    if spec.text is not None and not _may_hold_texts(schema.field(spec.text).type):
        texts = [one.name for one in schema if _may_hold_texts(one.type)]
        raise BadInput(
            f"data.text: got {spec.text!r}, which holds no texts; allowed: a column of texts of "
            f"{spec.uri}: {listed(texts) or 'it has none'}"
        )


def require_ignored(spec: DataSpec, names: Sequence[str]) -> None:
    """Raise BadInput if a column of `data.ignore` is not among a table's."""
    for name in spec.ignore:
        if name not in names:
            raise BadInput(
                f"data.ignore: got {name!r}; allowed: columns of {spec.uri}: "
                f"{listed(names) or 'it has none'}{meant(name, names)}"
            )


def _first_schema(path: Path, spec: DataSpec) -> Any:
    """The Arrow schema of a parquet file, a folder's first one, or the beginning of a .csv file.

    None if there is none, or if it can't be read.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        files = parquet_files(path) if path.is_dir() else [path]
        if files and files[0].suffix.lower() == ".parquet":
            schema = parquet.read_schema(files[0])
        elif path.suffix.lower() == ".csv":
            form = file_form(path, spec.csv, spec.named_columns)
            with csv_reader(path, form, {}, _FIRST_BYTES) as reader:
                schema = formed(empty(reader.schema), form).schema
        else:
            return None
        return schema if all(isinstance(name, str) for name in schema.names) else None
    except (pa.ArrowException, OSError, ValueError):
        return None


def _may_hold_texts(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    unclear = (pa.types.is_null, pa.types.is_string_view, pa.types.is_binary)
    return is_text(kind) or any(one(kind) for one in unclear)
