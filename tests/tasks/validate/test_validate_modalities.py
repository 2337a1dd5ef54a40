"""The step validate on images of different sizes, on series, on data that the model reads."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import doors
import numpy as np
import pytest
from PIL import Image

from trainwright.tasks import progress
from trainwright.tasks.errors import DataRejected
from trainwright.tasks.leases.ledger import Holder
from trainwright.tasks.runs.artefacts.data_schema import Vocabulary
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.runs.run import Run
from trainwright.tasks.spec.job import load_job
from trainwright.tasks.validate.step import summary, validate_job

MODEL = """
import torch


class Lines(torch.utils.data.Dataset):
    classes = ["even", "odd"]

    def __init__(self, uri, part):
        numbers = [int(line) for line in open(uri)]
        self.numbers = numbers[:-4] if part == "train" else numbers[-4:]

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, place):
        return torch.full((3,), float(self.numbers[place])), self.numbers[place] % 2


def dataset(uri, part):
    return Lines(uri, part)


def build_model():
    return torch.nn.Linear(3, 2)
"""


@pytest.fixture(autouse=True)
def store(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINWRIGHT_STORE", (tmp_path / "store").as_uri())


def job(data: dict[str, Any], model: Path | None = None) -> dict[str, Any]:
    source = {} if model is None else {"model": {"source": str(model)}}
    return {"name": "x", "data": data, **source}


def validated_run(asked: dict[str, Any]) -> tuple[Run, str]:
    """A new run of a job that did the step `validate`, and the step's line."""
    opened = doors.open_for(load_job(asked), Holder("me"), new=True)
    try:
        return opened, summary(doors.do(opened, "validate"))
    finally:
        doors.ledger().release(opened.uri)


def images(folder: Path) -> Path:
    folder.mkdir()
    random, lines = np.random.default_rng(0), ["file,label"]
    for number in range(12):
        pixels = random.integers(0, 256, (30 + number, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        lines.append(f"{number}.png,{'cat' if number % 2 else 'dog'}")
    (folder / "index.csv").write_text("\n".join(lines))
    return folder


def test_images_of_different_sizes_pass_and_an_unreadable_one_is_named(tmp_path: Path) -> None:
    folder = images(tmp_path / "pets")
    done, _ = validated_run(job({"uri": str(folder)}))
    validation = done.read(Validation)
    schema = validation.data
    assert schema is not None
    sizes = [one["kwargs"] for one in validation.suite if one["kwargs"].get("column") == "height"]
    assert min(one.get("min_value", 1) for one in sizes) >= 1
    assert schema.inputs == {"inputs": (3, 35, 40)}
    (folder / "3.png").write_bytes(b"no image")
    with pytest.raises(DataRejected, match=r"height.*1 row, the first is row 3"):
        validated_run(job({"uri": str(folder)}))


def test_a_run_keeps_the_names_of_its_series(tmp_path: Path) -> None:
    rows = [
        f"{datetime(2026, 1, 1) + timedelta(hours=hour)},{shop},{hour % 24}"
        for shop in ("south", "north")
        for hour in range(200)
    ]
    (tmp_path / "sales.csv").write_text("\n".join(["when,shop,sold", *rows]))
    data = {"uri": str(tmp_path / "sales.csv"), "target": "sold", "time": "when", "series": "shop"}
    done, _ = validated_run(job(data))
    assert done.read(Vocabulary).names == {"shop": ["north", "south"]}


def test_data_that_the_model_reads_is_said_not_to_be_checked(tmp_path: Path) -> None:
    (tmp_path / "numbers.txt").write_text("".join(f"{number}\n" for number in range(20)))
    (tmp_path / "model.py").write_text(MODEL)
    asked = job({"uri": str(tmp_path / "numbers.txt"), "reader": "model"}, tmp_path / "model.py")
    heard: list[dict[str, Any]] = []
    with progress.listening(heard.append):
        done, line = validated_run(asked)
    assert line == "20 rows, read by the model's source; they are not checked"
    notices = [event["message"] for event in heard if event["event"] == "notice"]
    assert any(
        notice.endswith("read by the model's source; it is not checked") for notice in notices
    )
    found = done.read(Validation)
    assert (found.success, found.suite_source, found.expectations) == (True, "none", [])
    assert found.data is not None
    assert (found.data.train_rows, found.data.classes) == (16, ["even", "odd"])
    assert validate_job(load_job(asked), doors.settings()).data == found.data
