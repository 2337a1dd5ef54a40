"""A table of time series as what is stored of it: its windows and their schema."""

from __future__ import annotations

from typing import Any

from trainwright.tasks.data.modalities.series import Windows, series_table, windows_of
from trainwright.tasks.data.modalities.time_steps import step_of
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.data_schema import Column, DataSchema, TimeStamps
from trainwright.tasks.spec.data_spec import DataSpec


def forecast_windows(table: Any, sha256: str, spec: DataSpec) -> tuple[Windows, DataSchema]:
    """The windows of a table's series, and the schema with the sizes of both parts.

    Raises BadInput if the series can't be used.
    """
    assert spec.time is not None
    if spec.task not in (None, "forecasting"):
        raise BadInput(
            f"data.task: got {spec.task}; allowed for a table with data.time: forecasting"
        )
    if spec.split != "rows":
        raise BadInput(f"data.split: got {spec.split}; series are split by data.time already")
    table, dropped = _without_empty(table, spec)
    found = series_table(
        table, time=spec.time, target=spec.target, series=spec.series, uri=spec.uri
    )
    windows = windows_of(
        found,
        horizon=spec.horizon,
        history=spec.history,
        validation_fraction=spec.validation_fraction,
        uri=spec.uri,
    )
    inputs, count = windows.inputs(), len(windows.starts)
    step = step_of(found.utc, found.shown, found.codes, f"data.time: {spec.uri}")
    schema = DataSchema(
        task="forecasting",
        rows=count,
        train_rows=windows.train_windows,
        validation_rows=count - windows.train_windows,
        inputs={name: tuple(one.shape[1:]) for name, one in inputs.items()},
        input_dtypes={name: "int64" if name == "series" else "float32" for name in inputs},
        target=spec.target,
        target_dtype="float32",
        target_shape=(windows.horizon,),
        columns=_columns(table.column_names, spec, windows.names),
        dropped=dropped,
        stamps=TimeStamps(zone=found.zone, step_us=step.microseconds, step_months=step.months),
        sha256=sha256,
    )
    return windows, schema


def _without_empty(table: Any, spec: DataSpec) -> tuple[Any, list[str]]:
    """The table without covariates that have no value, and their names."""
    used = (spec.time, spec.target, spec.series)
    empty = [
        name
        for name, column in zip(table.column_names, table.columns, strict=True)
        if name not in used and 0 < len(column) == column.null_count and spec.missing != "refuse"
    ]
    return table.drop_columns(empty), empty


def _columns(names: list[str], spec: DataSpec, series: list[str]) -> list[Column]:
    """The time, the series and the known covariates, in the table's order."""
    found = []
    for name in names:
        if name == spec.series:
            found.append(Column(name=name, kind="series", vocabulary=len(series) + 1))
        elif name != spec.target:
            found.append(Column(name=name, kind="time" if name == spec.time else "number"))
    return found
