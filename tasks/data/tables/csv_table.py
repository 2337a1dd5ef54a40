"""Reads .csv files with Arrow, in the form that `csv_form` finds, in record batches.

A column whose first 64 MiB mislead is inferred again, as Arrow would have inferred it at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainwright.tasks.data.tables import csv_form
from trainwright.tasks.data.tables.csv_form import ZEROS, file_form, form_notes, with_columns
from trainwright.tasks.data.tables.number_forms import as_numbers
from trainwright.tasks.runs.artefacts.data_schema import CsvForm
from trainwright.tasks.spec.csv_spec import CsvSpec

_MISLED = re.compile(r"In CSV column #(\d+): .*CSV conversion error to (.*): invalid (.*)", re.S)
_OTHER = "; data.csv.encoding names another encoding"


def csv_reader(
    path: Path,
    form: CsvForm,
    types: Mapping[str, Any],
    block_bytes: int | None = None,
    **convert: Any,
) -> Any:
    """Arrow's reader of a file. `types`: of some columns, by their names in the file."""
    from pyarrow import csv

    read = csv.ReadOptions(
        block_size=block_bytes or csv_form.BLOCK_BYTES,
        use_threads=block_bytes is not None,
        encoding=form.encoding,
        skip_rows=form.skipped,
    )
    options = csv.ConvertOptions(strings_can_be_null=True, column_types=dict(types), **convert)
    parse = csv.ParseOptions(delimiter=form.separator)
    return csv.open_csv(path, read, parse, options)


def first_rows(path: Path, form: CsvForm, texts: Sequence[str] = ()) -> Any:
    """The rows of a file's first block; `texts`: columns that are read as such.

    The names of columns are without white space around them.
    """
    import pyarrow as pa

    reader = csv_reader(path, form, dict.fromkeys(texts, pa.string()))
    for batch in reader:
        return _renamed(batch)
    return _renamed(empty(reader.schema))


def empty(schema: Any) -> Any:
    """A record batch without rows. Unlike Arrow's own, this does not import pandas."""
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([pa.nulls(0, one.type) for one in schema], schema=schema)


def _renamed(batch: Any) -> Any:
    return batch.rename_columns([name.strip() for name in batch.schema.names])


def csv_form_of(
    path: Path, spec: CsvSpec, used: Sequence[str] = (), left: Sequence[str] = ()
) -> tuple[CsvForm, list[str]]:
    """A file's form by its first block, and notes for people about it.

    `used`, `left`: see `file_form`, `with_columns`. Raises ValueError as these do.
    """
    import pyarrow as pa

    form = file_form(path, spec, used)
    first = first_rows(path, form)
    require_names(first.schema)
    names = dict(zip(first.schema.names, csv_reader(path, form, {}).schema.names, strict=True))
    with path.open("rb") as file:
        zeros = ZEROS.search(file.read(csv_form.BLOCK_BYTES)) is not None

    def as_texts(wanted: Sequence[str]) -> Any:
        return first_rows(path, form, [names[name] for name in wanted])

    form = with_columns(form, spec, first, as_texts, left, zeros=zeros)
    texts = [one.name for one in first.schema if one.name and pa.types.is_string(one.type)]
    spaced = [
        name for name in texts if name not in (*left, *form.numbers) and _spaced(first.column(name))
    ]
    notes = form_notes(form, spec)
    if spaced:
        listed = ", ".join(map(repr, spaced[:10])) + (" …" if len(spaced) > 10 else "")
        notes.append(
            f"column{'s' * (len(spaced) > 1)} {listed}: white space around values is removed"
        )
    return form, notes


def _spaced(column: Any) -> bool:
    from pyarrow import compute

    texts = column.unique().drop_null()
    return bool(compute.any(compute.not_equal(texts, compute.utf8_trim_whitespace(texts))).as_py())


def read_csv(
    path: Path, spec: CsvSpec, used: Sequence[str], left: Sequence[str]
) -> tuple[Any, Any, CsvForm, list[str]]:
    """A file's schema, a function that reads its record batches, its form and notes about it.

    Raises ValueError, pa.ArrowException.
    """
    import pyarrow as pa

    schema = csv_reader(path, file_form(path, spec, used), {}).schema
    require_names(schema)
    form, notes = csv_form_of(path, spec, used, left)
    texts = {*form.numbers, *form.texts}
    known = {name: pa.string() for name in schema.names if name.strip() in texts}
    # As UTF-8, a text of another encoding may have up to three times as many bytes.
    size = path.stat().st_size * (1 if form.encoding == "utf-8" else 3)
    while size > csv_form.BLOCK_BYTES:  # else the first block was the whole
        try:
            for _ in csv_reader(path, form, known):
                pass
            break
        except pa.ArrowInvalid as error:
            name, kind = _widened(error, schema, known)
            known[name] = kind
    schema = csv_reader(path, form, known).schema
    for one in schema:
        if pa.types.is_binary(one.type):
            raise ValueError(f"the column {one.name!r} is not UTF-8 text{_OTHER}")
    plain = formed(empty(schema), form).schema
    require_names(plain)

    def batches() -> Iterator[Any]:
        return (formed(batch, form) for batch in csv_reader(path, form, known))

    return plain, batches, form, notes


def formed(batch: Any, form: CsvForm) -> Any:
    """A record batch with numbers by the form, and names and texts without white space around.

    Raises ValueError for a text that is no number of its column's form.
    """
    import pyarrow as pa

    names = [name.strip() for name in batch.schema.names]
    columns = []
    for name, column in zip(names, batch.columns, strict=True):
        if name in form.numbers and pa.types.is_string(column.type):
            column = as_numbers(column, form.numbers[name], name)
        elif pa.types.is_string(column.type):
            column = _trimmed(column)
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names)


def _trimmed(column: Any) -> Any:
    import pyarrow as pa
    from pyarrow import compute

    texts = compute.utf8_trim_whitespace(column)
    blank = compute.match_substring_regex(texts, r"\A\z")  # scalars would import pandas
    if compute.any(blank).as_py():
        return compute.if_else(blank, pa.nulls(len(texts), pa.string()), texts)
    return texts


def require_names(schema: Any) -> None:
    """Raise ValueError unless the names of an Arrow schema are different texts."""
    try:
        names = list(schema.names)
    except UnicodeDecodeError:
        raise ValueError(f"a column's name is not UTF-8 text{_OTHER}") from None
    doubled = sorted({name for name in names if name and names.count(name) > 1})
    if doubled:
        raise ValueError(f"the column {doubled[0]!r} occurs twice")


def _widened(error: Exception, schema: Any, known: Mapping[str, Any]) -> tuple[str, Any]:
    """The column that does not fit its type, and the next type to try, as Arrow's inference does.

    Raises the error if it is another one.
    """
    import pyarrow as pa

    found = _MISLED.search(str(error))
    if found is None:
        raise error
    name = schema.names[int(found[1])]
    kind = known.get(name, schema.field(name).type)
    if "UTF8" in found[3]:
        raise ValueError(f"the column {name!r} is not UTF-8 text{_OTHER}") from None
    moments = [pa.timestamp("s"), pa.timestamp("ns")]
    order = [pa.null(), pa.int64(), pa.bool_(), pa.date32(), *moments, pa.float64(), pa.string()]
    if kind == pa.int64():
        return name, pa.float64()
    return name, order[order.index(kind) + 1] if kind in order else pa.string()
