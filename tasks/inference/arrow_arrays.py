"""Arrow arrays of Python values, made without `pyarrow.array`, which imports pandas.

That import would take most of the time of a chunk, as each has a process of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainwright.tasks.data.tables.arrow_numpy import to_arrow


def text_array(values: Sequence[str]) -> Any:
    """Texts. Raises AttributeError for other values."""
    import numpy as np
    import pyarrow as pa

    encoded = [value.encode() for value in values]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.large_string(), len(encoded), buffers)


def number_array(values: Sequence[float | None], dtype: str) -> Any:
    """Numbers, NaN for None. Raises TypeError or ValueError for other values."""
    import numpy as np

    numbers = np.array(values, dtype)
    if numbers.ndim != 1:
        raise ValueError("lists among numbers")
    return to_arrow(numbers)


def list_array(values: Sequence[Sequence[float]], dtype: str) -> Any:
    """Lists of numbers. Raises TypeError or ValueError for other values."""
    import numpy as np
    import pyarrow as pa

    ends = np.cumsum([0, *map(len, values)], dtype=np.int32)
    numbers = number_array([number for one in values for number in one], dtype)
    return pa.ListArray.from_arrays(to_arrow(ends), numbers)
