"""Time stamps of a table: their steps, the seasons that a step may have, calendar columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainwright.tasks.data.tables.arrow_numpy import to_arrow
from trainwright.tasks.data.tables.column_scan import is_text, shown_type
from trainwright.tasks.errors import BadInput

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

CALENDAR = ("hour", "weekday", "month day", "month")

_SECOND = 1_000_000
_HOUR = 3_600 * _SECOND
_DAY = 24 * _HOUR
_WEEK = 7 * _DAY


@dataclass(frozen=True)
class TimeStep:
    """The constant distance of a series' time stamps: microseconds, or else calendar months."""

    microseconds: int = 0
    months: int = 0

    @property
    def seasons(self) -> list[int]:
        """The numbers of steps after which a series may repeat itself, rising.

        An hour, a day, a week and a year, those that are a whole number of steps (at least two).
        Days have a year of 365 steps, weeks one of 52.
        """
        if self.months:
            return [12 // self.months] if 12 % self.months == 0 and self.months < 12 else []
        periods = [_HOUR, _DAY, _WEEK] + ([365 * _DAY] if self.microseconds == _DAY else [])
        whole = [p // self.microseconds for p in periods if p % self.microseconds == 0]
        return [52] if self.microseconds == _WEEK else [count for count in whole if count > 1]

    def __str__(self) -> str:
        if self.months:
            return _counted(self.months, "month")
        for size, unit in ((_DAY, "day"), (_HOUR, "hour"), (60 * _SECOND, "minute")):
            if self.microseconds % size == 0:
                return _counted(self.microseconds // size, unit)
        return f"{self.microseconds / _SECOND:g} s"


def _counted(count: int, unit: str) -> str:
    return f"{count} {unit}{'s' if count > 1 else ''}"


def read_stamps(column: Any, where: str) -> tuple[Array, Array]:
    """A column's time stamps as `clock_times`. Raises BadInput as `as_stamps`."""
    return clock_times(as_stamps(column, where))


def as_stamps(column: Any, where: str) -> Any:
    """A column's time stamps in microseconds, with the column's time zone; of texts, UTC or none.

    Raises BadInput, with the row (the first is 0), if a value is missing or is not a time stamp.
    """
    import pyarrow as pa
    from pyarrow import compute

    kind = column.type
    if is_text(kind):
        column = _parsed(column, where)
    elif not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        raise BadInput(
            f"{where} holds {shown_type(kind)}; allowed: time stamps, such as 2026-01-31T12:00"
        )
    if column.null_count:
        row = compute.index(column.is_null(), True).as_py()
        raise BadInput(
            f"{where}: {column.null_count} of {len(column)} time stamps are missing, "
            f"the first in row {row}; allowed: none"
        )
    try:
        return column.cast(pa.timestamp("us", getattr(column.type, "tz", None)))
    except pa.ArrowInvalid:
        raise BadInput(f"{where} is finer than microseconds, or too far away in time") from None


def clock_times(stamps: Any) -> tuple[Array, Array]:
    """Arrow time stamps in microseconds (int64): of UTC, and as a clock there shows them.

    The two differ for stamps with a time zone only.
    """
    import numpy as np
    import pyarrow as pa
    from pyarrow import compute

    local = compute.local_timestamp(stamps) if stamps.type.tz is not None else stamps
    utc, shown = (np.from_dlpack(one.cast(pa.int64()).combine_chunks()) for one in (stamps, local))
    return utc, shown


def _parsed(column: Any, where: str) -> Any:
    """Texts as time stamps (ISO 8601), all with a zone or all without, as the first one."""
    import pyarrow as pa

    texts = column.drop_null()
    kind = pa.timestamp("us", "UTC" if len(texts) and not _is_stamp(texts[0]) else None)
    try:
        return column.cast(kind)
    except pa.ArrowInvalid:
        row = next(row for row, text in enumerate(column) if not _is_stamp(text, kind))
    raise BadInput(
        f"{where} holds {str(column[row])[:40]!r} in row {row}; "
        "allowed: time stamps, such as 2026-01-31T12:00, all with a zone or all without"
    )


def _is_stamp(text: Any, kind: Any = None) -> bool:
    import pyarrow as pa

    try:
        text.cast(kind or pa.timestamp("us"))
    except pa.ArrowInvalid:
        return False
    return True


def step_of(utc: Array, shown: Array, codes: Array, where: str) -> TimeStep:
    """The step between the time stamps of series, which are sorted by series and time.

    `codes` number the series. Raises BadInput if steps differ, with the first place where one does,
    or if no series has two stamps.
    """
    import numpy as np

    same = codes[1:] == codes[:-1]
    steps = np.diff(utc)[same]
    if not len(steps):
        raise BadInput(f"{where}: no series has two time stamps; allowed: at least two")
    if (steps == steps[0]).all():
        return TimeStep(microseconds=int(steps[0]))
    stamps = shown.view("datetime64[us]")
    months = stamps.astype("datetime64[M]")
    next_day = stamps + np.timedelta64(1, "D")
    into_month = stamps - months
    until_next = next_day - next_day.astype("datetime64[M]")  # constant at the end of each month
    ends = (next_day.astype("datetime64[M]") > months).all()
    counts = np.diff(months.astype(np.int64))[same]
    constant = (into_month == into_month[0]).all() or (ends and (until_next == until_next[0]).all())
    if constant and (counts == counts[0]).all():
        return TimeStep(months=int(counts[0]))
    sizes, frequency = np.unique(steps, return_counts=True)
    usual = TimeStep(microseconds=int(sizes[np.argmax(frequency)]))
    odd = np.flatnonzero(same)[np.flatnonzero(steps != usual.microseconds)[0]]
    raise BadInput(
        f"{where}: most time stamps are {usual} apart, but {shown_stamp(shown[odd])} is followed "
        f"by {shown_stamp(shown[odd + 1])}; allowed: equal steps within each series"
    )


def next_stamps(utc: Array, shown: Array, step: TimeStep, zone: str | None, count: int) -> Any:
    """The `count` time stamps after those of one series, which rise, as Arrow time stamps.

    Steps of months keep the day of the month, or its end if all stamps are at one.
    """
    import numpy as np
    import pyarrow as pa
    from pyarrow import compute

    numbers = np.arange(1, count + 1)
    if not step.months:
        return to_arrow(utc[-1] + step.microseconds * numbers).cast(pa.timestamp("us", zone))
    stamps, day = shown.view("datetime64[us]"), np.timedelta64(1, "D")
    months = stamps.astype("datetime64[M]")
    after = months[-1] + step.months * numbers
    if (stamps - months == stamps[0] - months[0]).all():
        times = after.astype("datetime64[us]") + (stamps[-1] - months[-1])
    else:
        of_day = stamps[-1] - stamps[-1].astype("datetime64[D]")
        times = (after + 1).astype("datetime64[us]") - day + of_day
    found = to_arrow(times.view(np.int64)).cast(pa.timestamp("us"))
    if zone is None:
        return found
    return compute.assume_timezone(found, zone, ambiguous="earliest", nonexistent="latest")


def shown_stamp(microseconds: int) -> str:
    """A time stamp for people, such as 2026-01-31 12:00:00."""
    import numpy as np

    text = str(np.datetime64(int(microseconds), "us")).replace("T", " ")
    return text.removesuffix(".000000")


def calendar(shown: Array) -> Array:
    """Calendar columns of time stamps, float32 (stamps, 4), each from -0.5 to 0.5.

    The columns are `CALENDAR`: the time of day, the day of the week (Monday is -0.5), the day of
    the month, the month.
    """
    import numpy as np

    stamps = shown.view("datetime64[us]")
    days, months = stamps.astype("datetime64[D]"), stamps.astype("datetime64[M]")
    day_numbers = days.astype(np.int64)
    parts = [
        (shown - day_numbers * _DAY) / _DAY,
        (day_numbers + 3) % 7 / 6,  # 1 January 1970 was a Thursday
        (days - months.astype("datetime64[D]")).astype(np.int64) / 30,
        months.astype(np.int64) % 12 / 11,
    ]
    return np.stack(parts, axis=1).astype(np.float32) - np.float32(0.5)
