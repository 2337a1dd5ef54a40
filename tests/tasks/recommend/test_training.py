"""Generated sources train on two ranks from a table's file, and predict from its raw rows."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pytest
import torch
from safetensors.torch import load_file
from table_case import HEADER
from training_case import NO_SPARE, request

from trainwright.estimator.trace import source
from trainwright.tasks.data import dataset
from trainwright.tasks.recommend.source_code import write_source
from trainwright.tasks.recommend.templates import templates
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.train_spec import TrainSpec
from trainwright.tasks.train import train

RECORDING = """

import hashlib, os, pathlib

RANK = int(os.environ.get("HOROVOD_RANK", 0))
as_generated = adapt

def record(what, model):
    content = b"".join(one.numpy().tobytes() for one in model.state_dict().values())
    with open(pathlib.Path(__file__).with_name("states"), "a") as states:
        states.write(f"{what} {RANK} {hashlib.sha256(content).hexdigest()}\\n")

def adapt(model, inputs, targets, names):
    as_generated(model, inputs, targets, names)
    record("adapted", model)
    for one in model.parameters():
        one.add_(RANK + 1)  # as if the ranks' devices rounded differently
    record("changed", model)

    def first_pass(*_):
        handle.remove()
        record("starts", model)

    handle = model.register_forward_pre_hook(first_pass)
"""
"""Appended to a source: `adapt` differs from rank to rank; records what a training starts from."""

NAMES = [one.name for one in templates().values() if "tabular-regression" in one.tasks]


def table(folder: Path, classes: bool) -> dict[str, list[Any]]:
    """A table of 400 rows with missing values, written to table.csv; returns its columns."""
    torch.manual_seed(0)
    size = torch.rand(400)
    colour = torch.randint(3, (400,))
    wanted = size * 100 + 20 * colour + 1000
    missing = range(0, 400, 17)
    columns: dict[str, list[Any]] = {
        "size": [None if row in missing else value for row, value in enumerate(size.tolist())],
        'colour\'s "name"': [
            None if row in missing else ["red", "green", "blue"][one]
            for row, one in enumerate(colour.tolist())
        ],
        "code": [f"code {one}" for one in torch.randint(30, (400,)).tolist()],
        "label": ["high" if one > 1070 else "low" for one in wanted.tolist()]
        if classes
        else wanted.tolist(),
    }
    pyarrow.csv.write_csv(pa.table(columns), folder / "table.csv")
    return columns


@pytest.mark.parametrize(
    ("name", "classes"), [(name, place % 2 == 0) for place, name in enumerate(NAMES)]
)
def test_a_generated_model_trains_on_two_ranks_and_predicts_raw_rows(
    tmp_path: Path, name: str, classes: bool
) -> None:
    columns = table(tmp_path, classes)
    template = templates()[name]
    spec = DataSpec.model_validate({"uri": str(tmp_path / "table.csv"), "missing": "keep"})
    loaded = dataset.load(spec)
    text = template.source(loaded.schema, template.sizes["small"], HEADER)
    asked = request(tmp_path, [32, 16], backend="torch", **NO_SPARE)
    path = write_source(tmp_path / "source", text)
    recipe = {
        field.removeprefix("train."): value
        for field, value in template.recipe(loaded.schema, template.sizes["small"]).items()
    }
    rate = recipe["learning_rate"]
    spec_of_training = TrainSpec.model_validate(
        asked.job.train.model_dump() | recipe | {"epochs": 40}
    )
    job = asked.job.model_copy(update={"data": spec, "train": spec_of_training, "model": None})
    asked = asked.model_copy(
        update={"job": job, "schema_": loaded.schema, "entry": path.name, "learning_rate": rate}
    )
    result = train(asked)
    assert result.metrics["accuracy" if classes else "r2"] > 0.8
    newest = max(tmp_path.glob("run/checkpoints/*/model.safetensors"))
    made = source.load(path.parent, path.name)
    assert made.predict is not None
    model = made.build_model()
    model.load_state_dict(load_file(newest))
    wanted = columns.pop("label")
    found = made.predict(model, columns)["prediction"]
    if classes:
        assert sum(one == other for one, other in zip(found, wanted, strict=True)) > 320
    else:
        error = torch.tensor(found) - torch.tensor(wanted)
        assert error.square().mean() < 0.2 * torch.tensor(wanted).var()


def test_ranks_start_from_what_the_first_one_adapted(tmp_path: Path) -> None:
    start = datetime(2026, 1, 1)
    columns = {
        "at": [start + timedelta(hours=row) for row in range(300)] * 2,
        "shop": ["north"] * 300 + ["south"] * 300,
        "sold": [float(row % 24) for row in range(300)] + [row % 12 / 2 for row in range(300)],
    }
    pyarrow.csv.write_csv(pa.table(columns), tmp_path / "table.csv")
    given = {"time": "at", "series": "shop", "history": 48, "horizon": 12}
    spec = DataSpec.model_validate({"uri": str(tmp_path / "table.csv"), "target": "sold", **given})
    loaded, template = dataset.load(spec), templates()["dlinear"]
    text = template.source(loaded.schema, template.sizes["small"], HEADER)
    path = write_source(tmp_path / "source", text)
    path.write_text(path.read_text() + RECORDING)
    asked = request(tmp_path, [32, 16], backend="torch", **NO_SPARE)
    job = asked.job.model_copy(update={"data": spec, "model": None})
    train(asked.model_copy(update={"job": job, "schema_": loaded.schema, "entry": path.name}))
    states: dict[str, dict[str, str]] = {"adapted": {}, "changed": {}, "starts": {}}
    for line in (tmp_path / "source" / "states").read_text().splitlines():
        what, rank, content = line.split()
        states[what][rank] = content
    assert states["adapted"]["0"] == states["adapted"]["1"]
    assert states["changed"]["0"] != states["changed"]["1"]
    assert states["starts"] == {"0": states["changed"]["0"], "1": states["changed"]["0"]}
