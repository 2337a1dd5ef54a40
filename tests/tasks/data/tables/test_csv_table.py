"""CSV files as people have them: separators, marks, encodings, codes; what is unclear is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from trainwright.tasks.data.tables import csv_form
from trainwright.tasks.data.tables.table_source import TableSource, open_table
from trainwright.tasks.spec.csv_spec import CsvSpec


def opened(folder: Path, content: str | bytes, **fields: Any) -> TableSource:
    path = folder / "t.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return open_table(path, ["y"], CsvSpec(**fields))


@pytest.mark.parametrize(
    ("content", "values", "note"),
    [
        ("x;y\n0,5;a\n-2019,40;b\n", [0.5, -2019.4], "read with ';' between columns"),
        ("x\ty\n1\ta\n2\tb\n", [1, 2], "read with tab"),
        ('"x"|"y"\n"1|5"|a\n2|b\n', ["1|5", "2"], "read with '|'"),
        ('x,y\n"-2,019.40",a\n0.5,b\n', [-2019.4, 0.5], "written as 1,234.5"),
        ('x,y\n"1,234,567",a\n"12",b\n', [1234567, 12], "written as 1,234.5"),
        ('x,y\n"12,5",a\n7,b\n8,c\n', [12.5, 7, 8], "written as 1234,5"),
        ("x;y\n1.234,5;a\n12;b\n", [1234.5, 12], "written as 1.234,5"),
        ('x,y\n"1 234,5",a\n3,b\n', [1234.5, 3], "written as 1 234,5"),
        ('x,y\n"1\u202f234,5",a\n"1\u00a0000",b\n', [1234.5, 1000], "written as 1 234,5"),
        ("x,y\n1'234.5,a\n10,b\n", [1234.5, 10], "written as 1'234.5"),
        ("x,y\n12 %,a\n7.5%,b\n", [12, 7.5], "written as 1234.5 %"),
        ("x,y\n$5,a\n-$7.25,b\n$-1,c\n", [5, -7.25, -1], "written as 1234.5 $"),
        ("x,y\n0,a\n12 EUR,b\n", [0, 12], "written as 1234.5 EUR"),
        ("x,y\n\u22121.5,a\n2,b\n", [-1.5, 2], "written as 1234.5"),
        ("x,,y,\n1,p,a,\n2,q,b,\n", [1, 2], None),
        ('x,y\n"1.234,50 €",a\n"7,00 €",b\n', [1234.5, 7], "written as 1.234,5 €"),
        ("x,y\n00145,a\n12,b\n", ["00145", "12"], "are codes, not numbers"),
        (" x , y\n yes ,a\nyes,b\n", ["yes", "yes"], "white space around values is removed"),
        ("sep=;\nx;y\n1;a\n2;b\n", [1, 2], "read with ';'"),
        ("\ufeffx,y\n1,a\n2,b\n", [1, 2], None),
        ("x;y\nMüller;a\nz;b\n".encode("cp1252"), ["Müller", "z"], "read as cp1252"),
        ("x;y\nMüller;a\nz;b\n".encode("utf-16"), ["Müller", "z"], "read as utf-16"),
        ("x;y\nMüller;a\nz;b\n".encode("utf-16-le"), ["Müller", "z"], "read as utf-16-le"),
        ("x,y\nTRUE,a\nFalse,b\n", [True, False], None),
        ("x,y\n10.0.0.1,a\n31.12.2024,b\n", ["10.0.0.1", "31.12.2024"], None),
        ("x,y,\n1.5,a,\n2.25,b,\n", [1.5, 2.25], None),
    ],
)
def test_values_are_read_as_they_are_meant_and_the_form_is_told(
    tmp_path: Path, content: str | bytes, values: list[Any], note: str | None
) -> None:
    found = opened(tmp_path, content)
    assert found.read()["x"].to_pylist() == values
    assert found.read()["y"].to_pylist()[:2] == ["a", "b"]
    assert (note or "") in "; ".join(found.notes)
    assert bool(found.notes) == (note is not None)


def test_a_mark_that_may_be_either_is_asked_for_unless_other_columns_tell(tmp_path: Path) -> None:
    unclear = 'x,y\n"1,234",a\n"5,678",b\n'
    with pytest.raises(ValueError, match=r"'x' holds numbers such as '1,234', .*csv\.decimal: ','"):
        opened(tmp_path, unclear)
    given: list[tuple[dict[str, str], Any]] = [
        ({"decimal": ","}, 1.234), ({"thousands": ","}, 1234), ({"decimal": "."}, 1234),
    ]  # fmt: skip
    for fields, value in given:
        assert opened(tmp_path, unclear, **fields).read()["x"][0].as_py() == value
    beside = 'x,z,y\n"1,234",{0},a\n"5,678",{0},b\n'
    for other, value in (("0.5", 1234), ('"0,5"', 1.234)):
        found = opened(tmp_path, beside.format(other))
        assert found.read()["x"][0].as_py() == value
        assert "column 'x'" in "; ".join(found.notes) or "'x', 'z'" in "; ".join(found.notes)
    german = opened(tmp_path, "x;z;y\n1.234;0,5;a\n5.678;1,5;b\n")
    assert german.read()["x"].to_pylist() == [1234, 5678]


def test_what_the_job_says_of_a_file_is_done(tmp_path: Path) -> None:
    codes = "x,z,y\n1,00145,a\n2,7,b\n"
    assert opened(tmp_path, codes, text_columns=["x"]).schema.types[:2] == [pa.string(), pa.int64()]
    assert opened(tmp_path, codes, text_columns=[]).schema.types[:2] == [pa.int64(), pa.int64()]
    with pytest.raises(ValueError, match=r"text_columns: got 'zip'; allowed: columns: x, z, y"):
        opened(tmp_path, codes, text_columns=["zip"])
    turkish = "x:y\nş:a\nz:b\n".encode("iso8859-9")
    found = opened(tmp_path, turkish, separator=":", encoding="iso8859-9")
    assert (found.read()["x"].to_pylist(), found.notes) == (["ş", "z"], ())


def test_names_that_are_alike_without_white_space_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the column 'x' occurs twice"):
        opened(tmp_path, "x,x ,y\n1,2,a\n")


def test_a_late_value_of_another_form_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_form, "BLOCK_BYTES", 64)
    found = opened(tmp_path, "x;y\n" + "1,5;a\n" * 100 + "2.5;b\n")
    with pytest.raises(
        ValueError, match=r"'x' holds '2.5'; .* written as 1234,5; allowed: one way"
    ):
        found.read()
