"""Every template trains in every precision, alone and in ranks."""

from __future__ import annotations

import datetime
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import table_case as case
import torch
from precision_case import losses
from pyarrow import parquet
from table_case import HEADER
from training_case import request

from trainwright.tasks.data import dataset
from trainwright.tasks.recommend.source_code import write_source
from trainwright.tasks.recommend.templates import templates
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.job import TrainSpec
from trainwright.tasks.train import TrainRequest

PRECISIONS = ["fp32", "fp64", "bf16", "amp"]
TABLES = [one for one in templates().values() if "tabular-regression" in one.tasks]
ROWS = 120


@pytest.mark.parametrize("template", TABLES, ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("classes", "precision"), [(0, "fp32"), (3, "fp64"), (3, "bf16"), (0, "amp")]
)
def test_a_model_for_tables_steps_in_every_precision(
    tmp_path: Path, template: Any, classes: int, precision: str
) -> None:
    data = case.schema(4, 3, True, classes)
    made = case.generated(template, data, tmp_path)
    raw = case.rows(data)
    inputs, targets = case.batch(data, raw)
    model = made.build_model()
    with torch.no_grad():
        assert made.adapt is not None
        made.adapt(model, inputs, targets, case.vocabularies(data))
    found = losses(made, model, data.task, (inputs, targets), precision, steps=2, rate=0.001)
    assert all(map(math.isfinite, found))


def source_of(task: str, folder: Path) -> DataSpec:
    """A file of `ROWS` rows for a task."""
    names = ["a", "b", "c"]
    columns: dict[str, Any] = {"label": [names[row % 3] for row in range(ROWS)]}
    fields: dict[str, Any] = {"missing": "keep"}
    if task == "image-classification":
        pixels = np.random.default_rng(0).integers(0, 255, (ROWS, 9, 8, 3)).astype(np.uint8)
        np.savez(folder / "data.npz", inputs=pixels, label=np.arange(ROWS) % 3)
        return DataSpec(uri=str(folder / "data.npz"))
    if task == "text-classification":
        columns["text"] = [f"some words about {row} things" for row in range(ROWS)]
        fields |= {"task": task, "text": "text"}
    elif task == "forecasting":
        start = datetime.datetime(2026, 1, 1)
        columns["label"] = [float(row % 24) for row in range(ROWS)]
        columns["at"] = [start + datetime.timedelta(hours=row) for row in range(ROWS)]
        fields |= {"time": "at", "horizon": 4, "history": 48}
    else:
        columns["x"] = [None if row % 17 == 0 else row / 7 for row in range(ROWS)]
        columns["kind"] = [f"kind {row % 5}" for row in range(ROWS)]
    parquet.write_table(pa.table(columns), folder / "data.parquet")
    return DataSpec(uri=str(folder / "data.parquet"), **fields)


def request_of(folder: Path, name: str, precision: str) -> TrainRequest:
    """The training of a template's small model on two ranks, by its recipe."""
    template, folder = templates()[name], folder / f"{name}-{precision}"
    asked = request(folder, [ROWS // 10, ROWS // 20])
    spec = source_of(template.tasks[0], folder)
    schema = dataset.load(spec).schema
    config = template.sizes["small"]
    path = write_source(folder / "source", template.source(schema, config, HEADER))
    recipe = {
        field.removeprefix("train."): value
        for field, value in template.recipe(schema, config).items()
    }
    fixed = {"precision": precision, "global_batch_size": ROWS // 10 + ROWS // 20}
    given = TrainSpec.model_validate(asked.job.train.model_dump() | recipe | fixed)
    job = asked.job.model_copy(update={"data": spec, "train": given, "model": None})
    made = {"schema_": schema, "entry": path.name, "learning_rate": given.learning_rate}
    return asked.model_copy(update={"job": job, **made})


@pytest.mark.slow
def test_every_generated_model_trains_in_two_ranks_and_in_every_precision(tmp_path: Path) -> None:
    cases = list(zip(templates(), itertools.cycle(PRECISIONS), strict=False))
    requests = tmp_path / "requests"
    requests.write_text(
        "".join(f"{request_of(tmp_path, *one).model_dump_json(by_alias=True)}\n" for one in cases)
    )
    script = Path(__file__).with_name("precision_ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(requests), str(number), str(tmp_path / "meeting")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    answers = [one.communicate()[0].splitlines() for one in ranks]
    assert [one.returncode for one in ranks] == [0, 0], (len(answers[0]), cases)
    for case_, *lines in zip(cases, *answers, strict=True):
        first, second = map(json.loads, lines)
        assert first == second, case_
        assert all(map(math.isfinite, [*first["losses"], *first["metrics"].values()])), case_
        assert len(set(first["losses"])) > 1, case_
