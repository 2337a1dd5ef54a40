"""Between Arrow and NumPy, without importing pandas as Arrow's own functions do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def to_arrow(array: Array) -> Any:
    """A one-dimensional array as an Arrow array. Unlike `pa.array`, this does not import pandas."""
    import numpy as np
    import pyarrow as pa

    if array.dtype.kind in "US":
        texts = np.char.encode(array, "utf-8") if array.dtype.kind == "U" else array
        ends = np.concatenate([[0], np.cumsum(np.char.str_len(texts))]).astype(np.int64)
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(texts.tolist()))]
        return pa.Array.from_buffers(pa.large_string(), len(array), buffers)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"it holds {array.dtype}; allowed: numbers, texts, true and false")
    kind = np.dtype(np.uint8) if array.dtype.kind == "b" else array.dtype.newbyteorder("=")
    values = pa.py_buffer(np.ascontiguousarray(array, dtype=kind))
    column = pa.Array.from_buffers(pa.from_numpy_dtype(kind), len(array), [None, values])
    return column.cast(pa.bool_()) if array.dtype.kind == "b" else column


def to_numpy(column: Any) -> Array:
    """A column without missing values as an array of numbers; true and false become 1 and 0.

    Unlike Arrow's `to_numpy`, this does not import pandas.
    """
    import numpy as np
    import pyarrow as pa

    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    return np.from_dlpack(
        column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    )


def filled(column: Any, dtype: str, missing: float) -> Array:
    """An Arrow array of numbers of this type (not true and false), with a value for missing ones.

    Unlike Arrow's `fill_null`, this does not import pandas.
    """
    import numpy as np
    from pyarrow import compute

    if not column.null_count:
        return to_numpy(column)
    values = np.frombuffer(column.buffers()[1], dtype)[column.offset : column.offset + len(column)]
    return np.where(to_numpy(compute.is_null(column)), np.array(missing, dtype), values)
