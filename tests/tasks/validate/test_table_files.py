"""The parquet files of a table: its own in place, or one with the rows of other files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.validate.table_files import table_files


@pytest.fixture
def files(tmp_path: Path) -> Callable[[Path], list[Path] | None]:
    """The files of a table at a path; written ones are in `written`."""
    (tmp_path / "written").mkdir()
    return lambda path: table_files(DataSpec(uri=str(path)), tmp_path / "written")


def test_parquet_is_read_in_place(tmp_path: Path, files: Any) -> None:
    for number in (2, 1):
        parquet.write_table(pa.table({"x": [number]}), tmp_path / f"{number}.parquet")
    assert files(tmp_path / "1.parquet") == [tmp_path / "1.parquet"]
    assert files(tmp_path) == [tmp_path / "1.parquet", tmp_path / "2.parquet"]
    assert list((tmp_path / "written").iterdir()) == []


def test_files_with_different_types_become_one_file(tmp_path: Path, files: Any) -> None:
    (tmp_path / "parts").mkdir()
    for number, values in enumerate(([1, 2], [2.5])):
        parquet.write_table(pa.table({"x": values}), tmp_path / "parts" / f"{number}.parquet")
    (found,) = files(tmp_path / "parts")
    assert found.parent == tmp_path / "written"
    assert parquet.read_table(found).to_pydict() == {"x": [1.0, 2.0, 2.5]}


def test_rows_of_text_and_arrays_are_written_in_groups(tmp_path: Path, files: Any) -> None:
    array = np.arange(600_000, dtype=np.float32).reshape(-1, 2)
    np.save(tmp_path / "a.npy", array)
    (found,) = files(tmp_path / "a.npy")
    written = parquet.ParquetFile(found)
    assert written.metadata.num_row_groups == 3
    assert written.read().column("1").to_pylist() == array[:, 1].tolist()
    found.unlink()
    (tmp_path / "a.csv").write_text("x,y\n1,\n,b\n")
    (found,) = files(tmp_path / "a.csv")
    assert parquet.read_table(found).to_pydict() == {"x": [1, None], "y": [None, "b"]}


@pytest.mark.parametrize("name", ["digits.npz", "empty.csv"])
def test_arrays_and_files_without_columns_are_no_tables(
    tmp_path: Path, files: Any, name: str
) -> None:
    (tmp_path / name).write_bytes(b"")
    assert files(tmp_path / name) is None


def test_a_file_that_can_not_be_read_and_a_full_disk_are_refused(
    tmp_path: Path, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1nothing")
    with pytest.raises(BadInput, match=r"data\.uri: got .*bad\.parquet; it can't be read: "):
        files(tmp_path / "bad.parquet")
    (tmp_path / "a.csv").write_text("x\n1\n")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 * 2**20))
    says = r"TMPDIR: .* has 3 MiB free; free some, or give the table"
    with pytest.raises(TrainwrightError, match=says) as raised:
        files(tmp_path / "a.csv")
    assert raised.value.exit_code == 1
