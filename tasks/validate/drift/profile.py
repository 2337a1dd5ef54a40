"""The profile of a table, made in one pass over its record batches in bounded memory.

Numbers are counted in bins that do not depend on the data: see `Numbers`. When a column has more
than 512 bins, pairs of neighbours are merged, so that the width of a bin is relative to the size
of its numbers. The result is the same for every division of the rows into batches, and two
profiles can be brought to the same bins. Other values are counted by value; a column with more
than 100,000 different ones keeps the most frequent.

`random_halves` adds the noise of each statistic. `compare_profiles` compares two profiles.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainwright.tasks.runs.artefacts.data_profile import (
    Categories,
    ColumnProfile,
    DataProfile,
    Numbers,
)

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

BATCH_ROWS = 65_536
MOST_BINS = 512
MOST_VALUES = 1_000
MOST_COUNTED = 100_000


def profile(batches: Iterable[Any], target: str, *, classes: bool) -> DataProfile:
    """The profile of pyarrow record batches with one schema. `classes`: the target has classes."""
    columns: dict[str, _ColumnCounts] = {}
    rows = 0
    for batch in batches:
        rows += batch.num_rows
        for name, values in zip(batch.schema.names, batch.columns, strict=True):
            as_classes = classes and name == target
            columns.setdefault(name, _new_column(values.type, as_classes)).add(values)
    return DataProfile(
        rows=rows,
        target=target,
        columns={name: column.profile() for name, column in columns.items()},
    )


def _new_column(kind: Any, as_classes: bool) -> _ColumnCounts:
    import pyarrow as pa

    numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if numeric and not as_classes:
        return _NumberColumn()
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return _ValueColumn() if numeric or text or pa.types.is_boolean(kind) else _ColumnCounts()


@dataclass
class _ColumnCounts:
    """Counts rows without a value only."""

    rows: int = 0
    nulls: int = 0

    def add(self, values: Any) -> None:
        self.rows += len(values)
        self.nulls += values.null_count

    def profile(self) -> ColumnProfile:
        return ColumnProfile(rows=self.rows, nulls=self.nulls)


@dataclass
class _NumberColumn(_ColumnCounts):
    bins: Bins | None = None
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: Any) -> None:
        """Add the mean and sum of squared deviations as Chan, Golub and LeVeque (1979), eq. 2.1."""
        import numpy as np
        import pyarrow as pa

        array = values.cast(pa.float64(), safe=False).drop_null().to_numpy(zero_copy_only=False)
        numbers = array[np.isfinite(array)]
        before, added = self.rows - self.nulls, len(numbers)
        self.rows += len(values)
        self.nulls += len(values) - added
        if not added:
            return
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(numbers.mean())
            squares = float(np.square(numbers - mean).sum())
            step = np.float64(mean) - self.mean
            self.squares += float(squares + step**2 * before * added / (before + added))
            self.mean += float(step * added / (before + added))
        bins = Bins.of(numbers, self.bins.shift if self.bins else 0)
        self.bins = bins if self.bins is None else self.bins.with_more(bins)

    def profile(self) -> ColumnProfile:
        numbers = None
        if self.bins is not None:
            variance = self.squares / (self.rows - self.nulls)
            numbers = Numbers(
                shift=self.bins.shift,
                keys=self.bins.keys.tolist(),
                counts=self.bins.counts.tolist(),
                mean=self.mean if math.isfinite(self.mean) else math.inf,
                deviation=math.sqrt(variance) if math.isfinite(variance) else math.inf,
            )
        return ColumnProfile(rows=self.rows, nulls=self.nulls, numbers=numbers)


@dataclass
class _ValueColumn(_ColumnCounts):
    counts: Counter[str] = field(default_factory=Counter)
    rest: int = 0

    def add(self, values: Any) -> None:
        import pyarrow as pa
        from pyarrow import compute

        if pa.types.is_floating(values.type):
            values = compute.if_else(compute.is_finite(values), values, None)
            whole = compute.all(compute.equal(values, compute.floor(values))).as_py()
            values = values.cast(pa.int64(), safe=False) if whole else values
        super().add(values)
        for one in compute.value_counts(values.drop_null().cast(pa.large_string())):
            self.counts[one["values"].as_py()] += one["counts"].as_py()
        if len(self.counts) > MOST_COUNTED:
            kept = _most_frequent(self.counts, MOST_COUNTED // 2)
            self.rest += self.counts.total() - sum(kept.values())
            self.counts = Counter(kept)

    def profile(self) -> ColumnProfile:
        kept = _most_frequent(self.counts, MOST_VALUES)
        rest = self.rest + self.counts.total() - sum(kept.values())
        values = Categories(counts=kept, rest=rest) if self.counts else None
        return ColumnProfile(rows=self.rows, nulls=self.nulls, categories=values)


def _most_frequent(counts: Counter[str], most: int) -> dict[str, int]:
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most])


@dataclass(frozen=True)
class Bins:
    """Counts of numbers by key, as in `Numbers`."""

    shift: int
    keys: Array
    counts: Array

    @classmethod
    def of(cls, numbers: Array, shift: int) -> Bins:
        """The bins of finite numbers, merged at least `shift` times."""
        import numpy as np

        bits = (numbers.astype(np.float64) + 0.0).view(np.int64)  # -0.0 becomes 0.0
        ordered = np.where(bits < 0, bits ^ np.int64(2**63 - 1), bits)
        keys, counts = np.unique(ordered >> shift, return_counts=True)
        return cls(shift, keys, counts)._limited()

    @classmethod
    def kept(cls, numbers: Numbers) -> Bins:
        """The bins in a profile."""
        import numpy as np

        keys, counts = np.array(numbers.keys, np.int64), np.array(numbers.counts, np.int64)
        return cls(numbers.shift, keys, counts)

    def with_more(self, other: Bins) -> Bins:
        """The bins of both."""
        import numpy as np

        one, two = self.merged_to(other.shift), other.merged_to(self.shift)
        keys, places = np.unique(np.concatenate([one.keys, two.keys]), return_inverse=True)
        counts = np.zeros(len(keys), np.int64)
        np.add.at(counts, places, np.concatenate([one.counts, two.counts]))
        return Bins(one.shift, keys, counts)._limited()

    def merged_to(self, shift: int) -> Bins:
        """The same with wider bins; unchanged if they are as wide already."""
        import numpy as np

        if shift <= self.shift:
            return self
        keys, first = np.unique(self.keys >> (shift - self.shift), return_index=True)
        return Bins(shift, keys, np.add.reduceat(self.counts, first))

    def _limited(self) -> Bins:
        bins = self
        while len(bins.keys) > MOST_BINS:
            bins = bins.merged_to(bins.shift + 1)
        return bins
