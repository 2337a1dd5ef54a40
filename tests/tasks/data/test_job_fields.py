"""Fields that no content of the data could fit are refused by the names of columns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from trainwright.tasks.data.job_fields import require_job_fields
from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.csv_spec import CsvSpec
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.validate.check import validate

TABLE = pa.table({"a": [1, 2], "words": ["x y", "z"], "when": ["2026-01-01"] * 2, "label": [0, 1]})
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"split": "group", "split_by": "nope"}, "data.split_by: got 'nope'; allowed: a column of "),
    ({"text": "nope"}, "data.text: got 'nope'; allowed: a column of "),
    ({"text": "a"}, "data.text: got 'a', which holds no texts; allowed: a column of texts of "),
    ({"time": "nope"}, "data.time: got 'nope'; allowed: a column of "),
    ({"time": "when", "series": "nope"}, "data.series: got 'nope'; allowed: a column of "),
    ({"ignore": ["a", "nope"]}, "data.ignore: got 'nope'; allowed: columns of "),
    ({"augment": "flip"}, "data.augment: got flip; allowed only for images"),
    ({"image_size": [4, 4]}, "data.image_size: got (4, 4); allowed only for images"),
]


def stored(folder: Path, form: str) -> str:
    path = folder / f"t.{form}"
    if form == "parts":
        path.mkdir()
        parquet.write_table(TABLE, path / "part-0.parquet")
    else:
        (csv.write_csv if form == "csv" else parquet.write_table)(TABLE, path)
    return str(path)


@pytest.mark.parametrize("form", ["csv", "parquet", "parts"])
def test_fields_that_a_table_can_not_have_give_one_line(tmp_path: Path, form: str) -> None:
    uri = stored(tmp_path, form)
    for fields, says in FIELDS:
        with pytest.raises(BadInput, match=re.escape(says)) as raised:
            require_job_fields(DataSpec(uri=uri, **fields))
        assert "\n" not in str(raised.value)
    for kept in ({}, {"text": "words"}, {"split": "group", "split_by": "a"}):
        require_job_fields(DataSpec.model_validate({"uri": uri, **kept}))


def test_a_used_column_can_not_be_ignored() -> None:
    with pytest.raises(ValueError, match="ignore: columns that no other field names; 'label'"):
        DataSpec(uri="t.csv", ignore=("label",))


def test_another_separator_than_the_files_is_refused_with_the_files(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a;label\n" + "1,5;0\n2,5;1\n" * 20)
    said = r"data\.csv\.separator: got ','; its columns are separated by semicolons: ';'$"
    with pytest.raises(BadInput, match=said):
        validate(DataSpec(uri=str(tmp_path / "t.csv"), csv=CsvSpec(separator=",")))


def test_an_empty_file_is_bad_input_before_the_check(tmp_path: Path) -> None:
    (tmp_path / "t.csv").touch()
    with pytest.raises(BadInput, match=r"data\.uri: got .*t\.csv, an empty file; allowed: "):
        validate(DataSpec(uri=str(tmp_path / "t.csv")))


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_a_file_that_can_not_be_read_is_left_to_the_check(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'a\n"\xff\n1,2\n')
    require_job_fields(DataSpec(uri=str(tmp_path / name), text="a"))


def test_images_and_arrays_are_left_to_the_check(tmp_path: Path) -> None:
    (tmp_path / "index.csv").write_text("file,label\n")
    for uri in (str(tmp_path), "builtin:digits"):
        require_job_fields(DataSpec(uri=uri, augment="flip"))
