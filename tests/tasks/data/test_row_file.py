"""Rows of a file of which only these are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainwright.tasks.data.row_file import RowFile

ROWS = 5000


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "wide.npy"
    np.save(path, np.arange(ROWS * 300, dtype=np.float32).reshape(ROWS, 3, 100))
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.integers(0, ROWS - 1), max_size=200), begin=st.integers(0, ROWS))
def test_rows_are_those_of_the_array(wide: Path, rows: list[int], begin: int) -> None:
    file, array = RowFile(wide), np.load(wide)
    assert (len(file), file.shape, file.dtype, file.nbytes) == (
        ROWS,
        array.shape,
        array.dtype,
        array.nbytes,
    )
    assert np.array_equal(file.take(np.array(rows, np.int64)), array[rows])
    assert np.array_equal(file[begin : begin + 700], array[begin : begin + 700])
    assert np.array_equal(file[begin::7], array[begin::7])


def test_a_file_that_is_cut_off_or_by_columns_is_refused(wide: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.npy"
    cut.write_bytes(wide.read_bytes()[:-4])
    with pytest.raises(ValueError, match="mmap length"):
        RowFile(cut)
    np.save(cut, np.asfortranarray(np.ones((5, 5))))
    with pytest.raises(ValueError, match="is not an array by rows"):
        RowFile(cut)
