"""Reading data: the arrays for the model, and one clear line for unusable data."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import doors
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image
from pyarrow import csv, parquet

from trainwright.infra.local import start_s3, stop_s3
from trainwright.tasks.data import dataset
from trainwright.tasks.data.dataset import Dataset
from trainwright.tasks.data.formats import Raw
from trainwright.tasks.data.sources import localized
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.data_schema import Column, DataSchema
from trainwright.tasks.spec.csv_spec import CsvSpec
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.job import Job
from trainwright.tasks.storage.connect import open_store

PEOPLE = (
    "age,colour,member,label\n"
    "20,red,true,yes\n31.5,blue,false,no\n40,red,true,yes\n52,blue,false,no\n"
)


def load(spec: DataSpec) -> Dataset:
    return dataset.load(localized(spec, doors.settings()))


def describe(spec: DataSpec) -> DataSchema:
    return dataset.describe(localized(spec, doors.settings()))


def write(folder: Path, name: str, content: Any) -> str:
    path = folder / name
    if isinstance(content, str):
        path.write_text(content)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, dict):
        np.savez(path, **content)
    else:
        np.save(path, content)
    return str(path)


def pictures(folder: Path, index: str, count: int = 4, shape: tuple[int, ...] = (6, 5, 3)) -> str:
    folder.mkdir(exist_ok=True)
    for number in range(count):
        Image.fromarray(np.full(shape, 51 * number, dtype=np.uint8)).save(folder / f"{number}.png")
    (folder / "index.csv").write_text(index)
    return str(folder)


def test_the_digits_are_scaled_images_with_ten_classes() -> None:
    digits = load(DataSpec(uri="builtin:digits"))
    assert digits.inputs["inputs"].shape == (1797, 1, 8, 8)
    assert digits.inputs["inputs"].dtype == np.float32
    assert (digits.inputs["inputs"].min(), digits.inputs["inputs"].max()) == (0, 1)
    assert digits.targets.dtype == np.int64
    assert digits.schema.task == "image-classification"
    assert digits.schema.inputs == {"inputs": (1, 8, 8)}
    assert digits.schema.classes == [str(number) for number in range(10)]
    assert (digits.schema.train_rows, digits.schema.validation_rows) == (1438, 359)


def test_the_digits_equal_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    digits, theirs = load(DataSpec(uri="builtin:digits")), load_digits()
    assert np.array_equal(digits.inputs["inputs"][:, 0], theirs.images.astype(np.float32) / 16)
    assert np.array_equal(digits.targets, theirs.target)


def test_loading_imports_no_pandas(tmp_path: Path) -> None:
    arrays = {"x": np.ones((4, 2)), "label": np.array(["a", "é", "a", "b"])}
    uris = ["builtin:digits", write(tmp_path, "a.csv", PEOPLE), write(tmp_path, "b.npz", arrays)]
    code = f"""if True:
        import sys
        from trainwright.tasks.data.dataset import load
        from trainwright.tasks.spec.data_spec import DataSpec
        from trainwright.tasks.spec.job import Job
        for uri in {uris!r}:
            load(DataSpec(uri=uri))
        heavy = ("pandas", "torch", "great_expectations", "sklearn")
        sys.exit(any(name in sys.modules for name in heavy))"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_table_gives_numbers_categories_and_classes(tmp_path: Path) -> None:
    people = load(DataSpec(uri=write(tmp_path, "people.csv", PEOPLE)))
    inputs, targets = people.batch(np.arange(4))
    assert inputs["numbers"].tolist() == [[20, 1], [31.5, 0], [40, 1], [52, 0]]
    codes = people.names()["colour"]
    expected = [codes.index(one) + 1 for one in ("red", "blue", "red", "blue")]
    assert inputs["categories"].ravel().tolist() == expected
    assert targets.tolist() == [1, 0, 1, 0]
    assert people.names()["label"] == people.schema.classes == ["no", "yes"]
    assert people.schema.task == "tabular-classification"
    assert people.schema.inputs == {"numbers": (2,), "categories": (1,)}
    assert people.schema.input_dtypes == {"numbers": "float32", "categories": "int64"}
    assert people.schema.columns == [
        Column(name="age", kind="number"),
        Column(name="colour", kind="category", vocabulary=3),
        Column(name="member", kind="number"),
    ]


def test_a_table_of_texts_has_categories_only(tmp_path: Path) -> None:
    table = "a,b,label\n" + "".join(f"{n % 3}x,{n % 5}y,{n % 2}\n" for n in range(30))
    found = load(DataSpec(uri=write(tmp_path, "texts.csv", table)))
    assert (found.schema.inputs, list(found.inputs)) == ({"categories": (2,)}, ["categories"])
    assert found.names()["a"] == ["0x", "1x", "2x"]


TEXTS = st.one_of(st.none(), st.sampled_from(["a", "b", "é", ""]), st.text(max_size=3))


@given(values=st.lists(TEXTS, min_size=10, max_size=60), seed=st.integers(0, 99))
def test_codes_are_places_among_the_values_of_the_training_part(
    values: list[str | None], seed: int
) -> None:
    assume(any(value is not None for value in values))
    labels = [number % 2 for number in range(len(values))]
    table = pa.table({"c": pa.array(values, pa.string()), "x": labels, "label": labels})
    found = dataset.from_raw(Raw("", table), DataSpec(uri="-", missing="keep"), seed)
    train, held_out = found.split.train, found.split.validation
    known = sorted({value for row in train if (value := values[row]) is not None})
    assert found.names()["c"] == known
    assert found.schema.columns[0].missing == values.count(None)
    for part in (train, held_out):
        codes = found.batch(part)[0]["categories"].ravel()
        for row, code in zip(part, codes, strict=True):
            assert code == (known.index(values[row]) + 1 if values[row] in known else 0)
        assert codes.max(initial=0) < found.schema.columns[0].vocabulary


def test_missing_numbers_are_nan_where_the_job_keeps_them(tmp_path: Path) -> None:
    table = "a,b,label\n" + "".join(f"{n if n % 3 else ''},{n},{n % 2}\n" for n in range(12))
    found = load(DataSpec(uri=write(tmp_path, "gaps.csv", table), missing="keep"))
    assert np.isnan(found.inputs["inputs"][:, 0]).tolist() == [n % 3 == 0 for n in range(12)]
    assert [one.missing for one in found.schema.columns] == [4, 0]


def test_a_column_without_values_is_left_out(tmp_path: Path) -> None:
    table = "a,none,label\n" + "".join(f"{n},,{n % 2}\n" for n in range(12))
    uri = write(tmp_path, "none.csv", table)
    for missing in ("auto", "keep"):
        schema = describe(DataSpec(uri=uri, missing=missing))
        assert (schema.inputs, schema.dropped) == ({"inputs": (1,)}, ["none"])
    with pytest.raises(BadInput, match="column 'none': 12 of 12 values are missing"):
        describe(DataSpec(uri=uri, missing="refuse"))


def test_missing_values_are_kept_only_for_a_job_without_a_model() -> None:
    data = {"uri": "a.csv"}
    assert Job.model_validate({"name": "a", "data": data}).data.missing == "keep"
    given_model = {"name": "a", "data": data, "model": {"source": "m.py"}}
    assert Job.model_validate(given_model).data.missing == "auto"
    refusing = {"name": "a", "data": {**data, "missing": "refuse"}}
    assert Job.model_validate(refusing).data.missing == "refuse"


def test_few_numbers_among_texts_are_categories(tmp_path: Path) -> None:
    table = "rooms,label\n" + "".join(f"{n % 3 or '3+'},{n % 2}\n" for n in range(60))
    found = load(DataSpec(uri=write(tmp_path, "rooms.csv", table)))
    assert found.names()["rooms"] == ["1", "2", "3+"]


def test_texts_of_a_parquet_file_that_are_not_utf_8_are_refused(tmp_path: Path) -> None:
    texts = pa.array([b"a", b"\xff\xfe"] * 10).view(pa.string())
    parquet.write_table(pa.table({"a": texts, "label": [0, 1] * 10}), tmp_path / "bytes.parquet")
    with pytest.raises(BadInput, match="the column 'a' is not UTF-8 text"):
        load(DataSpec(uri=str(tmp_path / "bytes.parquet")))


def test_a_description_is_that_of_the_loaded_data(tmp_path: Path) -> None:
    people = "".join(f"{n},{'ab'[n % 2]},g{n % 7},{n % 5 // 4}\n" for n in range(60))
    uri = write(tmp_path, "people.csv", "x,c,who,label\n" + people)
    for fields in ({}, {"split": "group", "split_by": "who"}, {"target": "x"}):
        spec = DataSpec(uri=uri, **fields)
        assert dataset.describe(spec, 3) == dataset.load(spec, 3).schema


def test_hostile_names_pass_through_unharmed(tmp_path: Path) -> None:
    names = ['"; import os #', "a\nb", "{{x}}", "<b>", "__class__", "ü" * 300]
    hostile = ["'); DROP TABLE", "\\", "\x00", "</script>", "\u202e"]
    columns: dict[str, Any] = {name: [float(n) for n in range(20)] for name in names}
    columns |= {
        "c": [hostile[n % 5] for n in range(20)],
        "label": [hostile[n % 2] for n in range(20)],
    }
    parquet.write_table(pa.table(columns), tmp_path / "hostile.parquet")
    found = load(DataSpec(uri=str(tmp_path / "hostile.parquet")))
    assert [one.name for one in found.schema.columns] == [*names, "c"]
    assert found.names() == {"c": sorted(hostile), "label": sorted(hostile[:2])}
    assert DataSchema.model_validate_json(found.schema.model_dump_json()) == found.schema


def test_parquet_and_csv_of_the_same_rows_give_the_same_dataset(tmp_path: Path) -> None:
    columns = {
        "age": [20, 31.5, 40, 52],
        "colour": ["red", "blue", "red", "blue"],
        "member": [True, False, True, False],
    }
    table = pa.table(columns | {"label": pa.array(["yes", "no", "yes", "no"]).dictionary_encode()})
    parquet.write_table(table, tmp_path / "people.parquet", row_group_size=2)
    one, other = (
        load(DataSpec(uri=uri))
        for uri in (f"file://{tmp_path}/people.parquet", write(tmp_path, "people.csv", PEOPLE))
    )
    for name in ("numbers", "categories"):
        assert np.array_equal(one.inputs[name], other.inputs[name])
    assert np.array_equal(one.targets, other.targets)
    assert one.schema.sha256 != other.schema.sha256


def test_a_fractional_target_makes_it_a_regression(tmp_path: Path) -> None:
    prices = load(
        DataSpec(
            uri=write(tmp_path, "prices.csv", "size,price\n1,0.5\n2,0.75\n3,1.5\n"), target="price"
        )
    )
    assert (prices.schema.task, prices.schema.classes) == ("tabular-regression", None)
    assert prices.targets.dtype == np.float32


def test_a_plain_array_is_a_table_with_numbered_columns(tmp_path: Path) -> None:
    rows = load(
        DataSpec(uri=write(tmp_path, "rows.npy", np.array([[1.0, 2.5], [3.0, 4.5]])), target="1")
    )
    assert (rows.inputs["inputs"].tolist(), rows.targets.tolist()) == ([[1], [3]], [2.5, 4.5])


def test_several_arrays_keep_their_names(tmp_path: Path) -> None:
    arrays = {
        "text": np.arange(12).reshape(4, 3),
        "image": np.full((4, 9, 8, 3), 255, np.uint8),
        "y": np.arange(4) % 2,
    }
    both = load(DataSpec(uri=write(tmp_path, "both.npz", arrays), target="y", task="custom"))
    assert both.schema.inputs == {"text": (3,), "image": (3, 9, 8)}
    assert both.schema.input_dtypes == {"text": "int64", "image": "float32"}
    assert both.inputs["image"].max() == 1


def test_whole_numbers_of_an_npz_file_stay_whole(tmp_path: Path) -> None:
    """Inputs and targets of language models and of segmentation, and a label beside tokens."""
    tokens = np.arange(12, dtype=np.int32).reshape(4, 3)
    named = {"tokens": tokens, "label": np.array(["b", "a", "b", "a"])}
    uri = write(tmp_path, "text.npz", named)
    for task in (None, "text-classification", "tabular-classification", "custom"):
        text = load(DataSpec.model_validate({"uri": uri, "task": task}))
        assert text.schema.input_dtypes == {"inputs": "int64"}
        assert text.targets.tolist() == [1, 0, 1, 0]
    following = {"x": tokens.astype(np.uint16), "y": tokens + 1}
    language = load(DataSpec(uri=write(tmp_path, "lm.npz", following), target="y"))
    assert (language.schema.task, language.schema.target_dtype) == ("custom", "int64")
    assert language.targets.tolist() == (tokens + 1).tolist()
    masks = {"x": np.zeros((4, 8, 6, 3), np.uint8), "y": np.ones((4, 8, 6), np.uint8)}
    pixels = load(DataSpec(uri=write(tmp_path, "masks.npz", masks), target="y"))
    assert pixels.schema.inputs == {"inputs": (3, 8, 6)}
    assert (pixels.schema.target_dtype, pixels.schema.target_shape) == ("int64", (8, 6))
    future = {"x": np.zeros((4, 3), np.float32), "y": np.ones((4, 2))}
    forecast = load(DataSpec(uri=write(tmp_path, "future.npz", future), target="y"))
    assert (forecast.schema.task, forecast.schema.target_dtype) == ("forecasting", "float32")
    huge = {"x": np.full((4, 3), 2**63, np.uint64), "label": np.arange(4) % 2}
    with pytest.raises(BadInput, match="whole number 9223372036854775808; allowed: at most"):
        load(DataSpec(uri=write(tmp_path, "huge.npz", huge)))


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_neighbours_beyond_float32_stay_apart_and_that_is_told(tmp_path: Path, form: str) -> None:
    whole = [1_700_000_000_000 + row for row in range(20)]
    wide = [row * 2**40 for row in range(20)]
    label = ["a", "b"] * 10
    table = pa.table({"ms": whole, "ns": [n * 10**6 for n in whole], "wide": wide, "label": label})
    path = tmp_path / f"t.{form}"
    (csv.write_csv if form == "csv" else parquet.write_table)(table, path)
    found = load(DataSpec(uri=str(path)))
    near, far, rest = found.inputs["inputs"].T
    assert near.tolist() == [row - 9 for row in range(20)]
    assert np.allclose(far, (np.arange(20) - 9.5) * 1e6, rtol=1e-6)
    assert rest.tolist() == wide
    said = "; ".join(found.schema.notes)
    assert "column 'ms': the model gets the distance from 1700000000009" in said
    assert said.count("are rounded to float32") == 1
    assert "column 'wide': whole numbers more than 2**24 from 0 are rounded to float32" in said


@pytest.mark.parametrize(
    ("labels", "classes", "note"),
    [
        (["0.0", "1.0"], ["0", "1"], "holds whole numbers such as 0.0: its 2 values are classes"),
        (["00", "01"], ["00", "01"], "digits with leading zeros are codes"),
        (["yes", "yes ", "no"], ["no", "yes"], "white space around values is removed"),
        (["yes", "Yes", "no"], ["Yes", "no", "yes"], "'Yes', 'yes' are different classes"),
        (["TRUE", "False", "yes"], ["False", "TRUE", "yes"], ""),
    ],
)
def test_labels_are_kept_or_what_becomes_of_them_is_told(
    tmp_path: Path, labels: list[str], classes: list[str], note: str
) -> None:
    rows = "".join(f"{row}.5,{labels[row % len(labels)]}\n" for row in range(30))
    found = load(DataSpec(uri=write(tmp_path, "t.csv", "x,label\n" + rows)))
    assert (found.schema.task, found.schema.classes) == ("tabular-classification", classes)
    assert note in "; ".join(found.schema.notes)


def test_numbers_that_are_written_in_several_ways_are_refused(tmp_path: Path) -> None:
    rows = "".join(f'"{row}{",."[row % 2]}5",a\n{row},b\n' for row in range(30))
    uri = write(tmp_path, "t.csv", "x,label\n" + rows)
    with pytest.raises(BadInput, match=r"written in several ways, such as '0' and '0,5'; allowed"):
        load(DataSpec(uri=uri))
    texts = load(DataSpec(uri=uri, csv=CsvSpec(text_columns=("x",))))
    assert texts.schema.columns[0].kind == "category"


@pytest.mark.parametrize(
    ("shape", "dtype", "channels", "given"),
    [
        ((16, 4, 4), np.float32, "auto", (16, 4, 4)),  # feature maps, as stored
        ((64, 1, 1), np.float32, "auto", (64, 1, 1)),
        ((16, 9, 4), np.float64, "auto", (16, 9, 4)),
        ((3, 9, 8), np.float32, "auto", (3, 9, 8)),
        ((9, 8, 3), np.float32, "auto", (3, 9, 8)),
        ((9, 9, 1), np.float32, "auto", (1, 9, 9)),
        ((9, 8, 4), np.uint8, "auto", (4, 9, 8)),
        ((16, 9, 4), np.float32, "last", (4, 16, 9)),
        ((9, 8, 3), np.uint8, "first", (9, 8, 3)),
    ],
)
def test_axes_are_moved_of_images_only(
    tmp_path: Path, shape: Any, dtype: Any, channels: Any, given: Any
) -> None:
    stored = np.arange(4 * np.prod(shape)).reshape(4, *shape).astype(dtype)
    uri = write(tmp_path, "maps.npz", {"x": stored, "label": np.arange(4) % 2})
    found = load(DataSpec(uri=uri, channels=channels))
    assert found.schema.inputs == {"inputs": given}
    unmoved = stored if given == shape else stored.transpose(0, 3, 1, 2)
    scale = 255 if dtype is np.uint8 else 1
    assert np.array_equal(found.inputs["inputs"], (unmoved / np.float32(scale)).astype("f4"))
    said = " ".join(found.schema.notes)
    assert ("channels" in said) == (given != shape or (shape[0] > 4 and channels == "auto"))


def test_a_folder_of_images_is_read_by_its_index(tmp_path: Path) -> None:
    images = load(
        DataSpec(uri=pictures(tmp_path / "pets", "file,label\n0.png,cat\n2.png,dog\n1.png,cat\n"))
    )
    assert images.schema.inputs == {"inputs": (3, 6, 5)}
    inputs, _ = images.batch(np.arange(3))
    assert inputs["inputs"][:, 0, 0, 0] == pytest.approx([0, 0.4, 0.2])
    assert images.schema.classes == ["cat", "dog"]


def test_a_change_of_the_content_changes_the_digest(tmp_path: Path) -> None:
    spec = DataSpec(uri=pictures(tmp_path / "pets", "file,label\n0.png,cat\n1.png,dog\n"))
    before = describe(spec).sha256
    assert describe(spec).sha256 == before
    Image.fromarray(np.full((6, 5, 3), 7, dtype=np.uint8)).save(tmp_path / "pets" / "1.png")
    assert describe(spec).sha256 != before


CLASSES = {"x": np.ones((4, 2)), "label": np.arange(4) % 2}


@pytest.mark.parametrize(
    ("name", "content", "fields", "said"),
    [
        ("none.csv", None, {}, r"data\.uri: got .*none\.csv; there is no such file"),
        (
            "a.txt",
            "x",
            {},
            r"data\.uri: got .*a\.txt; allowed: \.parquet, \.csv, \.npz, \.npy, or a folder of",
        ),
        (
            "a.csv",
            PEOPLE,
            {"target": "lable"},
            r"data\.target: got 'lable'; allowed: .*, label; did you mean label\?$",
        ),
        ("a.csv", "", {}, "it has none"),
        ("a.csv", "a,label\n1,2,3\n", {}, "can't be read: CSV parse error"),
        ("a.csv", "a,a,label\n1,2,3\n", {}, "the column 'a' occurs twice"),
        ("a.csv", "a,label\n,x\n2,y\n", {}, "column 'a': 1 of 2 values are missing"),
        (
            "a.csv",
            "a,label\ninf,x\n2,y\n",
            {},
            "column 'a': 1 of 2 values are NaN, infinite or too large for float32; allowed: none",
        ),
        ("a.csv", "a,label\n1,\n2,y\n", {}, "data.target: 'label': 1 of 2 values are missing"),
        (
            "a.csv",
            "a,label\n10:00:00,x\n11:00:00,y\n",
            {},
            r"column 'a' holds times of day; allowed: numbers, texts, dates, true and false",
        ),
        (
            "a.csv",
            "a,label\n1,x\n2,x\n",
            {},
            "data.target: 'label' is 'x' in all 2 rows; allowed: at least two classes",
        ),
        (
            "a.csv",
            "a,label\n1,0.5\n2,0.5\n",
            {},
            "data.target: 'label' is '0.5' in all 2 rows; allowed: numbers that differ",
        ),
        (
            "a.csv",
            "a,label\n" + "".join(f"{n},c{n}\n" for n in range(10_001)),
            {},
            "'label' holds more than 10,000 different values; allowed for tabular-classification",
        ),
        (
            "a.csv",
            "a,b,label\n1e39,,x\n2,3,y\n",
            {"missing": "keep"},
            "column 'a': 1 of 2 values are infinite or too large for float32; allowed: none",
        ),
        (
            "a.csv",
            "a,label\n" + "".join(f"{n / 7},{n % 2}\n" for n in range(99)) + "n.a.,1\n",
            {},
            "column 'a' holds numbers in 99 rows and texts in 1, such as 'n.a.'; allowed: one kind",
        ),
        (
            "a.csv",
            "a,label\n" + "".join(f"{n},{n / 7}\n" for n in range(99)) + "1,none\n",
            {},
            "data.target: 'label' holds numbers in 99 rows and texts in 1",
        ),
        ("a.csv", "ä,label\n".encode() + b"\xff\xfe,x\nb,y\n", {}, "neither all UTF-8 nor"),
        ("a.csv", b"a,label\n\0\1\2,x\nb,y\n", {}, "it is not text: it holds zero bytes"),
        (
            "a.csv",
            "a,label\n1,x\n2,y\n",
            {"task": "tabular-regression"},
            "allowed for tabular-regression: numbers; or clear data.task: the data is tabular-",
        ),
        ("a.csv", "a,label\n1,0.5\n2,1\n", {"task": "tabular-classification"}, "holds fractions"),
        (
            "a.csv",
            "a,label\n1,x\n2,y\n",
            {"task": "image-classification"},
            "got image-classification; allowed for a table",
        ),
        ("a.csv", "label\nx\ny\n", {}, "no column with values except the target"),
        ("a.csv", "a,label\n1,x\n", {}, "got 1 rows; allowed: at least 2"),
        ("a.parquet", "garbage", {}, "can't be read"),
        ("a.npz", "garbage", {}, "it is not an npz file"),
        (
            "a.npy",
            np.ones((3, 2)),
            {"csv": CsvSpec(decimal=",")},
            "data.csv: got .*only for a .csv",
        ),
        ("a.csv", PEOPLE, {"channels": "last"}, "data.channels: got last; allowed only for arrays"),
        ("a.npy", "garbage", {}, "can't be read"),
        ("a.npz", CLASSES | {"label": np.arange(3)}, {}, r"different lengths \(x 4, label 3\)"),
        ("a.npz", CLASSES, {"target": "y"}, "data.target: got 'y'; allowed: .*: x, label"),
        (
            "a.npz",
            CLASSES | {"x": np.array([{}, 1, 2, 3], dtype=object)},
            {},
            "can't be read: it holds Python objects: pickles, which may run code",
        ),
        (
            "a.npz",
            CLASSES | {"x": np.array([1, np.nan, 2, 3])},
            {},
            "1 of 4 values are NaN or infinite",
        ),
        ("a.npy", np.ones(3), {}, r"an array of shape \(3,\) is not a table"),
    ],
)
def test_bad_data_gives_one_clear_line(
    tmp_path: Path, name: str, content: Any, fields: dict[str, Any], said: str
) -> None:
    uri = str(tmp_path / name) if content is None else write(tmp_path, name, content)
    with pytest.raises(BadInput, match=said) as error:
        load(DataSpec(uri=uri, **fields))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("builtin:cifar", "got builtin:cifar; allowed: builtin:digits"),
        ("https://example.org/a.csv", "allowed: builtin:NAME, s3://…, file://… or a path"),
        ("s3://bucket", "allowed: s3://bucket/key"),
        ("s3://", "data.uri: got s3://; allowed: s3://bucket/key"),
        ("s3://b/x", "data.uri: got 's3://b'; allowed: a bucket's name of 3 to 63"),
    ],
)
def test_an_unknown_source_names_the_known_ones(uri: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        load(DataSpec(uri=uri))


@pytest.mark.parametrize(
    ("index", "said"),
    [
        (
            "file,label\n../secret.png,cat\n0.png,dog\n",
            r"names '\.\./secret\.png'; allowed: files within the folder",
        ),
        (
            "file,label\n/etc/passwd,cat\n0.png,dog\n",
            "names '/etc/passwd'; allowed: files within the folder",
        ),
        (
            "file,label\nlink.png,cat\n0.png,dog\n",
            "names 'link.png'; allowed: files within the folder",
        ),
        ("file,label\n9.png,cat\n0.png,dog\n", "names '9.png'; there is no such file"),
        ("name,label\n0.png,cat\n", "has no column 'file'; it has: name, label"),
        ("file,label\n0.png,cat\nbroken.png,dog\n", "broken.png can't be read as an image"),
    ],
)
def test_an_index_with_an_invalid_image_is_refused(tmp_path: Path, index: str, said: str) -> None:
    (tmp_path / "secret.png").write_bytes(b"")
    folder = Path(pictures(tmp_path / "pets", index))
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "broken.png").write_bytes(b"no image")
    with pytest.raises(BadInput, match=said):
        load(DataSpec(uri=str(folder)))


@pytest.fixture
def server(home: Path) -> Iterator[Path]:
    start_s3(home)
    yield home
    stop_s3(home)


def test_data_in_s3_is_fetched_once_per_content(server: Path, tmp_path: Path) -> None:
    store = open_store("s3://data/sets", doors.settings())
    store.put("people.csv", PEOPLE.encode())
    spec = DataSpec(uri="s3://data/sets/people.csv")
    first = load(spec)
    fetched = {path: path.stat().st_mtime_ns for path in (server / "data").rglob("*.csv")}
    assert (
        load(spec).schema
        == first.schema
        == load(DataSpec(uri=write(tmp_path, "people.csv", PEOPLE))).schema
    )
    assert {path: path.stat().st_mtime_ns for path in (server / "data").rglob("*.csv")} == fetched
    store.put("people.csv", (PEOPLE + "60,red,true,yes\n").encode())
    assert load(spec).schema.rows == 5
    folder = Path(pictures(tmp_path / "pets", "file,label\n0.png,cat\n1.png,dog\n"))
    for path in folder.iterdir():
        store.put_file(f"pets/{path.name}", path)
    assert load(DataSpec(uri="s3://data/sets/pets")).schema.inputs == {"inputs": (3, 6, 5)}
    for number in range(2):
        parquet.write_table(pa.table({"x": [1.5, number], "label": ["a", "b"]}), tmp_path / "one")
        store.put_file(f"table/year/{number}.parquet", tmp_path / "one")
    assert load(DataSpec(uri="s3://data/sets/table")).inputs["inputs"].tolist() == [
        [1.5],
        [0],
        [1.5],
        [1],
    ]
    with pytest.raises(
        BadInput, match=r"data\.uri: got s3://data/sets/none\.csv; there is no such object"
    ):
        load(DataSpec(uri="s3://data/sets/none.csv"))


@given(rows=st.integers(2, 300), fraction=st.floats(0.001, 0.999), seed=st.integers(0, 2**31 - 1))
def test_the_split_is_disjoint_complete_and_of_the_wanted_size(
    rows: int, fraction: float, seed: int
) -> None:
    raw = Raw("", pa.table({"x": range(rows), "label": [n / 7 for n in range(rows)]}))
    found = dataset.from_raw(raw, DataSpec(uri="-", validation_fraction=fraction), seed)
    train, held_out = found.split.train[:], found.split.validation[:]
    assert sorted([*train, *held_out]) == list(range(rows))
    assert 1 <= len(held_out) < rows
    assert abs(len(held_out) - rows * fraction) <= 1
    assert (found.schema.train_rows, found.schema.validation_rows) == (len(train), len(held_out))
