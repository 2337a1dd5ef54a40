"""Rows of time series to predict: checked as those of a training, and the rows that are forecast.

A series is as many known values of the target as the model takes, or more, then rows without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainwright.tasks import progress
from trainwright.tasks.data.modalities.series_order import order_of, series_codes
from trainwright.tasks.data.modalities.time_steps import (
    TimeStep,
    as_stamps,
    clock_times,
    next_stamps,
    shown_stamp,
    step_of,
)
from trainwright.tasks.data.tables.arrow_numpy import to_arrow
from trainwright.tasks.data.tables.column_scan import as_float32, is_text
from trainwright.tasks.errors import BadInput
from trainwright.tasks.inference.arrow_arrays import text_array
from trainwright.tasks.runs.artefacts.data_schema import DataSchema, TimeStamps

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_DATE_LENGTH = len("2026-01-31")


@dataclass(frozen=True)
class ForecastColumns:
    """The columns of a run's series, and the sizes of its windows."""

    time: str
    series: str | None
    known: list[str]
    """columns whose values are known for the horizon"""
    target: str
    history: int
    horizon: int
    stamps: TimeStamps | None
    """None for runs that did not keep it"""

    @classmethod
    def of(cls, schema: DataSchema) -> ForecastColumns:
        """Those of a schema that has a column of time stamps."""
        names: dict[str, list[str]] = {"time": [], "series": [], "number": []}
        for one in schema.columns:
            names[one.kind].append(one.name)
        return cls(
            names["time"][0],
            next(iter(names["series"]), None),
            names["number"],
            schema.target,
            schema.inputs["history"][0],
            schema.target_shape[0],
            schema.stamps,
        )


@dataclass(frozen=True)
class SeriesRows:
    """Rows of series, with those that are forecast."""

    columns: ForecastColumns
    rows: Any
    """an Arrow table: the given rows, and stamps after them that were left out"""
    future: dict[str, Array]
    """by series ('' for a table of one): the numbers of the rows that are forecast, by time"""

    @classmethod
    def of(cls, table: Any, columns: ForecastColumns, trained: list[str], where: str) -> SeriesRows:
        """Check a table. `trained`: the series in the training part; `where`: its file.

        Stamps of the horizon that are left out are added, if the model takes no other columns.
        Raises BadInput for rows that training would refuse, or of which no forecast can be made.
        """
        import numpy as np
        import pyarrow as pa

        table = _plain(table, columns)
        of_time = f"rows: {where}: column {columns.time!r}"
        stamps = as_stamps(table.column(columns.time), of_time)
        _require_zone(stamps.type.tz, columns, of_time)
        utc, shown = clock_times(stamps)
        codes, names = series_codes(table, columns.series, f"rows: {where}")
        order = order_of(utc, shown, codes, names, of_time)
        for name in columns.known:
            _values(table, name, where, may_miss=False)
        known = ~np.isnan(_values(table, columns.target, where, may_miss=True))
        parts = np.split(order, np.cumsum(np.bincount(codes))[:-1])
        for code, own in enumerate(parts):
            _require_history(known[own], shown[own], columns, _called(names, code), where)
        step = step_of(utc[order], shown[order], codes[order], of_time)
        _require_step(step, columns, of_time)
        _notice_unknown(names, trained, columns)
        future, added, total = {}, [], table.num_rows
        for code, own in enumerate(parts):
            rows = own[int(known[own].sum()) :][: columns.horizon]
            lacking = columns.horizon - len(rows)
            if lacking and columns.known:
                last = shown_stamp(shown[own[int(known[own].sum()) - 1]])
                raise BadInput(
                    f"rows: {where}: {_called(names, code)} has {len(rows) or 'no'} rows after "
                    f"the last known {columns.target!r}, at {last}; allowed: "
                    f"{columns.horizon} rows with an empty {columns.target!r} and known values of "
                    f"{', '.join(columns.known)}"
                )
            if lacking:
                times = next_stamps(utc[own], shown[own], step, stamps.type.tz, lacking)
                added.append(_new_rows(table, columns, times, own[0]))
            future[names[code] if names else ""] = np.concatenate(
                [rows, np.arange(total, total + lacking)]
            )
            total += lacking
        return cls(columns, pa.concat_tables([table, *added]), future)

    def for_model(self) -> Any:
        """The rows as a record batch; empty target values are null, stamps in the run's zone."""
        import pyarrow as pa
        from pyarrow import compute

        columns, rows = self.columns, self.rows
        target = rows.column(columns.target)
        if pa.types.is_floating(target.type):
            empty = pa.scalar(None, target.type)
            target = compute.if_else(compute.is_nan(target), empty, target)
            rows = rows.set_column(rows.column_names.index(columns.target), columns.target, target)
        zone = columns.stamps.zone if columns.stamps else None
        if zone is not None:
            column = rows.column(columns.time)
            stamps = as_stamps(column, "rows").cast(pa.timestamp("us", zone))
            if is_text(column.type):
                stamps = _as_texts(stamps, like="")
            rows = rows.set_column(rows.column_names.index(columns.time), columns.time, stamps)
        return rows.combine_chunks().to_batches()[0]

    def joined(self, predictions: Any) -> Any:
        """Predictions with a list of the horizon for each series, as one row for each step.

        Each row has the forecast row's series and time stamp. Other predictions stay as they are.
        """
        import numpy as np
        import pyarrow as pa

        columns, horizon = self.columns, self.columns.horizon
        futures = list(self._futures(predictions))
        lists = [name for name in predictions.column_names if _all_long(predictions, name, horizon)]
        if "prediction" not in lists or len(futures) != predictions.num_rows:
            return predictions
        rows = self.rows.take(to_arrow(np.concatenate(futures)))
        repeated = to_arrow(np.repeat(np.arange(len(futures)), horizon))
        found = {name: predictions.column(name).combine_chunks().flatten() for name in lists}
        for name in (columns.series, columns.time):
            if name is not None:
                found[f"{name} of the row" if name in found else name] = rows.column(name)
        for name in predictions.column_names:
            if name not in found:
                found[name] = predictions.column(name).take(repeated)
        return pa.table(found)

    def _futures(self, predictions: Any) -> Iterator[Array]:
        """The forecast rows of each prediction, as far as its series is known."""
        name = self.columns.series
        if name is None:
            yield from self.future.values()
        elif name in predictions.column_names:
            for one in predictions.column(name).to_pylist():
                if str(one) in self.future:
                    yield self.future[str(one)]


def _plain(table: Any, columns: ForecastColumns) -> Any:
    """The table without dictionaries; a target that holds nothing has a type."""
    import pyarrow as pa

    for place, one in enumerate(table.schema):
        if pa.types.is_dictionary(one.type):
            column = table.column(place).cast(one.type.value_type)
            table = table.set_column(place, one.name, column)
        elif pa.types.is_null(one.type) and one.name == columns.target:
            table = table.set_column(place, one.name, table.column(place).cast(pa.float64()))
    return table


def _called(names: list[str], code: int) -> str:
    return f"series {names[code]!r}" if names else "the series"


def _require_zone(zone: str | None, columns: ForecastColumns, where: str) -> None:
    if columns.stamps is None or (columns.stamps.zone is None) == (zone is None):
        return
    given, wanted = (
        f"the time zone {one}" if one is not None else "no time zone"
        for one in (zone, columns.stamps.zone)
    )
    allowed = "without one" if columns.stamps.zone is None else "with one"
    raise BadInput(
        f"{where} has {given}, but the run's data {wanted}; allowed: time stamps {allowed}"
    )


def _require_step(step: TimeStep, columns: ForecastColumns, where: str) -> None:
    if columns.stamps is None:
        return
    wanted = TimeStep(columns.stamps.step_us, columns.stamps.step_months)
    one_month = step.microseconds and wanted.months  # too few stamps to see months
    if step != wanted and not one_month:
        raise BadInput(
            f"{where}: time stamps are {step} apart, but {wanted} in the run's data; allowed: "
            "the run's step"
        )


def _values(table: Any, name: str, where: str, may_miss: bool) -> Array:
    """A column as float32, NaN for missing values. Raises BadInput for infinite ones."""
    import numpy as np
    import pyarrow as pa

    column = table.column(name)
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    values: Array = np.concatenate([as_float32(chunk) for chunk in column.chunks])
    for what, wrong in (("an infinite number", np.isinf(values)), ("no value", np.isnan(values))):
        if wrong.any() and not (may_miss and what == "no value"):
            raise BadInput(
                f"rows: {where}: the column {name!r} has {what} in row {int(np.argmax(wrong))} "
                "(from 0); allowed: a value, as in the run's data"
            )
    return values


def _require_history(
    known: Array, shown: Array, columns: ForecastColumns, called: str, where: str
) -> None:
    """Raises BadInput if a series, by time, has too few known values or one after missing ones."""
    count, target = int(known.sum()), columns.target
    if not known[:count].all():
        raise BadInput(
            f"rows: {where}: {called} has no {target!r} at {shown_stamp(shown[known.argmin()])}, "
            "but later ones; allowed: empty values after the last known one only"
        )
    if count < columns.history:
        raise BadInput(
            f"rows: {where}: {called} has {count} known values of {target!r}; allowed: at least "
            f"{columns.history}, the history that the run's model takes"
        )


def _notice_unknown(names: list[str], trained: list[str], columns: ForecastColumns) -> None:
    unknown = sorted(set(names) - set(trained))
    if trained and unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        message = (
            f"rows: {columns.series} {unknown[0]!r}{more} is not in the run's training part; "
            "the model predicts it as an unknown series"
        )
        progress.emit("notice", message=message)


def _new_rows(table: Any, columns: ForecastColumns, times: Any, like: int) -> Any:
    """Rows of these times, without a target, in the series of row `like`."""
    import numpy as np
    import pyarrow as pa

    found = []
    for one in table.schema:
        if one.name == columns.time:
            first = table.column(one.name)[0].as_py()
            found.append(_as_texts(times, first) if is_text(one.type) else times.cast(one.type))
        elif one.name == columns.series:
            found.append(table.column(one.name).take(to_arrow(np.full(len(times), like))))
        else:
            found.append(pa.nulls(len(times), one.type))
    return pa.table(found, schema=table.schema)


def _as_texts(stamps: Any, like: str) -> Any:
    """Time stamps as ISO 8601 texts, in the form of a text as far as possible."""
    texts = [stamp.isoformat("T" if "T" in like else " ") for stamp in stamps.to_pylist()]
    if len(like) == _DATE_LENGTH:
        texts = [text[:_DATE_LENGTH] for text in texts]
    return text_array(texts)


def _all_long(table: Any, name: str, length: int) -> bool:
    """Whether a column holds lists of this length only."""
    import pyarrow as pa
    from pyarrow import compute

    column = table.column(name)
    if not pa.types.is_list(column.type) or column.null_count:
        return False
    return bool(compute.all(compute.equal(compute.list_value_length(column), length)).as_py())
