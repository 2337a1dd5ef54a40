"""Predicts the rows of a file or folder with the stored model of a finished run.

Rows are read in chunks, and each chunk is predicted by a sandboxed process of its own, so that
neither the rows nor the predictions are ever held in memory as a whole.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from pydantic import Field

from trainwright.tasks import progress
from trainwright.tasks.data.sources import local_path
from trainwright.tasks.errors import BadInput
from trainwright.tasks.inference.prediction_file import PredictionFile
from trainwright.tasks.inference.row_source import TABLES
from trainwright.tasks.inference.stored_model import StoredModel
from trainwright.tasks.runs.run import Run
from trainwright.tasks.runs.value import Value
from trainwright.tasks.settings import Settings


class PredictionSummary(Value):
    """What was predicted, and where it is."""

    run: str
    model_step: int = Field(description="the training step of the stored model")
    task: str
    input: str
    out: str
    rows: int
    columns: list[str] = Field(description="of the output")
    ignored: list[str] = Field(description="of the input: columns that the model does not get")
    unseen: dict[str, int] = Field(
        default_factory=dict,
        description="by column: rows with a value that the training part lacks",
    )
    duration_s: float


def predict(run: Run, rows: str, out: str, *, allow_unseen: bool = False) -> PredictionSummary:
    """Predict rows, and write the predictions in their order.

    `rows` is a Parquet, CSV or .npz file, a folder of Parquet files, or one of images; `rows` and
    `out` (.parquet, .csv) are paths, file:// or s3:// URIs. The output has the columns `prediction`
    and, for classes, `probability`, or those that the model's own `predict` returns; of images also
    `file`; of time series, a row for each forecast step with its series and time stamp. It appears
    whole or not at all. Values of categories that the training part lacks are counted; a column of
    nothing else, or numbers in a column of texts, are refused unless `allow_unseen`.

    Raises BadInput for a run without a finished model, rows that do not fit
    its schema, or a model that can't predict them; CorruptArtefact for a damaged run.
    """
    unseen: dict[str, int] = {}
    began, settings = time.monotonic(), run.settings
    source = _local(rows, settings)
    with tempfile.TemporaryDirectory(prefix="trainwright-predict-") as name:
        model = StoredModel.open(run, Path(name))
        if source.is_dir() and model.image is not None:
            ignored, chunks = model.of_images(source)
        elif source.is_dir() or source.suffix.lower() in TABLES:
            ignored, chunks, unseen = model.of_table(source, allow_unseen=allow_unseen)
        else:
            ignored, chunks = model.of_arrays(source)
        about = {"run": run.uri, "model_step": str(model.step)}
        columns: list[str] = []
        done = 0
        with PredictionFile(out, settings, source, about) as file:
            for table in chunks:
                others = [name for name in table.column_names if name != "prediction"]
                columns, done = ["prediction", *others], done + table.num_rows
                file.write(table.select(columns))
                progress.emit("predict", rows=done)
            if not done:
                raise BadInput(f"rows: {source.name} has no rows")
    return PredictionSummary(
        run=run.uri,
        model_step=model.step,
        task=model.schema.task,
        input=rows,
        out=out,
        rows=done,
        columns=columns,
        ignored=ignored,
        unseen=unseen,
        duration_s=time.monotonic() - began,
    )


def _local(uri: str, settings: Settings) -> Path:
    """The local file or folder of the rows; what is in S3 is fetched. Raises BadInput."""
    path = local_path(uri, settings, "rows")
    if path.is_file() and path.suffix.lower() not in (*TABLES, ".npz"):
        raise BadInput(
            f"rows: got {uri}; allowed: {', '.join(TABLES)} or .npz, or a folder of parquet files "
            "or of images"
        )
    return path
