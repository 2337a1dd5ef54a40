"""Bad data at the command line: one clear line, exit code 2, and no file left behind.

`recommend` refuses data before it traces or measures anything, so each case is quick.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from command_line import run, small_files
from PIL import Image
from pyarrow import parquet
from test_bad_input import one_line

N = 60
X = [float(row % 7) for row in range(N)]
CLASSES = ["a", "b", "c"] * (N // 3)
NOT_UTF8 = pa.array([b"a\xff"] * N, pa.binary()).view(pa.string())
HOURS = [datetime.datetime(2026, 1, 1) + datetime.timedelta(hours=row) for row in range(400)]
DAILY = [float(row % 24) for row in range(400)]
TEXT = {"task": "text-classification", "text": "text"}
OBJECTS = np.array([{}, 1] * 6, dtype=object)
HOSTILE = 'a"\'\n"""{$x}\\\u202e\x1b[31m'


def table(**columns: Any) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        parquet.write_table(pa.table(columns), folder / "table.parquet")
        return "table.parquet"

    return write


def file(name: str, content: bytes | str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return name

    return write


def cut(name: str, **columns: Any) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        parquet.write_table(pa.table(columns), folder / name)
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])
        return name

    return write


def arrays(pack: Callable[..., None] = np.savez, **given: Any) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        pack(folder / "arrays.npz", **given)
        return "arrays.npz"

    return write


def pictures(broken: bytes, classes: str = "ab", index: str | None = None) -> Any:
    def write(folder: Path) -> str:
        (folder / "images").mkdir()
        rows = "file,label\n"
        for number in range(20):
            Image.new("L", (8, 8), number).save(folder / "images" / f"{number}.png")
            rows += f"{number}.png,{classes[number % len(classes)]}\n"
        (folder / "images" / "3.png").write_bytes(broken)
        (folder / "images" / "index.csv").write_text(index or rows)
        return "images"

    return write


def parts(*tables: dict[str, Any]) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / "parts").mkdir()
        for number, columns in enumerate(tables):
            parquet.write_table(pa.table(columns), folder / "parts" / f"{number}.parquet")
        return "parts"

    return write


CASES: dict[str, tuple[Callable[[Path], str], dict[str, Any], str]] = {
    "no target": (
        table(x=X, y=X),
        {},
        "data.target: got 'label' (the default); allowed: a column of ",
    ),
    "a target without values": (
        table(x=X, label=pa.array([None] * N)),
        {},
        "data.target: 'label': 60 of 60 values are missing; allowed: none",
    ),
    "one class": (table(x=X, label=["a"] * N), {}, "in all 60 rows; allowed: at least two classes"),
    "a constant number": (
        table(x=X, label=[3.5] * N),
        {},
        "'label' is '3.5' in all 60 rows; allowed: numbers that differ",
    ),
    "NaN among classes": (
        table(x=X, label=[0.0, 1.0] * 29 + [1.0, float("nan")]),
        {"task": "tabular-classification"},
        "'label': 1 of 60 values are NaN, infinite or too large for float32; allowed: none",
    ),
    "fractions as classes": (
        table(x=X, label=[row / 7 for row in range(N)]),
        {"task": "tabular-classification"},
        "holds fractions; allowed for tabular-classification: whole numbers, texts, true and false",
    ),
    "dates as target": (table(x=X, label=HOURS[:N]), {}, "'label' holds time stamps; allowed:"),
    "nine rows": (
        table(x=X[:9], label=CLASSES[:9]),
        {},
        "data.uri: got 9 rows; allowed: at least 10",
    ),
    "a class with one row": (
        table(x=X, label=["a"] * 30 + ["b"] * 29 + [HOSTILE]),
        {},
        "data.target: the class 'a\"\\'\\n",
    ),
    "many classes": (
        table(x=range(20_002), label=[f"c{row // 2}" for row in range(20_002)]),
        {},
        "allowed for tabular-classification: at most 10,000 classes",
    ),
    "only empty columns": (
        table(x=pa.array([None] * N), label=CLASSES),
        {},
        "has no column with values except the target; allowed: at least one input",
    ),
    "too large": (
        table(x=[*X[:-1], 1e300], label=CLASSES),
        {},
        "column 'x': 1 of 60 values are infinite or too large for float32; allowed: none",
    ),
    "lists": (table(x=[[1.0]] * N, label=CLASSES), {}, "'x' holds lists; allowed:"),
    "one column twice": (file("t.csv", "x,x,label\n1,2,a\n"), {}, "the column 'x' occurs twice"),
    "a name that dates need": (
        table(**{"d": HOURS[:N], "d year": X, "label": CLASSES}),
        {},
        "the column 'd year' occurs twice",
    ),
    "mixed types": (
        file("t.csv", "x,label\n" + "".join(f"{row},{row % 2}\n" for row in range(N)) + "one,1\n"),
        {},
        "holds numbers in 60 rows and texts in 1, such as 'one'; allowed: one kind",
    ),
    "not UTF-8": (table(x=NOT_UTF8, label=CLASSES), {}, "the column 'x' is not UTF-8 text"),
    "a long hostile name": (
        table(**{"a\"'{$x}\\": X, "x" * 5000: X, "y": CLASSES}),
        {},
        f"{'x' * 59}…, y",
    ),
    "texts without words": (
        table(text=["", "  \n"] * 30, label=CLASSES),
        TEXT,
        "has no word in 60 rows; allowed: texts with words",
    ),
    "no texts": (table(text=X, label=CLASSES), TEXT, "data.text: got 'text', which holds numbers"),
    "a cut file": (cut("t.parquet", x=range(20_000), label=["a", "b"] * 10_000), {}, "can't be re"),
    "an empty file": (file("t.parquet", b""), {}, "it can't be read: Parquet file size is 0 bytes"),
    "a pickle": (file("t.pkl", b"\x80\x04}."), {}, "t.pkl; allowed: .parquet, .csv, .npz, .npy"),
    "a pickle as array": (file("t.npy", b"\x80\x04}."), {}, "it holds no NumPy array"),
    "objects": (arrays(x=OBJECTS, label=np.arange(12) % 2), {}, "it holds Python objects: pickles"),
    "compressed objects": (
        arrays(np.savez_compressed, x=np.arange(12), label=OBJECTS),
        {},
        "it holds Python objects: pickles, which may run code",
    ),
    "an empty folder": (parts(), {}, "a folder without index.csv; allowed: a folder of images"),
    "folders of unlike tables": (
        parts({"x": X, "label": CLASSES}, {"y": X, "label": CLASSES}),
        {},
        "1.parquet and the files before it differ in the column 'x'",
    ),
    "unlike types": (
        parts({"x": X, "label": CLASSES}, {"x": CLASSES, "label": CLASSES}),
        {},
        "the column 'x' holds texts in 1.parquet, numbers before it",
    ),
    "no image": (pictures(b"no image"), {}, "images: 3.png can't be read as an image"),
    "one class of images": (pictures(b"no image", "a"), {}, "3.png can't be read as an image"),
    "a row without a file": (
        pictures(b"", index="file,label\n0.png,a\n,b\n"),
        {},
        "row 1 names no file; allowed: a file",
    ),
    "a time twice": (
        table(at=[HOURS[0], *HOURS[:-1]], label=DAILY),
        {"time": "at"},
        "rows 0 and 1 both have 2026-01-01 00:00:00; allowed: each time once in a series",
    ),
    "a short history": (
        table(at=HOURS, label=DAILY),
        {"time": "at", "history": 30},
        "data.history: got 30; the series repeat themselves every 24 steps; allowed: at least two",
    ),
    "a short series": (
        table(at=HOURS[:30], label=DAILY[:30]),
        {"time": "at", "horizon": 12},
        "the series has 30 rows; allowed: at least 36, for a history of 24 steps",
    ),
    "a constant series": (
        table(at=HOURS, label=[1.0] * 400),
        {"time": "at", "horizon": 2},
        "data.target: 'label' is 1 in all 400 rows; allowed: numbers that differ",
    ),
    "one group": (
        table(x=X, who=["me"] * N, label=CLASSES),
        {"split": "group", "split_by": "who"},
        "data.split_by: 'who' is the same in all 60 rows; allowed: at least two groups",
    ),
    "no such time": (
        table(at=HOURS, label=DAILY),
        {"time": "when"},
        "data.time: got 'when'; allowed: a column of ",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_data_is_refused_in_one_line_and_leaves_no_file(
    home: Path, tmp_path: Path, case: str
) -> None:
    write, fields, says = CASES[case]
    (tmp_path / "job.yaml").write_text(
        yaml.safe_dump({"name": "bad", "data": {"uri": write(tmp_path), **fields}})
    )
    store = tmp_path / "store"
    given = sorted(tmp_path.rglob("*"))
    done = run("recommend", str(tmp_path / "job.yaml"), "--json", TRAINWRIGHT_STORE=store.as_uri())
    one_line(done, 2, says)
    assert len(done.stderr.strip().splitlines()) == 1
    left = [path for path in tmp_path.rglob("*") if path not in given and path.is_file()]
    assert left == []


def test_a_disk_that_becomes_full_is_one_line_and_leaves_no_file(
    home: Path, tmp_path: Path
) -> None:
    uri = table(x=range(300_000), label=["a", "b"] * 150_000)(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"name": "full", "data": {"uri": uri}}))
    given = sorted(tmp_path.rglob("*"))
    store = (tmp_path / "store").as_uri()
    with small_files(1_000_000):
        done = run("recommend", str(tmp_path / "job.yaml"), "--json", TRAINWRIGHT_STORE=store)
    one_line(done, 2, "can't be written (File too large)")
    assert done.stderr.startswith(f"trainwright: TRAINWRIGHT_HOME: {home / 'prepared'}")
    assert [one for one in tmp_path.rglob("*") if one not in given and one.is_file()] == []
