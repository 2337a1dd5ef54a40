"""The split of a dataset's rows into training and validation: at random, by time or by group.

A random split is NumPy's permutation by PCG64, the same on every machine. If a class that has two
rows or more is missing in one part, rows are exchanged (`data.stratify`). The functions take a few
bytes of memory for each row, and read targets in chunks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainwright.tasks.data.tables.arrow_numpy import to_numpy
from trainwright.tasks.data.tables.column_scan import is_text, shown_type
from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.data_spec import DataSpec

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

CHUNK_ROWS = 1 << 18
MIN_ROWS = 10
"""The least rows for which a suite is inferred or a model recommended."""


def require_rows(rows: int) -> None:
    """Raise BadInput for fewer rows than a split needs."""
    if rows < 2:
        raise BadInput(
            f"data.uri: got {rows} rows; allowed: at least 2, for training and validation"
        )


def validation_rows(
    spec: DataSpec, seed: int, rows: int, classes: Any = None, keys: Any = None
) -> Array:
    """Which rows are held out for validation, as true and false.

    `classes`: each row's class number, if the targets are classes; `keys`: each row's time or
    group, if the job splits by it (see `split_keys`). Both are arrays, or files of them that can be
    sliced. Raises BadInput if that leaves a part empty.
    """
    require_rows(rows)
    count = min(max(round(rows * spec.validation_fraction), 1), rows - 1)
    if spec.split == "time":
        return _latest(keys[:rows], count, spec)
    if spec.split == "group":
        return _groups(keys[:rows], count, seed, spec)
    order = _order(rows, seed)
    if classes is not None and spec.stratify == "true":
        return _proportional(order, classes, count)
    held_out = _marked(rows, order[:count])
    if classes is not None and spec.stratify == "auto":
        _exchange(held_out, order, classes)
    return held_out


def _order(rows: int, seed: int) -> Array:
    """NumPy's `permutation(rows)`, in half the memory if the numbers fit into 32 bits."""
    import numpy as np

    order = np.arange(rows, dtype=np.int32 if rows < 2**31 else np.int64)
    np.random.Generator(np.random.PCG64(seed)).shuffle(order)
    return order


def _marked(rows: int, chosen: Array) -> Array:
    import numpy as np

    marked = np.zeros(rows, bool)
    marked[chosen] = True
    return marked


def _latest(keys: Array, count: int, spec: DataSpec) -> Array:
    """The rows from the time on that leaves about `count` of them; equal times stay together."""
    import numpy as np

    first = np.partition(keys, len(keys) - count)[len(keys) - count]
    held_out: Array = keys >= first
    if held_out.all():
        held_out = keys > first
    if not held_out.any():
        raise BadInput(
            f"data.split_by: {spec.split_by!r} is the same in all {len(keys)} rows; "
            "allowed: times that differ"
        )
    return held_out


def _groups(keys: Array, count: int, seed: int, spec: DataSpec) -> Array:
    """Random whole groups, as many as come closest to `count` rows."""
    import numpy as np

    groups, sizes = np.unique(keys, return_counts=True)
    if len(groups) < 2:
        raise BadInput(
            f"data.split_by: {spec.split_by!r} is the same in all {len(keys)} rows; "
            "allowed: at least two groups"
        )
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(groups))
    reached = np.cumsum(sizes[order])
    chosen = int(np.argmin(np.abs(reached[:-1] - count))) + 1
    return np.isin(keys, groups[order[:chosen]])


def _exchange(held_out: Array, order: Array, classes: Any) -> None:
    """Give each part a row of every class with at least two, in return for one of a common class.

    Nothing changes if each part has all classes already. A part grows by rows that the other one
    can't replace, because it has no class twice.
    """
    import numpy as np

    size = 1 + max(int(chunk.max()) for _, chunk in _chunks(classes))
    counts = np.zeros((2, size), np.int64)  # training, validation
    for begin, chunk in _chunks(classes):
        part = held_out[begin : begin + len(chunk)]
        counts[0] += np.bincount(chunk[~part], minlength=size)
        counts[1] += np.bincount(chunk[part], minlength=size)
    lacking = (counts.min(0) == 0) & (counts.sum(0) > 1)
    if not lacking.any():
        return
    rows = _first_rows(order, held_out, classes, lacking)
    for number in np.flatnonzero(lacking).tolist():
        to = int(counts[1, number] == 0)  # the part that lacks the class
        row = rows[number]
        held_out[row] = bool(to)
        counts[:, number] += (-1, 1) if to else (1, -1)
        common = int(np.argmax(counts[to]))
        if counts[to, common] > 1 and counts[1 - to, common] > 0:
            back = _one_row(order, held_out, classes, common, bool(to))
            held_out[back] = not to
            counts[:, common] += (1, -1) if to else (-1, 1)


def _first_rows(order: Array, held_out: Array, classes: Any, lacking: Array) -> dict[int, int]:
    """For each lacking class its first row in the random order."""
    import numpy as np

    place = np.empty(len(order), order.dtype)
    place[order] = np.arange(len(order), dtype=order.dtype)
    found: dict[int, tuple[int, int]] = {}
    for begin, chunk in _chunks(classes):
        for at in np.flatnonzero(lacking[chunk]).tolist():
            number, row = int(chunk[at]), begin + at
            found[number] = min(found.get(number, (len(order), 0)), (int(place[row]), row))
    return {number: row for number, (_, row) in found.items()}


def _one_row(order: Array, held_out: Array, classes: Any, number: int, part: bool) -> int:
    """The first row in the random order that is in a part and has a class."""
    import numpy as np

    for begin in range(0, len(order), CHUNK_ROWS):
        rows = order[begin : begin + CHUNK_ROWS]
        inside = rows[held_out[rows] == part]
        for row in inside.tolist():
            if int(np.asarray(classes[row : row + 1])[0]) == number:
                return int(row)
    raise AssertionError("the class has rows in this part")


def _proportional(order: Array, classes: Any, count: int) -> Array:
    """As many rows of each class as its share of `count`, the first in the random order."""
    import numpy as np

    shuffled = np.asarray(classes[: len(order)])[order]
    sizes = np.bincount(shuffled)
    exact = sizes * (count / len(order))
    wanted = np.floor(exact).astype(np.int64)
    wanted[np.argsort(wanted - exact, kind="stable")[: count - int(wanted.sum())]] += 1
    wanted = np.where(sizes > 1, np.clip(wanted, 1, np.maximum(sizes - 1, 1)), 0)
    by_class = np.argsort(shuffled, kind="stable")
    place = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    chosen = by_class[place < np.repeat(wanted, sizes)]
    return _marked(len(order), order[chosen] if len(chosen) else order[:count])


def _chunks(array: Any) -> Iterator[tuple[int, Array]]:
    for begin in range(0, len(array), CHUNK_ROWS):
        yield begin, array[begin : begin + CHUNK_ROWS]


def split_keys(column: Any, spec: DataSpec) -> Array:
    """A chunk of the column `split_by` as int64: times in their order, or a number by group.

    Raises BadInput for missing values, and for types without such an order.
    """
    import numpy as np
    import pyarrow as pa

    where = f"data.split_by: {spec.split_by!r}"
    kind = column.type
    if column.null_count:
        raise BadInput(f"{where}: {column.null_count} values are missing; allowed: none")
    if pa.types.is_temporal(kind) and not pa.types.is_duration(kind):
        bits = pa.int32() if kind.bit_width == 32 else pa.int64()
        return to_numpy(column.view(bits)).astype(np.int64)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return to_numpy(column).astype(np.int64)
    if pa.types.is_floating(kind):
        numbers = to_numpy(column).astype(np.float64) + 0.0  # -0.0 becomes 0.0
        if np.isnan(numbers).any():
            raise BadInput(f"{where} has NaN; allowed: none")
        bits = numbers.view(np.int64)
        return np.where(bits < 0, bits ^ np.int64(2**63 - 1), bits)
    if is_text(kind) and spec.split == "group":
        coded = column.dictionary_encode()
        return _hashes(coded.dictionary.to_pylist())[to_numpy(coded.indices)]
    raise BadInput(
        f"{where} holds {shown_type(kind)}; allowed: times or numbers, and texts for groups"
    )


def _hashes(texts: list[str]) -> Array:
    import numpy as np

    digests = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return np.frombuffer(b"".join(digests), np.int64)
