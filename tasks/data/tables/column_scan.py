"""What a table's columns hold, found in one pass over its record batches in bounded memory.

A column is scanned for missing and infinite values, and for its distinct values if these become
codes: texts, and the target. A column with more than a million different texts is pruned to the
most frequent ones whenever it exceeds that, so rare texts may lose their code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainwright.tasks.data.tables.arrow_numpy import filled, to_arrow, to_numpy
from trainwright.tasks.data.tables.number_forms import ANY_NUMBER
from trainwright.tasks.errors import BadInput

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

MOST_CODES = 65_535
"""A category column's most frequent values have a code, which fits into 16 bits."""
MOST_CLASSES = 10_000
EXACT = 2**24
"""float32 has all whole numbers up to this one."""
_MOST_COUNTED = 1_000_000
_MOST_BYTES = 128 * 2**20
_MERGED_AT = 4
_NUMBER = r"^\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$"
_DIFFERENT, _NEARLY_ALL = 20, 0.9


@dataclass
class ValueCounts:
    """The distinct values of a column with their number of rows.

    Beyond `limit` values or 128 MiB, `pruned` is set and the rarer half is dropped; with `give_up`,
    counting ends there.
    """

    limit: int
    give_up: bool = False
    pruned: bool = False
    _parts: list[tuple[Any, Array]] = field(default_factory=list)

    def add(self, values: Any) -> None:
        """Count a chunk without missing values."""
        from pyarrow import compute

        if self.pruned and self.give_up:
            return
        counted = compute.value_counts(values)
        self._parts.append((counted.field(0), to_numpy(counted.field(1))))
        if len(self._parts) > _MERGED_AT:
            self.merged()

    def merged(self) -> tuple[Any, Array]:
        """The distinct values as an Arrow array, sorted, and the number of rows of each."""
        import numpy as np
        import pyarrow as pa
        from pyarrow import compute

        if len(self._parts) != 1:
            empty = (pa.array([], pa.large_string()), np.zeros(0, np.int64))
            parts = self._parts or [empty]
            coded = pa.concat_arrays([values for values, _ in parts]).dictionary_encode()
            weights = np.concatenate([rows for _, rows in parts])
            values = coded.dictionary
            counts = np.bincount(to_numpy(coded.indices), weights, len(values)).astype(np.int64)
        else:
            [(values, counts)] = self._parts
        order = compute.array_sort_indices(values)
        values, counts = values.take(order), counts[to_numpy(order)]
        while len(values) > self.limit or (values.nbytes > _MOST_BYTES and len(values) > 1):
            values, counts = _most_frequent(values, counts, min(len(values), self.limit) // 2)
            self.pruned = True
        self._parts = [(values, counts)]
        return values, counts

    def most_frequent(self, count: int) -> Any:
        """The most frequent values (of equal frequency, the first), sorted."""
        values, counts = self.merged()
        return values if len(values) <= count else _most_frequent(values, counts, count)[0]


def _most_frequent(values: Any, counts: Array, count: int) -> tuple[Any, Array]:
    """The `count` most frequent of sorted values, sorted, with their numbers of rows."""
    import numpy as np

    kept = np.sort(np.argsort(-counts, kind="stable")[:count])
    return values.take(to_arrow(kept)), counts[kept]


@dataclass
class ColumnScan:
    """One column: its Arrow type, and counts over all rows."""

    name: str
    type: Any
    rows: int = 0
    missing: int = 0
    """rows without a value: null"""
    nan: int = 0
    infinite: int = 0
    """infinite, or too large for float32"""
    least: float = math.inf
    most: float = -math.inf
    """of the finite numbers; exact if they are whole numbers"""
    values: ValueCounts | None = None

    @property
    def empty(self) -> bool:
        """Whether no row has a value."""
        return self.missing + self.nan == self.rows

    def add(self, column: Any) -> None:
        """Add a chunk of the column. Raises ValueError if its texts are not UTF-8."""
        import numpy as np

        if is_text(column.type):
            _require_utf8(column, self.name)
        self.rows += len(column)
        self.missing += column.null_count
        if is_number(column.type):
            numbers = as_float32(column)
            self.nan += int(np.count_nonzero(np.isnan(numbers))) - column.null_count
            infinite = int(np.count_nonzero(np.isinf(numbers)))
            self.infinite += infinite
            if not infinite:  # else the column is refused
                self._extend(column)
        if self.values is not None:
            self.values.add(plain(column).drop_null())

    def _extend(self, column: Any) -> None:
        import pyarrow as pa
        from pyarrow import compute

        if pa.types.is_boolean(column.type):
            return
        if pa.types.is_floating(column.type):
            column = column.filter(compute.is_finite(column))
        found = compute.min_max(column).as_py()
        if found["min"] is not None:
            self.least, self.most = min(self.least, found["min"]), max(self.most, found["max"])

    @property
    def offset(self) -> int:
        """The middle of large values, if float32 holds their distances from it more exactly.

        That is if these are at most a sixteenth of the values, or whole and at most `EXACT`. Else
        it is 0, as if float32 tells whole numbers of that size apart anyway.
        """
        import pyarrow as pa

        if self.least > self.most or self.farthest(0) <= EXACT:
            return 0
        middle = int(self.least) + (int(self.most) - int(self.least)) // 2
        farthest = self.farthest(middle)
        exact = pa.types.is_integer(self.type) and farthest <= EXACT
        return middle if exact or 16 * farthest <= self.farthest(0) else 0

    def farthest(self, offset: int) -> float:
        """The largest distance of a value from an offset."""
        return max(abs(self.most - offset), abs(self.least - offset))


def scan(batches: Iterable[Any], schema: Any, target: str | None) -> dict[str, ColumnScan]:
    """The scan of each column of record batches with one Arrow schema, by name.

    Values are counted of texts and of the target.
    """
    columns = {}
    for entry in schema:
        counts = None
        if entry.name == target and (is_text(entry.type) or is_number(entry.type)):
            counts = ValueCounts(10 * MOST_CLASSES, give_up=True)
        elif is_text(entry.type):
            counts = ValueCounts(_MOST_COUNTED)
        columns[entry.name] = ColumnScan(entry.name, entry.type, values=counts)
    for batch in batches:
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            columns[name].add(column)
    return columns


def require_one_kind(scan: ColumnScan, where: str) -> None:
    """Raise BadInput if a column of texts has numbers in nearly all rows: a typing error, mostly.

    Few different numbers may well be categories, as in 1, 2, 3+, and digits alone are codes.
    """
    import numpy as np
    from pyarrow import compute

    assert scan.values is not None
    values, rows = scan.values.merged()
    plain = to_numpy(compute.match_substring_regex(values, _NUMBER)).astype(bool)
    numbers = plain | to_numpy(compute.match_substring_regex(values, ANY_NUMBER)).astype(bool)
    count = int(rows[numbers].sum())
    if np.count_nonzero(numbers) < _DIFFERENT or count < _NEARLY_ALL * rows.sum():
        return
    if not numbers.all():
        example = values[int(np.flatnonzero(~numbers)[0])].as_py()
        raise BadInput(
            f"{where} holds numbers in {count} rows and texts in {int(rows.sum()) - count}, such "
            f"as {example[:40]!r}; allowed: one kind, or data.csv.text_columns with this column"
        )
    if not plain.all() and count:
        examples = [
            values[int(np.flatnonzero(part)[0])].as_py()[:40]
            for part in (plain, ~plain)
            if part.any()
        ]
        raise BadInput(
            f"{where} holds numbers that are written in several ways, such as "
            f"{' and '.join(map(repr, examples))}; allowed: one way, or data.csv.text_columns with "
            "this column"
        )


def is_text(kind: Any) -> bool:
    """Whether an Arrow type holds texts."""
    import pyarrow as pa

    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def is_number(kind: Any) -> bool:
    """Whether an Arrow type holds numbers, or true and false."""
    import pyarrow as pa

    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )


def plain(column: Any) -> Any:
    """A chunk, with 64-bit offsets if it holds texts."""
    import pyarrow as pa

    return column.cast(pa.large_string()) if is_text(column.type) else column


def shown_type(kind: Any) -> str:
    """What a column of an Arrow type holds, in words for people."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    words = {
        "texts": is_text,
        "whole numbers": pa.types.is_integer,
        "numbers": lambda one: is_number(one) or pa.types.is_decimal(one),
        "dates": pa.types.is_date,
        "time stamps": pa.types.is_timestamp,
        "times of day": pa.types.is_time,
        "durations": pa.types.is_duration,
        "lists": pa.types.is_nested,
        "bytes": pa.types.is_binary,
        "no values": pa.types.is_null,
    }
    if pa.types.is_boolean(kind):
        return "true and false"
    return next((word for word, holds in words.items() if holds(kind)), str(kind))


def as_float32(column: Any, offset: int = 0) -> Array:
    """A chunk of numbers as float32: NaN for missing ones, 1 and 0 for true and false.

    `offset`: what is subtracted first, of whole numbers in 64 bits.
    """
    import pyarrow as pa

    if offset:
        return _distances(column, offset)
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    return filled(column.cast(pa.float32(), safe=False), "float32", math.nan)


def _distances(column: Any, offset: int) -> Array:
    import numpy as np
    import pyarrow as pa
    from pyarrow import compute

    if not pa.types.is_integer(column.type):
        return (filled(column.cast(pa.float64()), "float64", math.nan) - offset).astype(np.float32)
    unsigned = pa.types.is_unsigned_integer(column.type)
    wide = column.cast(pa.uint64() if unsigned else pa.int64())
    values = filled(wide, "uint64" if unsigned else "int64", 0).view(np.uint64)
    distances = (values - np.uint64(offset % 2**64)).view(np.int64).astype(np.float32)
    return np.where(to_numpy(compute.is_null(column)), np.float32(math.nan), distances)


def _require_utf8(column: Any, name: str) -> None:
    import pyarrow as pa

    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        raise ValueError(f"the column {name!r} is not UTF-8 text") from None
