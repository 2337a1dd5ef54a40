"""Texts, images and time series as datasets: from a source, in memory and mapped from files."""

from __future__ import annotations

import math
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import csv, parquet

from trainwright.tasks.data.dataset import Dataset, load
from trainwright.tasks.data.modalities.tokens import tokens
from trainwright.tasks.data.prepared import prepared
from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.data_spec import DataSpec

REVIEWS = [f"A {word} film, number {number}!" for number in range(10) for word in ("good", "bad")]


def reviews(folder: Path, **columns: list[Any]) -> str:
    table = pa.table({"review": REVIEWS, "label": [1, 0] * 10, **columns})
    parquet.write_table(table, folder / "reviews.parquet")
    return str(folder / "reviews.parquet")


def photos(folder: Path, *sizes: tuple[int, int]) -> str:
    folder.mkdir()
    random, names = np.random.default_rng(0), []
    for number, size in enumerate(sizes):
        pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
        names.append(f"{number}.{'png' if number % 2 else 'jpg'}")
        Image.fromarray(pixels).save(folder / names[-1])
    lines = [f"{name},{'cat' if number % 3 else 'dog'}" for number, name in enumerate(names)]
    (folder / "index.csv").write_text("\n".join(["file,label", *lines]))
    return str(folder)


def sales(folder: Path, hours: int = 400, shops: tuple[str, ...] = ("north", "south")) -> str:
    rows = [
        {
            "when": datetime(2026, 1, 1) + timedelta(hours=hour),
            "shop": shop,
            "sold": 100.0 * place + math.sin(2 * math.pi * hour / 24) + hour % 24 / 24,
            "price": hour % 5,
        }
        for place, shop in enumerate(shops)
        for hour in range(hours)
    ]
    csv.write_csv(pa.Table.from_pylist(rows), folder / "sales.csv")
    return str(folder / "sales.csv")


FORECAST = {"target": "sold", "time": "when", "series": "shop"}


def spec_of(kind: str, folder: Path) -> DataSpec:
    match kind:
        case "texts":
            return DataSpec(uri=reviews(folder))
        case "small images":
            return DataSpec(uri=photos(folder / "pets", *[(20, 30 + n) for n in range(12)]))
        case "large images":
            return DataSpec(uri=photos(folder / "pets", *[(90, 80 + n) for n in range(12)]))
    return DataSpec(uri=sales(folder), **FORECAST)


@pytest.mark.parametrize("kind", ["texts", "small images", "large images", "series"])
def test_mapped_batches_equal_those_in_memory(kind: str, tmp_path: Path) -> None:
    spec = spec_of(kind, tmp_path)
    here = load(spec, seed=3)
    rows = np.random.default_rng(0).integers(0, here.schema.rows, 7)
    expected, targets = here.batch(rows)
    for _ in range(2):
        found = prepared(spec, tmp_path / "home", seed=3)
        assert (found.schema, found.names()) == (here.schema, here.names())
        assert np.array_equal(found.split.train, here.split.train)
        assert np.array_equal(found.split.validation, here.split.validation)
        inputs, found_targets = found.batch(rows)
        assert np.array_equal(found_targets, targets)
        assert list(inputs) == list(expected) == list(here.schema.inputs)
        for name, given in inputs.items():
            assert np.array_equal(given, expected[name])
            assert str(given.dtype) == here.schema.input_dtypes[name]
            assert given.shape[1:] == here.schema.inputs[name]


@pytest.mark.parametrize("kind", ["texts", "small images", "series"])
def test_loading_imports_no_pandas(kind: str, tmp_path: Path) -> None:
    code = """if True:
        import sys
        import numpy as np
        from trainwright.tasks.data.dataset import load
        from trainwright.tasks.spec.data_spec import DataSpec
        load(DataSpec.model_validate_json(sys.argv[1])).batch(np.arange(3))
        sys.exit(any(name in sys.modules for name in ("pandas", "torch", "sklearn")))"""
    asked = [sys.executable, "-c", code, spec_of(kind, tmp_path).model_dump_json()]
    assert subprocess.run(asked, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("damage", ["images", "names", "windows"])
def test_damaged_files_are_made_again(damage: str, tmp_path: Path) -> None:
    spec = spec_of("series" if damage == "windows" else "large images", tmp_path)
    home = tmp_path / "home"
    first, _ = prepared(spec, home).batch(np.arange(5))
    file = {"images": "encoded.bin", "names": "inputs-0.json", "windows": "targets-values.npy"}
    [found] = (home / "prepared").rglob(file[damage])
    if damage == "names":
        found.unlink()
    else:
        found.write_bytes(found.read_bytes()[:-50])
    again, _ = prepared(spec, home).batch(np.arange(5))
    assert all(np.array_equal(again[name], one) for name, one in first.items())


def test_a_column_of_long_texts_becomes_tokens(tmp_path: Path) -> None:
    texts = load(DataSpec(uri=reviews(tmp_path)))
    assert texts.schema.task == "text-classification"
    assert (texts.schema.inputs, texts.schema.input_dtypes) == (
        {"inputs": (8,)},
        {"inputs": "int64"},
    )
    assert [(one.name, one.kind) for one in texts.schema.columns] == [("review", "text")]
    inputs, targets = texts.batch(np.array([3, 0]))
    expected = [(tokens(REVIEWS[row]) + [0] * 8)[:8] for row in (3, 0)]
    assert inputs["inputs"].tolist() == expected
    assert targets.tolist() == [0, 1]


def test_short_or_repeated_texts_are_categories(tmp_path: Path) -> None:
    parquet.write_table(
        pa.table({"town": ["New York", "Old Town"] * 10, "label": [1, 0] * 10}),
        tmp_path / "towns.parquet",
    )
    towns = load(DataSpec(uri=str(tmp_path / "towns.parquet")))
    assert (towns.schema.task, list(towns.inputs)) == ("tabular-classification", ["categories"])


def test_the_job_names_the_column_of_texts(tmp_path: Path) -> None:
    uri = reviews(tmp_path, stars=list(range(20)), title=["Seen"] * 20)
    assert load(DataSpec(uri=uri)).schema.task == "tabular-classification"
    texts = load(DataSpec(uri=uri, text="title"))
    assert (texts.schema.task, texts.schema.inputs) == ("text-classification", {"inputs": (8,)})
    assert texts.batch(np.array([0]))[0]["inputs"][0, 0] == tokens("Seen")[0]
    by_task = load(DataSpec(uri=reviews(tmp_path), task="text-classification"))
    assert by_task.schema.task == "text-classification"


def test_missing_texts_are_refused_or_have_no_words(tmp_path: Path) -> None:
    table = pa.table({"review": [None, *REVIEWS[1:]], "label": [1, 0] * 10})
    parquet.write_table(table, tmp_path / "gaps.parquet")
    spec = DataSpec(uri=str(tmp_path / "gaps.parquet"))
    with pytest.raises(BadInput, match="1 of 20 texts are missing; allowed: none, unless"):
        load(spec)
    kept = load(spec.model_copy(update={"missing": "keep"}))
    assert kept.batch(np.array([0]))[0]["inputs"].tolist() == [[0] * 8]
    assert kept.schema.columns[0].missing == 1


def test_images_of_different_sizes_and_kinds_get_one_shape(tmp_path: Path) -> None:
    spec = DataSpec(uri=photos(tmp_path / "pets", (20, 30), (10, 50), (30, 40)))
    images = load(spec)
    assert images.schema.inputs == {"inputs": (3, 20, 40)}
    assert [(one.name, one.kind) for one in images.schema.columns] == [("image", "image")]
    inputs, _ = images.batch(np.arange(3))
    assert (inputs["inputs"].shape, inputs["inputs"].dtype) == ((3, 3, 20, 40), np.float32)
    assert 0 <= inputs["inputs"].min() < 0.1
    assert 0.9 < inputs["inputs"].max() <= 1
    sized = load(spec.model_copy(update={"image_size": (8, 6)}))
    assert sized.schema.inputs == {"inputs": (3, 8, 6)}


def test_training_images_are_augmented_by_seed_epoch_and_row(tmp_path: Path) -> None:
    uri = photos(tmp_path / "pets", *[(90, 90)] * 12)
    plain, changed = load(DataSpec(uri=uri)), load(DataSpec(uri=uri, augment="flip-crop"), seed=1)

    def pixels(dataset: Dataset, *rows: int, epoch: int | None = None) -> Any:
        seen = dataset if epoch is None else dataset.in_epoch(epoch)
        return seen.batch(np.array(rows))[0]["inputs"]

    assert np.array_equal(pixels(changed, 3, 4), pixels(plain, 3, 4))  # not for training
    assert np.array_equal(pixels(plain, 3, 4, epoch=2), pixels(plain, 3, 4))
    train = pixels(changed, 3, 4, 5, epoch=2)
    assert not np.array_equal(train, pixels(plain, 3, 4, 5))
    assert np.array_equal(pixels(changed, 5, epoch=2)[0], train[2])
    assert not np.array_equal(pixels(changed, 3, 4, 5, epoch=3), train)


def test_a_table_with_time_stamps_is_cut_into_windows(tmp_path: Path) -> None:
    windows = load(DataSpec(uri=sales(tmp_path), **FORECAST))
    schema = windows.schema
    assert schema.task == "forecasting"
    assert schema.inputs == {"history": (120,), "covariates": (144, 5), "series": ()}
    assert schema.input_dtypes == {"history": "float32", "covariates": "float32", "series": "int64"}
    assert (schema.target_dtype, windows.targets.shape[1:]) == ("float32", (24,))
    assert schema.rows == schema.train_rows + schema.validation_rows
    kinds = [(one.name, one.kind, one.vocabulary) for one in schema.columns]
    assert kinds == [("when", "time", 0), ("shop", "series", 3), ("price", "number", 0)]
    assert windows.names() == {"shop": ["north", "south"]}
    inputs, _ = windows.batch(np.array([0, schema.train_rows - 1]))
    assert inputs["series"].tolist() == [1, 2]


def test_another_share_for_validation_cuts_series_elsewhere(tmp_path: Path) -> None:
    spec = DataSpec(uri=sales(tmp_path), horizon=4, history=48, **FORECAST)
    for fraction in (0.2, 0.4):
        given = spec.model_copy(update={"validation_fraction": fraction})
        found = prepared(given, tmp_path / "home")
        assert found.schema.validation_rows == 2 * (400 * fraction - 3)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"text": "words"},
            "data.text: got 'words'; allowed: a column of texts of .*: review, tit",
        ),
        (
            {"text": "stars"},
            "data.text: got 'stars', which holds whole numbers; allowed: a column of texts",
        ),
        ({"task": "text-classification"}, "but 2 columns of .* hold texts; allowed: one, or the o"),
        ({"image_size": (8, 8)}, r"data.image_size: got \(8, 8\); allowed only for a folder of im"),
        ({"augment": "flip"}, "data.augment: got flip; allowed only for images"),
        ({"time": "stars"}, "column 'stars' holds whole numbers; allowed: time stamps"),
        ({"time": "stars", "task": "custom"}, "got custom; allowed for a table with data.time: fo"),
    ],
)
def test_fields_that_do_not_fit_the_table_are_refused(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    uri = reviews(tmp_path, stars=list(range(20)), title=["Seen"] * 20)
    with pytest.raises(BadInput, match=said):
        load(DataSpec(uri=uri, **fields))


@pytest.mark.parametrize("field", ["text", "time"])
def test_columns_of_arrays_and_images_are_refused(tmp_path: Path, field: str) -> None:
    uri = photos(tmp_path / "pets", (8, 8), (8, 8))
    with pytest.raises(BadInput, match=f"data.{field}: got file; allowed only for a table"):
        load(DataSpec(uri=uri, **{field: "file"}))


def test_an_image_that_is_cut_short_is_named(tmp_path: Path) -> None:
    folder = Path(photos(tmp_path / "pets", *[(90, 90)] * 4))
    content = (folder / "2.jpg").read_bytes()
    (folder / "2.jpg").write_bytes(content[: len(content) // 2])
    images = prepared(DataSpec(uri=str(folder)), tmp_path / "home")
    with pytest.raises(BadInput, match=r"pets: 2\.jpg can't be read as an image"):
        images.batch(np.arange(4))
