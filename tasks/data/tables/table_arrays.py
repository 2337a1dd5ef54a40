"""How the columns of a table become a model's input arrays.

A table of numbers is one array `inputs`. With text columns it is `numbers` (missing ones NaN) and
`categories`. Stored codes are places in a vocabulary of the whole table: the most frequent values
of a column, sorted as text, from 1 on; 0 stands for missing and rare ones. So they do not depend on
the split; `row_split` makes the codes of a training part of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainwright.tasks.data.tables.arrow_numpy import filled
from trainwright.tasks.data.tables.column_scan import (
    EXACT,
    MOST_CODES,
    ColumnScan,
    as_float32,
    is_number,
    is_text,
    plain,
    require_one_kind,
    shown_type,
)
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.data_schema import Column
from trainwright.tasks.spec.data_spec import DataSpec

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

CATEGORIES = "categories"
CODE_DTYPE = "uint16"


@dataclass(frozen=True)
class TableArrays:
    """The columns that are inputs, in the table's order, and the vocabularies of the categories."""

    columns: list[Column]
    vocabularies: dict[str, Any]
    """by category column: the values of codes 1, 2, …, as Arrow"""
    dropped: list[str]
    """columns without any value"""

    @property
    def _names(self) -> dict[str, list[str]]:
        numbers = [one.name for one in self.columns if one.kind == "number"]
        categories = [one.name for one in self.columns if one.kind == "category"]
        first = "numbers" if categories else "inputs"
        return {
            name: found for name, found in ((first, numbers), (CATEGORIES, categories)) if found
        }

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """The shape of one row, by input."""
        return {name: (len(columns),) for name, columns in self._names.items()}

    @property
    def dtypes(self) -> dict[str, str]:
        """The type of each input as it is stored."""
        return {name: CODE_DTYPE if name == CATEGORIES else "float32" for name in self._names}

    def of(self, batch: Any) -> dict[str, Array]:
        """The input arrays of a record batch, as they are stored."""
        import numpy as np

        found = {}
        offsets = {column.name: column.offset for column in self.columns}
        for name, columns in self._names.items():
            array = np.empty((batch.num_rows, len(columns)), self.dtypes[name])
            for at, column in enumerate(columns):
                values = batch.column(column)
                array[:, at] = (
                    self._codes(values, column)
                    if name == CATEGORIES
                    else as_float32(values, offsets[column])
                )
            found[name] = array
        return found

    def _codes(self, column: Any, name: str) -> Array:
        from pyarrow import compute

        found = compute.index_in(plain(column), value_set=self.vocabularies[name])
        return (filled(found, "int32", -1) + 1).astype(CODE_DTYPE)


def table_arrays(
    scans: Mapping[str, ColumnScan], spec: DataSpec, other: Iterable[str] = ()
) -> TableArrays:
    """The form of a table's inputs: its columns except the target and `other`.

    Raises BadInput for columns of other types, and for missing values that the job does not permit.
    """
    columns, vocabularies, dropped = list[Column](), dict[str, Any](), list[str]()
    for name, scan in scans.items():
        if name == spec.target or name in other:
            continue
        if scan.rows and scan.empty and spec.missing != "refuse":
            dropped.append(name)
            continue
        where = f"data.uri: {spec.uri}: column {name!r}"
        _require_usable(scan, where, spec)
        written = spec.uri.lower().endswith(".csv") and name not in (spec.csv.text_columns or ())
        if is_text(scan.type) and written:
            require_one_kind(scan, where)
        missing = scan.missing + scan.nan
        if is_text(scan.type):
            assert scan.values is not None
            vocabularies[name] = scan.values.most_frequent(MOST_CODES)
            size = len(vocabularies[name]) + 1
            columns.append(Column(name=name, kind="category", missing=missing, vocabulary=size))
        else:
            number = Column(name=name, kind="number", missing=missing, offset=scan.offset)
            columns.append(number)
    if not columns:
        raise BadInput(
            f"data.uri: {spec.uri} has no column with values except the target; "
            "allowed: at least one input"
        )
    return TableArrays(columns, vocabularies, dropped)


def number_notes(scans: Mapping[str, ColumnScan], names: Iterable[str]) -> list[str]:
    """For people: which of some columns hold whole numbers that float32 can't tell apart."""
    import pyarrow as pa

    notes = []
    for name in names:
        scan, offset = scans[name], scans[name].offset
        if offset:
            notes.append(
                f"column {name!r}: the model gets the distance from {offset}, because float32 "
                "can't tell such large numbers apart"
            )
        if pa.types.is_integer(scan.type) and scan.farthest(offset) > EXACT:
            notes.append(
                f"column {name!r}: whole numbers more than 2**24 from {offset} are rounded to "
                "float32, so neighbours may be alike; if they are identifiers, give them as texts "
                "(data.csv.text_columns), or data.ignore them"
            )
    return notes


def _require_usable(scan: ColumnScan, where: str, spec: DataSpec) -> None:
    keep = spec.missing == "keep"
    if scan.missing and not keep:
        raise BadInput(
            f"{where}: {scan.missing} of {scan.rows} values are missing; "
            "allowed: none, unless data.missing is keep"
        )
    if not (is_text(scan.type) or is_number(scan.type)):
        raise BadInput(
            f"{where} holds {shown_type(scan.type)}; allowed: numbers, texts, dates, true and false"
        )
    bad = scan.infinite if keep else scan.infinite + scan.nan
    if bad:
        what = "infinite" if keep else "NaN, infinite"
        raise BadInput(
            f"{where}: {bad} of {scan.rows} values are {what} or too large for float32; "
            "allowed: none"
        )
