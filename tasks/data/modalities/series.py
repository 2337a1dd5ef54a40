"""Time series of a table, cut into windows: a history and the horizon that follows it.

The rows are sorted by series and time once. A window is the number of its first row, so that all
windows share the arrays; a batch copies only its own windows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainwright.tasks import progress
from trainwright.tasks.data.modalities.seasons import chosen_history, chosen_horizon, season_of
from trainwright.tasks.data.modalities.series_order import order_of, series_codes
from trainwright.tasks.data.modalities.time_steps import (
    as_stamps,
    calendar,
    clock_times,
    shown_stamp,
    step_of,
)
from trainwright.tasks.data.tables.column_scan import as_float32, is_number, shown_type
from trainwright.tasks.data.tables.table_source import listed
from trainwright.tasks.errors import BadInput

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SeriesTable:
    """The series of a table, sorted by series and time. All arrays have one entry per row.

    `codes` number the series from 0 in the order of `names`; a table of one series has no names.
    `utc` and `shown` are the time stamps of `time_steps.clock_times`, `covariates` (rows, n).
    """

    codes: Array
    names: list[str]
    utc: Array
    shown: Array
    values: Array
    covariates: Array
    zone: str | None = None
    """the stamps' time zone"""


@dataclass(frozen=True)
class WindowParts:
    """A part of each window of an array, as an array (windows, length, …) that copies nothing.

    The part is `length` rows of `values` from the window's start plus `begin` on.
    """

    values: Array
    starts: Array
    begin: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return (len(self.starts), self.length, *self.values.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its values."""
        kind: np.dtype[Any] = self.values.dtype
        return kind

    @property
    def nbytes(self) -> int:
        """The size of all parts, if they were copied."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, windows: Array) -> Array:
        """The parts of some windows, copied."""
        import numpy as np

        view = np.lib.stride_tricks.sliding_window_view(self.values, self.length, axis=0)
        parts = view[self.starts[windows] + self.begin]
        return np.ascontiguousarray(np.moveaxis(parts, -1, 1))


@dataclass(frozen=True)
class Windows:
    """All windows of a table's series, by arrays that may be mapped from files.

    `values` (rows) and `covariates` (rows, calendar and known columns) are float32, sorted by
    series and time. `starts` has the first row of each window: `train_windows` for training, then
    those for validation. `series` has the number of each window's series in `names`, from 1; 0 if
    the series has no window for training. It is None if the table has one series without a name.
    """

    values: Array
    covariates: Array
    starts: Array
    series: Array | None
    names: list[str]
    train_windows: int
    history: int
    horizon: int

    def parts(self) -> dict[str, WindowParts]:
        """`history` (windows, history); `covariates` (windows, history + horizon, columns)."""
        length = self.history + self.horizon
        return {
            "history": WindowParts(self.values, self.starts, 0, self.history),
            "covariates": WindowParts(self.covariates, self.starts, 0, length),
        }

    def inputs(self) -> dict[str, WindowParts | Array]:
        """What a model gets of each window: its parts, and perhaps `series`."""
        series = {} if self.series is None else {"series": self.series}
        return {**self.parts(), **series}

    def targets(self) -> WindowParts:
        """The values to predict (windows, horizon)."""
        return WindowParts(self.values, self.starts, self.history, self.horizon)


def series_table(
    table: Any, *, time: str, target: str, series: str | None, uri: str
) -> SeriesTable:
    """The series of a table, whose rows it sorts. The remaining columns are covariates.

    Raises BadInput for time stamps that can't be used or occur twice, and for missing values.
    """
    import numpy as np

    for field, name in (("time", time), ("target", target), ("series", series)):
        if name is not None and name not in table.column_names:
            raise BadInput(
                f"data.{field}: got {name!r}; "
                f"allowed: a column of {uri}: {listed(table.column_names)}"
            )
    if not table.num_rows:
        raise BadInput(f"data.uri: {uri} has no rows; allowed: a table of time series")
    where = f"data.time: {uri}: column {time!r}"
    stamps = as_stamps(table.column(time), where)
    utc, shown = clock_times(stamps)
    codes, names = series_codes(table, series, f"data.series: {uri}")
    values = _numbers(table, target, uri)
    if len(values) and (values == values[0]).all():
        raise BadInput(
            f"data.target: {target!r} is {values[0]:g} in all {len(values)} rows; "
            "allowed: numbers that differ"
        )
    known = [name for name in table.column_names if name not in (time, target, series)]
    covariates = np.empty((len(utc), len(known)), dtype=np.float32)
    for number, name in enumerate(known):
        covariates[:, number] = _numbers(table, name, uri)
    order = order_of(utc, shown, codes, names, where)
    if (np.diff(order) < 0).any():
        message = f"{uri}: the rows are sorted by {f'{series} and ' if series else ''}{time}"
        progress.emit("notice", message=message)
    return SeriesTable(
        codes[order],
        names,
        utc[order],
        shown[order],
        values[order],
        covariates[order],
        stamps.type.tz,
    )


def _numbers(table: Any, name: str, uri: str) -> Array:
    """A column of numbers as float32. Raises BadInput, with the row, for any other value."""
    import numpy as np

    column = table.column(name)
    where = f"data.uri: {uri}: column {name!r}"
    if not is_number(column.type):
        raise BadInput(f"{where} holds {shown_type(column.type)}; allowed for forecasting: numbers")
    values: Array = np.concatenate([as_float32(chunk) for chunk in column.chunks])
    wrong = ~np.isfinite(values)
    if wrong.any():
        raise BadInput(
            f"{where}: {int(wrong.sum())} of {len(values)} values are missing or infinite, "
            f"the first in row {int(np.argmax(wrong))}; allowed: none"
        )
    return values


def windows_of(
    table: SeriesTable,
    *,
    horizon: int | None,
    history: int | None,
    validation_fraction: float,
    uri: str,
) -> Windows:
    """All windows of the series, split by time.

    The last `validation_fraction` of the time span is for validation. A window is for validation
    if its whole horizon lies there, for training if its whole horizon lies before; other windows
    are left out. `horizon` and `history` are the job's, or found (see `seasons`). Raises BadInput
    if steps differ, a series is too short, or no window is left for a part.
    """
    import numpy as np

    cut, season = _cut_and_season(table, validation_fraction, uri)
    counts = np.bincount(table.codes)
    horizon = chosen_horizon(horizon, season)
    shortest = int(np.bincount(table.codes, weights=table.utc < cut).min())
    history = chosen_history(history, horizon, season, shortest)
    _require_rows(table, counts, history, horizon, season, uri)
    until_end = np.repeat(np.cumsum(counts), counts) - np.arange(len(table.codes))
    starts = np.flatnonzero(until_end >= history + horizon)
    train = starts[table.utc[starts + history + horizon - 1] < cut]
    validation = starts[table.utc[starts + history] >= cut]
    for part, found in (("training", train), ("validation", validation)):
        if not len(found):
            raise BadInput(
                f"data.validation_fraction: got {validation_fraction:g}, which splits the time at "
                f"{shown_stamp(cut)}; no window of {history} + {horizon} steps is left for {part}; "
                "allowed: another share, or a smaller data.history or data.horizon"
            )
    kept = np.concatenate([train, validation])
    trained = np.zeros(len(counts), dtype=np.int32)
    trained[table.codes[train]] = 1
    codes = np.cumsum(trained, dtype=np.int32) * trained
    return Windows(
        table.values,
        np.concatenate([calendar(table.shown), table.covariates], axis=1),
        kept,
        codes[table.codes[kept]] if table.names else None,
        [name for name, one in zip(table.names, trained, strict=False) if one],
        len(train),
        history,
        horizon,
    )


def _cut_and_season(
    table: SeriesTable, validation_fraction: float, uri: str
) -> tuple[int, int | None]:
    """Where the validation part begins (microseconds, UTC), and the season before it in steps."""
    import numpy as np

    step = step_of(table.utc, table.shown, table.codes, f"data.time: {uri}")
    first, last = int(table.utc.min()), int(table.utc.max())
    last_step = int(np.diff(table.utc)[np.diff(table.codes) == 0][-1])
    cut = first + round((1 - validation_fraction) * (last + last_step - first))
    ends = np.cumsum(np.bincount(table.codes))
    trained = table.utc < cut
    parts = [
        part[kept]
        for part, kept in zip(
            np.split(table.values, ends[:-1]), np.split(trained, ends[:-1]), strict=True
        )
    ]
    return cut, season_of(parts, step.seasons)


def _require_rows(
    table: SeriesTable, counts: Array, history: int, horizon: int, season: int | None, uri: str
) -> None:
    import numpy as np

    least = int(np.argmin(counts))
    if counts[least] >= history + horizon:
        return
    of = f"series {table.names[least]!r} has" if table.names else "the series has"
    seasons = f" (the series repeat themselves every {season})" if season else ""
    raise BadInput(
        f"data.uri: {uri}: {of} {counts[least]} rows; allowed: at least {history + horizon}, for a "
        f"history of {history} steps{seasons} and a horizon of {horizon}"
    )
