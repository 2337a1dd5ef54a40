"""The split of a dataset's rows into training and validation, and what follows from it.

A category's code for the model is its place among the values of the training part, from 1 on. The
stored codes are those of the whole table (`table_arrays`), so a split brings one small array for
each category column: the training part's code of each stored code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainwright.tasks.errors import BadInput

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_CHUNK_ROWS = 1 << 18


@dataclass(frozen=True)
class RowSplit:
    """Row numbers, rising, and the codes of the training part.

    `codes[k][c]` is the model's code of the k-th category column's stored code c; 0 if no training
    row has it.
    """

    train: Array
    validation: Array
    codes: list[Array] = field(default_factory=list)


def split_rows(rows: int, validation_fraction: float, seed: int) -> tuple[Array, Array]:
    """The row numbers for training and validation: disjoint, complete, non-empty, rising.

    Deterministic on every machine: NumPy's permutation by PCG64. Raises BadInput below two rows.
    """
    import numpy as np

    if rows < 2:
        raise BadInput(
            f"data.uri: got {rows} rows; allowed: at least 2, for training and validation"
        )
    held_out = min(max(round(rows * validation_fraction), 1), rows - 1)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(rows)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def training_codes(categories: Array, train: Array, sizes: Sequence[int]) -> list[Array]:
    """For each column of stored codes, the training part's codes: an array of its `size`."""
    import numpy as np

    present = [np.zeros(size, bool) for size in sizes]
    for begin in range(0, len(train), _CHUNK_ROWS):
        chunk = categories[train[begin : begin + _CHUNK_ROWS]]
        for column, found in enumerate(present):
            found[chunk[:, column]] = True
    codes = []
    for found in present:
        found[0] = False
        codes.append(np.where(found, np.cumsum(found), 0).astype(np.int64))
    return codes
