"""To which series the rows of a table belong, and their order by time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainwright.tasks.data.modalities.time_steps import shown_stamp
from trainwright.tasks.data.tables.column_scan import is_text, shown_type
from trainwright.tasks.errors import BadInput

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def order_of(utc: Array, shown: Array, codes: Array, names: list[str], where: str) -> Array:
    """The order of rows by series and time. Raises BadInput if a series has a time twice."""
    import numpy as np

    order: Array = np.lexsort((utc, codes))
    twice = (np.diff(utc[order]) == 0) & (np.diff(codes[order]) == 0)
    if twice.any():
        at = int(np.argmax(twice))
        of = f" of series {names[codes[order[at]]]!r}" if names else ""
        raise BadInput(
            f"{where}: rows {order[at]} and {order[at + 1]} both have "
            f"{shown_stamp(shown[order[at]])}{of}; allowed: each time once in a series"
        )
    return order


def series_codes(table: Any, series: str | None, where: str) -> tuple[Array, list[str]]:
    """The number of each row's series, and the names of the series, sorted as texts.

    Raises BadInput, which begins with `where`, if a name is missing or is no text or whole number.
    """
    import numpy as np
    import pyarrow as pa
    from pyarrow import compute

    if series is None:
        return np.zeros(table.num_rows, dtype=np.int64), []
    column = table.column(series)
    where = f"{where}: column {series!r}"
    kind = column.type
    if not (is_text(kind) or pa.types.is_integer(kind)):
        raise BadInput(f"{where} holds {shown_type(kind)}; allowed: texts or whole numbers")
    if column.null_count:
        row = compute.index(column.is_null(), True).as_py()
        raise BadInput(
            f"{where}: {column.null_count} of {len(column)} values are missing, "
            f"the first in row {row}; allowed: none"
        )
    texts = column.cast(pa.large_string())
    names = texts.unique()
    names = names.take(compute.array_sort_indices(names))
    codes = np.from_dlpack(compute.index_in(texts, value_set=names).combine_chunks())
    try:
        return codes.astype(np.int64), names.to_pylist()
    except UnicodeDecodeError:
        raise BadInput(f"{where} is not UTF-8 text") from None
