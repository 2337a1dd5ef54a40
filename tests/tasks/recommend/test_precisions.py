"""Every template trains in every precision; in half precision also in ranks."""

from __future__ import annotations

import datetime
import math
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
from training_case import NO_SPARE, request

from trainwright.tasks.data import dataset
from trainwright.tasks.recommend.source_code import write_source
from trainwright.tasks.recommend.templates import templates
from trainwright.tasks.spec.data_spec import DataSpec
from trainwright.tasks.spec.job import TrainSpec
from trainwright.tasks.train import train

PRECISIONS = ["fp32", "fp64", "bf16", "amp"]
TABLES = [one for one in templates().values() if "tabular-regression" in one.tasks]
ROWS = 120
precisions = pytest.mark.parametrize("precision", PRECISIONS)


@pytest.mark.parametrize("template", TABLES, ids=lambda one: one.name)
@pytest.mark.parametrize("classes", [0, 3])
@precisions
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


@pytest.mark.slow
@pytest.mark.parametrize("name", templates())
@pytest.mark.parametrize("precision", ["bf16", "amp"])
def test_a_generated_model_trains_in_ranks_in_half_precision(
    tmp_path: Path, name: str, precision: str
) -> None:
    template = templates()[name]
    spec = source_of(template.tasks[0], tmp_path)
    schema = dataset.load(spec).schema
    config = template.sizes["small"]
    share = max(2, schema.train_rows // 4)
    asked = request(tmp_path, [share, share], backend="torch", **NO_SPARE)
    path = write_source(tmp_path / "source", template.source(schema, config, HEADER))
    recipe = {
        field.removeprefix("train."): value
        for field, value in template.recipe(schema, config).items()
    }
    fixed = {"epochs": 1, "precision": precision, "global_batch_size": 2 * share}
    given = TrainSpec.model_validate(asked.job.train.model_dump() | recipe | fixed)
    job = asked.job.model_copy(update={"data": spec, "train": given, "model": None})
    rate = float(recipe["learning_rate"]) if recipe["learning_rate"] != "auto" else 0.001
    result = train(
        asked.model_copy(
            update={"job": job, "schema_": schema, "entry": path.name, "learning_rate": rate}
        )
    )
    assert result.steps >= 2
    assert all(math.isfinite(value) for value in result.metrics.values())
