"""Tables that are read in batches: the same rows as at once, in the types that all rows fit."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from trainwright.tasks.data.tables import csv_form, table_source
from trainwright.tasks.data.tables.table_source import open_table, parquet_files


@pytest.mark.parametrize(
    ("late", "kind"),
    [
        ("7", pa.int64()),
        ("2.5", pa.float64()),
        ("many", pa.string()),
        ("", pa.int64()),
        ("2020-01-01", pa.string()),
    ],
)
def test_late_values_change_the_type_of_a_csv_column_as_if_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str, kind: Any
) -> None:
    path = tmp_path / "late.csv"
    path.write_text("a,b\n" + "1,x\n" * 100 + f"{late},y\n" + "3,z\n" * 100)
    whole = csv.read_csv(path, convert_options=csv.ConvertOptions(strings_can_be_null=True))
    monkeypatch.setattr(csv_form, "BLOCK_BYTES", 64)
    table = open_table(path)
    assert table.schema.field("a").type == kind
    assert table.read().equals(whole)


def test_a_column_that_begins_without_values_gets_the_type_of_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "late.csv"
    path.write_text("a,b\n" + ",x\n" * 100 + "2.5,y\n")
    monkeypatch.setattr(csv_form, "BLOCK_BYTES", 64)
    assert open_table(path).schema.field("a").type == pa.float64()


def test_texts_that_are_not_utf_8_are_refused_wherever_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bytes.csv"
    path.write_bytes(b"a,b\n" + b"k,x\n" * 100 + b"\xff\xfe,y\n")
    monkeypatch.setattr(csv_form, "BLOCK_BYTES", 64)
    with pytest.raises(ValueError, match="the column 'a' is not UTF-8 text"):
        open_table(path)


def test_a_folder_of_parquet_files_is_one_table_in_the_order_of_paths(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    tables = {
        "2.parquet": pa.table({"a": [3, 4], "c": ["x", None]}),
        "1.parquet": pa.table({"a": [1, 2], "c": ["u", "v"]}),
        "sub/0.PARQUET": pa.table(
            {"c": pa.array(["y", "z"]).dictionary_encode(), "a": pa.array([5.5, 6.0])}
        ),
        "_part.parquet": pa.table({"other": [1]}),
    }
    for name, table in tables.items():
        parquet.write_table(table, tmp_path / name)
    (tmp_path / "notes.txt").write_text("no table")
    found = open_table(tmp_path).read()
    assert found.to_pydict() == {
        "a": [1.0, 2.0, 3.0, 4.0, 5.5, 6.0],
        "c": ["u", "v", "x", None, "y", "z"],
    }
    assert len(parquet_files(tmp_path)) == 3


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"a": ["x", "y"]}, r"the column 'a' holds texts in 2\.parquet, whole numbers before it"),
        ({"b": [1, 2]}, r"2\.parquet and the files before it differ in the column 'a'"),
    ],
)
def test_parquet_files_that_do_not_fit_together_are_refused(
    tmp_path: Path, columns: dict[str, Any], said: str
) -> None:
    parquet.write_table(pa.table({"a": [1, 2]}), tmp_path / "1.parquet")
    parquet.write_table(pa.table(columns), tmp_path / "2.parquet")
    with pytest.raises(ValueError, match=said):
        open_table(tmp_path)


def test_an_array_is_a_table_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_source, "BATCH_ROWS", 3)
    people = np.array(
        [(n, f"é{n}", n % 2 == 0) for n in range(8)],
        dtype=[("age", "i4"), ("name", "U4"), ("even", "?")],
    )
    np.save(tmp_path / "people.npy", people)
    table = open_table(tmp_path / "people.npy")
    assert [batch.num_rows for batch in table.batches()] == [3, 3, 2]
    assert table.read().to_pylist()[5] == {"age": 5, "name": "é5", "even": False}


def test_a_parquet_file_of_one_row_group_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    path, random, count = tmp_path / "large.parquet", np.random.default_rng(0), 2_000_000
    table = pa.table({"a": random.normal(size=count), "b": random.normal(size=count)})
    parquet.write_table(table, path, row_group_size=count)
    del table
    gc.collect()
    before, most, rows = pa.total_allocated_bytes(), 0, 0
    for batch in open_table(path).batches():
        rows += len(batch)
        most = max(most, pa.total_allocated_bytes() - before)
    assert rows == count
    assert 0 < most < path.stat().st_size / 2
