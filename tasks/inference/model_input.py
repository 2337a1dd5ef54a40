"""Checks rows against the schema of a run's data, and makes the model's input arrays of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts import Column, DataSchema

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_LISTED = 20


def require_columns(schema: DataSchema, given: Any, where: str) -> list[str]:
    """The columns of an Arrow schema that the model does not get, apart from the target.

    Raises BadInput if one of the model's is missing or has a type that training did not see.
    """
    for column in schema.columns:
        if column.name not in given.names:
            wanted = [one.name for one in schema.columns]
            more = f", … ({len(wanted)} in all)" if len(wanted) > _LISTED else ""
            raise BadInput(
                f"rows: {where} has no column {column.name!r}; the run's model takes "
                f"{', '.join(wanted[:_LISTED])}{more}"
            )
        kind = given.field(column.name).type
        if (wanted_kind := _wanted(column, kind)) is not None:
            raise BadInput(
                f"rows: {where}: the column {column.name!r} holds {kind}; "
                f"the run's model takes {wanted_kind}"
            )
    known = {schema.target, *(one.name for one in schema.columns)}
    return [name for name in given.names if name not in known]


def _wanted(column: Column, kind: Any) -> str | None:
    """What a column should hold if it does not."""
    import pyarrow as pa

    if pa.types.is_null(kind):
        return None
    if column.kind == "number":
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        fits = (
            pa.types.is_integer(plain)
            or pa.types.is_floating(plain)
            or pa.types.is_boolean(plain)
            or pa.types.is_decimal(plain)
        )
        return None if fits else "numbers"
    if column.kind in ("category", "text"):
        fits = any(
            test(kind)
            for test in (
                pa.types.is_string,
                pa.types.is_large_string,
                pa.types.is_string_view,
                pa.types.is_dictionary,
            )
        )
        return None if fits else "texts"
    return None


class ModelInput:
    """Makes arrays of record batches. `vocabularies`: the texts of codes 1, 2, … by column."""

    def __init__(
        self, schema: DataSchema, vocabularies: Mapping[str, list[str]], missing: bool, where: str
    ) -> None:
        """`missing`: whether the model takes rows without a value."""
        import pyarrow as pa

        self._missing, self._where = missing, where
        numbers = [one.name for one in schema.columns if one.kind == "number"]
        categories = [one.name for one in schema.columns if one.kind == "category"]
        self._vocabularies = {name: pa.array(vocabularies[name], pa.string()) for name in categories}
        self._numbers, self._categories = numbers, categories
        self._seen = 0

    def arrays(self, batch: Any) -> dict[str, Array]:
        """The input arrays of the next record batch. Raises BadInput for a value that is missing."""
        import numpy as np

        found: dict[str, Array] = {}
        if self._numbers:
            name = "numbers" if self._categories else "inputs"
            columns = [self._number(batch.column(one), one) for one in self._numbers]
            found[name] = np.stack(columns, axis=1)
        if self._categories:
            codes = [self._code(batch.column(one), one) for one in self._categories]
            found["categories"] = np.stack(codes, axis=1)
        self._seen += batch.num_rows
        return found

    def _number(self, column: Any, name: str) -> Array:
        import numpy as np
        import pyarrow as pa
        from pyarrow import compute

        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if pa.types.is_boolean(column.type):
            column = column.cast(pa.uint8())
        column = column.cast(pa.float32(), safe=False)
        column = compute.fill_null(column, pa.scalar(float("nan"), pa.float32()))
        numbers: Array = np.from_dlpack(column)
        wrong = np.isinf(numbers) if self._missing else ~np.isfinite(numbers)
        if wrong.any():
            row = int(wrong.argmax())
            what = "no value" if np.isnan(numbers[row]) else "an infinite number"
            self._refuse(name, row, what)
        return numbers

    def _code(self, column: Any, name: str) -> Array:
        import numpy as np
        import pyarrow as pa
        from pyarrow import compute

        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        column = column.cast(pa.string())
        if column.null_count and not self._missing:
            self._refuse(name, int(np.argmax(compute.is_null(column).to_pylist())), "no value")
        places = compute.index_in(column, value_set=self._vocabularies[name])
        filled = compute.fill_null(places.cast(pa.int64()), pa.scalar(-1, pa.int64()))
        codes: Array = np.from_dlpack(filled) + 1
        return codes

    def _refuse(self, name: str, row: int, what: str) -> None:
        raise BadInput(
            f"rows: {self._where}: the column {name!r} has {what} in row {self._seen + row}; "
            "allowed: a value, as in the run's data"
        )
