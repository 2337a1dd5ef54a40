"""The target: the task that it stands for, its classes, and its values as numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainwright.tasks.data.tables.arrow_numpy import to_numpy
from trainwright.tasks.data.tables.column_scan import (
    EXACT,
    MOST_CLASSES,
    ColumnScan,
    is_number,
    is_text,
    plain,
    shown_type,
)
from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.data_spec import Task

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

MAX_CLASSES = 100
"""An integer target with at most this many distinct values counts as classes."""


@dataclass(frozen=True)
class TargetColumn:
    """How a column's values become targets: class numbers (int64) or quantities.

    `values` are the classes in the order of their numbers, as Arrow; None for quantities.
    """

    dtype: str
    values: Any = None

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes."""
        return None if self.values is None else [str(one) for one in self.values.to_pylist()]

    def array(self, column: Any) -> Array:
        """A chunk of the column as targets."""
        from pyarrow import compute

        if self.values is None:
            return to_numpy(plain(column)).astype(self.dtype)
        values = plain(column).cast(self.values.type)
        return to_numpy(compute.index_in(values, value_set=self.values)).astype("int64")


def looks_like_numbers(column: ColumnScan) -> bool:
    """Whether a target is a quantity by its look: fractions, or many different whole numbers."""
    import pyarrow as pa
    from pyarrow import compute

    number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    if not number or column.values is None:
        return bool(pa.types.is_floating(column.type))
    values, _ = column.values.merged()
    if pa.types.is_floating(column.type):
        whole = compute.all(compute.equal(values, compute.floor(values)))
        if column.values.pruned or column.nan or column.infinite or not whole.as_py():
            return True
    distinct = len(values)
    return column.values.pruned or distinct > min(MAX_CLASSES, max(2, column.rows // 2))


def target_notes(column: ColumnScan, task: Task, *, inferred: bool) -> list[str]:
    """For people: which values of a target may be meant in another way than they are read."""
    import pyarrow as pa
    from pyarrow import compute

    notes, where = list[str](), f"target {column.name!r}"
    if not task.endswith("classification"):
        if pa.types.is_integer(column.type) and column.farthest(0) > EXACT:
            notes.append(f"{where}: whole numbers above 2**24 are rounded to float32")
        return notes
    assert column.values is not None
    values, _ = column.values.merged()
    if inferred and pa.types.is_floating(column.type):
        notes.append(
            f"{where} holds whole numbers such as {values[0].as_py()}: its {len(values)} values "
            "are classes; data.task: tabular-regression predicts numbers"
        )
    if not is_text(column.type):
        return notes
    alike: dict[str, list[str]] = {}
    same = compute.utf8_lower(compute.utf8_trim_whitespace(values))
    for key, value in zip(same.to_pylist(), values.to_pylist(), strict=True):
        alike.setdefault(key, []).append(value)
    for names in alike.values():
        if len(names) > 1:
            notes.append(
                f"{where}: {', '.join(map(repr, names[:5]))} are different classes, though they "
                "differ in case or white space only"
            )
    return notes[:5]


def target_column(column: ColumnScan, task: Task) -> TargetColumn:
    """The form of a target for a task. Raises BadInput if its values do not fit the task."""
    import pyarrow as pa

    where = f"data.target: {column.name!r}"
    if column.missing:
        raise BadInput(
            f"{where}: {column.missing} of {column.rows} values are missing; allowed: none"
        )
    if not (is_text(column.type) or is_number(column.type)):
        raise BadInput(
            f"{where} holds {shown_type(column.type)}; allowed: numbers, texts, true and false"
        )
    text, flag = is_text(column.type), pa.types.is_boolean(column.type)
    if task.endswith("classification") or (task == "custom" and (text or flag)):
        return TargetColumn("int64", _classes(column, task, where))
    if text:
        raise BadInput(f"{where} holds texts; allowed for {task}: numbers")
    _require_finite_values(column, where)
    if task == "tabular-regression":
        _require_two(column, where, "numbers that differ")
    whole = pa.types.is_integer(column.type) and task == "custom"
    return TargetColumn("int64" if whole else "float32")


def _classes(column: ColumnScan, task: Task, where: str) -> Any:
    """The sorted classes."""
    import pyarrow as pa
    from pyarrow import compute

    assert column.values is not None
    values, _ = column.values.merged()
    if pa.types.is_floating(values.type):
        _require_finite_values(column, where)
        if compute.all(compute.equal(values, compute.floor(values))).as_py() is False:
            raise BadInput(
                f"{where} holds fractions; allowed for {task}: whole numbers, texts, true and false"
            )
        values = values.cast(pa.int64())
    if column.values.pruned or len(values) > MOST_CLASSES:
        raise BadInput(
            f"{where} holds more than {MOST_CLASSES:,} different values; allowed for {task}: "
            f"at most {MOST_CLASSES:,} classes"
        )
    _require_two(column, where, "at least two classes")
    return values


def _require_finite_values(column: ColumnScan, where: str) -> None:
    if bad := column.nan + column.infinite:
        raise BadInput(
            f"{where}: {bad} of {column.rows} values are NaN, infinite or too large for float32; "
            "allowed: none"
        )


def _require_two(column: ColumnScan, where: str, allowed: str) -> None:
    counts = column.values
    if counts is not None and not counts.pruned and len(found := counts.merged()[0]) == 1:
        value = str(found[0].as_py())
        raise BadInput(f"{where} is {value[:40]!r} in all {column.rows} rows; allowed: {allowed}")
