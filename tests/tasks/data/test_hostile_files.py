"""Files whose headers promise what they do not hold, or more than can be read."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import doors
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from trainwright.tasks.data.formats import npz_arrays
from trainwright.tasks.data.sources import local_path
from trainwright.tasks.data.tables.table_source import MOST_COLUMNS, open_parquet
from trainwright.tasks.errors import BadInput


def member(header: str) -> bytes:
    """A .npy file with this header and 160 bytes."""
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(160)


@pytest.mark.parametrize("stored", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    ("header", "says"),
    [
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (-10, 4)}", "has the shape"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (10, 9999999999)}", "too few"),
        ("{'descr': '<f4', 'fortran_order': False, 'shape': (10, 4),}}}", "is damaged"),
        ("((((((", "is damaged"),
    ],
)
def test_a_false_header_of_an_array_is_one_line(
    tmp_path: Path, header: str, says: str, stored: int
) -> None:
    path = tmp_path / "data.npz"
    label = io.BytesIO()
    np.save(label, np.arange(10))
    with zipfile.ZipFile(path, "w", stored) as archive:
        archive.writestr("x.npy", member(header))
        archive.writestr("label.npy", label.getvalue())
    with pytest.raises(ValueError, match=says):
        npz_arrays(path)


@pytest.mark.parametrize("uri", ["/", "file:///", "/proc", "/sys/kernel"])
def test_a_part_of_the_system_is_no_data(uri: str) -> None:
    with pytest.raises(BadInput, match=r"data\.uri: got .* a part of the system"):
        local_path(uri, doors.settings(), "data.uri")


def test_a_table_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    wide, long = tmp_path / "wide.parquet", tmp_path / "long.parquet"
    names = [f"c{number}" for number in range(MOST_COLUMNS + 1)]
    parquet.write_table(pa.table({name: [1] for name in names}), wide)
    with pytest.raises(ValueError, match="20,001 columns; allowed: up to 20,000"):
        open_parquet(wide)
    parquet.write_table(pa.table({"s": ["x" * 2**28, "a"]}), long, use_dictionary=False)
    with pytest.raises(ValueError, match=r"128 MiB on average in the column 's'"):
        open_parquet(long)
