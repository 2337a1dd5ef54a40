"""Columns of dates as inputs: numbers, said; and columns that are left out."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from trainwright.tasks.data.dataset import load, say_changes
from trainwright.tasks.data.modalities.date_columns import PARTS, in_parts
from trainwright.tasks.errors import BadInput
from trainwright.tasks.inference.row_source import TableRows
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.validate.expectations import check

DAYS = [datetime.date(2026, 1, 1) + datetime.timedelta(days=row) for row in range(40)]
CLASSES = ["a", "b"] * 20


def write(folder: Path, **columns: Any) -> DataSpec:
    parquet.write_table(pa.table(columns), folder / "t.parquet")
    return DataSpec(uri=str(folder / "t.parquet"), missing="keep")


def test_dates_become_numbers_on_the_clock_of_their_zone(tmp_path: Path) -> None:
    moment = datetime.datetime(2026, 1, 4, 23, 30)
    zoned = pa.array([moment] * 40, pa.timestamp("us", "Europe/Berlin"))
    spec = write(tmp_path, day=[*DAYS[:-1], None], at=zoned, label=CLASSES)
    found = load(spec)
    names = [*(f"day {part}" for part in PARTS[:-1]), *(f"at {part}" for part in PARTS)]
    assert [one.name for one in found.schema.columns] == names
    assert found.schema.dates == {"day": names[:4], "at": names[4:]}
    rows = np.asarray(found.inputs["inputs"])
    assert rows[0].tolist() == [2026, 1, 1, 3, 2026, 1, 5, 0, 0]
    assert np.isnan(rows[-1][:4]).all()


def test_what_is_left_out_or_changed_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    empty = pa.array([None] * 40, pa.timestamp("us"))
    table = pa.table({"": range(40), "ended": empty, "day": DAYS, "label": CLASSES})
    parquet.write_table(table, tmp_path / "t.parquet")
    schema = load(DataSpec(uri=str(tmp_path / "t.parquet"))).schema
    assert schema.dropped == ["", "ended"]
    with caplog.at_level(logging.INFO):
        say_changes(schema)
    assert "a column has no name; it is left out" in caplog.text
    assert "column 'ended' has no values; it is left out" in caplog.text
    assert "column 'day' holds dates; the model gets 'day year', 'day month'" in caplog.text


def test_the_index_in_a_csv_file_of_pandas_is_no_input(tmp_path: Path) -> None:
    rows = "".join(f"{row},{row % 7},{row % 2}\n" for row in range(40))
    (tmp_path / "t.csv").write_text(",x,label\n" + rows)
    assert [one.name for one in load(DataSpec(uri=str(tmp_path / "t.csv"))).schema.columns] == ["x"]


@pytest.mark.parametrize("name", [None, "customer"])
def test_the_index_in_a_parquet_file_of_pandas_is_no_input(
    tmp_path: Path, name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    index = pd.Index([3 * row for row in range(40)], name=name)
    frame = pd.DataFrame({"x": [row % 7 for row in range(40)], "label": CLASSES}, index=index)
    frame.to_parquet(tmp_path / "t.parquet")
    spec = DataSpec(uri=str(tmp_path / "t.parquet"))
    schema = load(spec).schema
    assert [one.name for one in schema.columns] == ["x"]
    assert schema.index == [name or "__index_level_0__"]
    with caplog.at_level(logging.INFO):
        say_changes(schema)
    assert f"column {schema.index[0]!r} is the index of a pandas table" in caplog.text
    found = check(spec, 0, "inferred", [])
    assert found.success
    assert not [one for one in found.expectations if one.column in schema.index]
    # an index that the job names is a column
    frame.set_index("label").to_parquet(tmp_path / "t.parquet")
    assert load(spec).schema.index == []


def test_a_column_that_splits_by_time_stays_a_date(tmp_path: Path) -> None:
    spec = write(tmp_path, day=DAYS, x=range(40), label=CLASSES)
    found = load(spec.model_copy(update={"split": "time", "split_by": "day"}))
    assert found.schema.dates == {}
    assert found.split.validation[:].tolist() == list(range(32, 40))


def test_dates_beside_the_time_of_series_are_covariates(tmp_path: Path) -> None:
    hours = [datetime.datetime(2026, 1, 1) + datetime.timedelta(hours=row) for row in range(200)]
    due = [one.date() for one in hours]
    columns = {"at": hours, "due": due, "none": pa.nulls(200), "label": [*range(200)]}
    spec = write(tmp_path, **columns).model_copy(update={"time": "at", "horizon": 4})
    schema = load(spec).schema
    assert schema.dropped == ["none"]
    assert schema.inputs["covariates"] == (schema.inputs["history"][0] + 4, 4 + 4)


def test_rows_to_predict_hold_the_dates_themselves(tmp_path: Path) -> None:
    dates = {"day": [f"day {part}" for part in PARTS]}
    columns = [*dates["day"], "x"]
    model = load(write(tmp_path, day=DAYS, x=range(40), label=CLASSES)).schema
    model = model.model_copy(update={"dates": dates})
    parquet.write_table(pa.table({"x": [1.0, 2.0], "day": DAYS[:2]}), tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text("day,x\n2026-01-01,1\n2026-01-02,2\n")
    for name in ("t.parquet", "t.csv"):
        rows = TableRows.open(tmp_path / name, model, [])
        assert set(columns) == set(rows.schema.names)
        [batch] = rows.batches(columns, 10)
        assert [list(one.values()) for one in batch.to_pylist()] == [
            [2026, 1, 1, 3, 0, 1],
            [2026, 1, 2, 4, 0, 2],
        ]
    (tmp_path / "t.csv").write_text("day,x\nMonday,1\n")
    with pytest.raises(BadInput, match="'day' holds texts; the run's model takes dates"):
        TableRows.open(tmp_path / "t.csv", model, [])
    (tmp_path / "t.csv").write_text("x\n1\n")
    with pytest.raises(BadInput, match=r"t.csv has no column 'day'; the run's model takes its"):
        TableRows.open(tmp_path / "t.csv", model, [])


def test_a_column_of_dates_without_a_value_has_parts_without_one() -> None:
    batch = pa.RecordBatch.from_arrays([pa.nulls(2)], names=["day"])
    found = in_parts(batch, {"day": ["day year", "day month"]})
    assert found.to_pydict() == {"day year": [None, None], "day month": [None, None]}
