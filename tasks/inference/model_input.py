"""Checks rows against the schema of a run's data, and makes the model's input arrays of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from trainwright.tasks.data.modalities.date_columns import DateParts
from trainwright.tasks.data.modalities.tokens import Tokenizer, padded
from trainwright.tasks.data.tables.arrow_numpy import to_arrow
from trainwright.tasks.data.tables.column_scan import as_float32, is_number, is_text, shown_type
from trainwright.tasks.data.tables.table_arrays import TableArrays
from trainwright.tasks.errors import BadInput
from trainwright.tasks.inference.arrow_arrays import text_array
from trainwright.tasks.inference.unseen_values import WAY_OUT
from trainwright.tasks.runs.artefacts.data_schema import Column, DataSchema

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_LISTED = 20


def require_columns(
    columns: list[Column],
    given: Any,
    where: str,
    dates: DateParts = MappingProxyType({}),
    *,
    allow_numbers: bool = False,
) -> list[str]:
    """The names in an Arrow schema that are not among the columns that a model takes.

    `dates`: of which columns of dates some of the model's columns are parts, for messages.
    `allow_numbers`: in columns of categories.

    Raises BadInput if one of the model's is missing or has a type that the model does not take.
    """
    wanted = [one.name for one in columns]
    for column in columns:
        if column.name not in given.names:
            whole = {part: name for name, parts in dates.items() for part in parts}
            own = list(dict.fromkeys(whole.get(name, name) for name in wanted))
            more = f", … ({len(own)} in all)" if len(own) > _LISTED else ""
            raise BadInput(
                f"rows: {where} has no column {column.name!r}; the run's model takes "
                f"{', '.join(own[:_LISTED])}{more}"
            )
        kind = given.field(column.name).type
        number = column.kind == "category" and _holds_numbers(kind)
        if not _fits(column, kind) and not (number and allow_numbers):
            takes = "numbers" if column.kind == "number" else "texts"
            raise BadInput(
                f"rows: {where}: the column {column.name!r} holds {shown_type(kind)}; "
                f"the run's model takes {takes}{f'; {WAY_OUT}' if number else ''}"
            )
    return [name for name in given.names if name not in wanted]


def _fits(column: Column, kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_null(kind):
        return True
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if column.kind == "number":
        return is_number(kind) or bool(pa.types.is_decimal(kind))
    return is_text(kind) if column.kind in ("category", "text") else True


def _holds_numbers(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def require_finite(values: Any, name: str, seen: int, where: str) -> None:
    """Raise BadInput if a column has a number that is infinite as float32. `seen`: rows before."""
    import pyarrow as pa
    from pyarrow import compute

    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if pa.types.is_floating(values.type):
        infinite = compute.is_inf(values.cast(pa.float32(), safe=False))
        if compute.any(infinite).as_py():
            refuse(name, seen + compute.index(infinite, True).as_py(), "an infinite number", where)


def refuse(name: str, row: int, what: str, where: str) -> NoReturn:
    """Raise BadInput for a value that no model takes."""
    raise BadInput(
        f"rows: {where}: the column {name!r} has {what} in row {row} (from 0); "
        "allowed: a value, as in the run's data"
    )


class ModelInput:
    """Makes the arrays of one record batch after the other."""

    def __init__(
        self, schema: DataSchema, vocabularies: Mapping[str, list[str]], missing: bool, where: str
    ) -> None:
        """`vocabularies`: the values of codes 1, 2, … of each category column.

        `missing`: whether the model takes rows without a value; `where`: the file, for messages.
        """
        known = {
            one.name: text_array(vocabularies[one.name])
            for one in schema.columns
            if one.kind == "category"
        }
        self._arrays = TableArrays(schema.columns, known, [])
        self._text = next((one.name for one in schema.columns if one.kind == "text"), None)
        """the column whose tokens are the only input"""
        self._tokenizer, self._shapes = Tokenizer(), schema.inputs
        self._columns, self._missing, self._where = schema.columns, missing, where
        self._dtypes = schema.input_dtypes
        self._seen = 0

    def arrays(self, batch: Any) -> dict[str, Array]:
        """The input arrays of the next batch. Raises BadInput for a value that no model takes."""
        plain = _plain(batch, self._columns)
        for column in self._columns:
            self._require_values(plain.column(column.name), column)
        self._seen += batch.num_rows
        found = self._arrays.of(plain) if self._text is None else self._tokens(plain)
        return {name: array.astype(self._dtypes[name]) for name, array in found.items()}

    def _tokens(self, batch: Any) -> dict[str, Array]:
        texts = [text or "" for text in batch.column(self._text).to_pylist()]
        [(name, (length, *_))] = self._shapes.items()
        return {name: padded(*self._tokenizer(texts), length)}

    def _require_values(self, values: Any, column: Column) -> None:
        from pyarrow import compute

        missing = values.is_null(nan_is_null=column.kind == "number")
        if not self._missing and compute.any(missing).as_py():
            row = self._seen + compute.index(missing, True).as_py()
            refuse(column.name, row, "no value", self._where)
        if column.kind == "number":
            require_finite(values, column.name, self._seen, self._where)


def from_offsets(batch: Any, columns: list[Column]) -> Any:
    """The batch with the distances that a model gets of numbers with an offset."""
    for column in columns:
        if column.offset:
            place = batch.schema.get_field_index(column.name)
            [plain] = _plain(batch, [column]).columns
            distances = to_arrow(as_float32(plain, column.offset))
            batch = batch.set_column(place, column.name, distances)
    return batch


def _plain(batch: Any, columns: list[Column]) -> Any:
    """The batch without dictionaries and decimals; columns that hold nothing have a type."""
    import pyarrow as pa

    arrays = []
    for column in columns:
        values = batch.column(column.name)
        if pa.types.is_dictionary(values.type):
            values = values.cast(values.type.value_type)
        if pa.types.is_null(values.type):
            values = values.cast(pa.float64() if column.kind == "number" else pa.large_string())
        elif pa.types.is_decimal(values.type):
            values = values.cast(pa.float64())
        arrays.append(values)
    return pa.RecordBatch.from_arrays(arrays, [column.name for column in columns])
