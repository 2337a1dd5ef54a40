"""Columns of dates and time stamps that are inputs: each becomes columns of numbers.

The column `sold` becomes `sold year`, `sold month`, `sold day`, `sold weekday` (Monday is 0) and,
of time stamps, `sold hour`; on the clock of the stamps' time zone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PARTS = ("year", "month", "day", "weekday", "hour")
DateParts = Mapping[str, Sequence[str]]
"""by column of dates: the names of its first parts, in the order of `PARTS`"""


def date_parts(schema: Any, kept: Sequence[str | None] = ()) -> dict[str, list[str]]:
    """The parts of each column of dates in an Arrow schema, except those `kept`."""
    import pyarrow as pa

    found = {}
    for one in schema:
        if one.name not in kept and is_date(one.type):
            parts = PARTS if pa.types.is_timestamp(one.type) else PARTS[:-1]
            found[one.name] = [f"{one.name} {part}" for part in parts]
    return found


def is_date(kind: Any) -> bool:
    """Whether an Arrow type holds dates or time stamps."""
    import pyarrow as pa

    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def used_dates(dates: DateParts, dropped: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The columns of dates with a value, and `dropped` with the others in place of their parts."""
    used = {name: list(parts) for name, parts in dates.items() if parts[0] not in dropped}
    parts = {part for one in dates.values() for part in one}
    return used, [
        *(one for one in dropped if one not in parts),
        *(name for name in dates if name not in used),
    ]


def schema_in_parts(schema: Any, dates: DateParts) -> Any:
    """An Arrow schema with the parts of these columns in their place."""
    import pyarrow as pa

    fields = []
    for one in schema:
        parts = dates.get(one.name)
        fields += [one] if parts is None else [pa.field(part, pa.int64()) for part in parts]
    return pa.schema(fields)


def in_parts(batch: Any, dates: DateParts) -> Any:
    """A record batch with the parts of these columns in their place."""
    import pyarrow as pa
    from pyarrow import compute

    wanted = (compute.year, compute.month, compute.day, compute.day_of_week, compute.hour)
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name not in dates:
            columns.append(column)
            continue
        if not pa.types.is_timestamp(column.type):  # dates have no hour; or there are only nulls
            column = column.cast(pa.timestamp("ms"))
        columns += [part(column) for part, _ in zip(wanted, dates[name], strict=False)]
    return pa.RecordBatch.from_arrays(columns, schema=schema_in_parts(batch.schema, dates))
