"""Predicts the rows of a file with the stored model of a finished run.

The file is read in chunks, and each chunk is predicted by a sandboxed process of its own, so that
neither the rows nor the predictions are ever held in memory as a whole.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field

from trainwright.infra.sandbox import names_memory
from trainwright.infra.sandbox.client import SandboxServer, scrubbed_environment
from trainwright.tasks import progress
from trainwright.tasks.data.sources import localized
from trainwright.tasks.errors import BadInput, TrainwrightError, from_document
from trainwright.tasks.inference.model_input import ModelInput, require_columns
from trainwright.tasks.inference.prediction_file import PredictionFile
from trainwright.tasks.inference.row_source import TABLES, ArrayRows, TableRows
from trainwright.tasks.runs.artefacts import Artefact, DataSchema, Manifest, Validation, Vocabulary
from trainwright.tasks.runs.run import Run
from trainwright.tasks.runs.value import Value
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.job import DataSpec
from trainwright.tasks.storage.objects import get_verified
from trainwright.tasks.store import model_weights, unpack_model

if TYPE_CHECKING:
    import numpy as np

CHUNK_ROWS = 65_536
_CHUNK_CELLS = 4_000_000
_CHUNK_BYTES = 64 * 2**20
PROCESS = "trainwright.tasks.inference.model_process:answer"


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
    duration_s: float


def predict(run: Run, rows: str, out: str) -> PredictionSummary:
    """Predict the rows of a Parquet, CSV or .npz file, and write the predictions in their order.

    `rows` and `out` (.parquet, .csv) are paths, file:// or s3:// URIs. The output has the columns
    `prediction` and, for classes, `probability`, or those that the model's own `predict` returns.
    It appears whole or not at all. Raises BadInput for a run without a finished model, rows that do
    not fit its schema, or a model that can't predict them; CorruptArtefact for a damaged run.
    """
    began, settings = time.monotonic(), run.settings
    source = _local(rows, settings)
    with tempfile.TemporaryDirectory(prefix="trainwright-predict-") as name:
        model = StoredModel.open(run, Path(name))
        if source.suffix.lower() in TABLES:
            ignored, chunks = model.of_table(source)
        else:
            ignored, chunks = model.of_arrays(source)
        about = {"run": run.uri, "model_step": str(model.step)}
        columns: list[str] = []
        done = 0
        with PredictionFile(out, settings, source, about) as file:
            for table in chunks:
                file.write(table)
                columns, done = table.column_names, done + table.num_rows
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
        duration_s=time.monotonic() - began,
    )


def _local(uri: str, settings: Settings) -> Path:
    """The local file of the rows; one in S3 is fetched. Raises BadInput."""
    try:
        path = Path(localized(DataSpec(uri=uri), settings).uri)
    except BadInput as error:
        raise BadInput(str(error).replace("data.uri:", "rows:", 1)) from None
    if path.suffix.lower() not in (*TABLES, ".npz"):
        raise BadInput(f"rows: got {uri}; allowed: {', '.join(TABLES)} or .npz")
    return path


_Kind = TypeVar("_Kind", bound=Artefact)


def _sealed(run: Run, manifest: Manifest, kind: type[_Kind]) -> _Kind | None:
    """A verified artefact of a sealed run; None if it has none."""
    if kind.FILE not in manifest.files:
        return None
    data = get_verified(run.objects, kind.FILE, manifest.files[kind.FILE].sha256)
    return kind.model_validate_json(data, extra="ignore")


class StoredModel:
    """The verified model of a finished run, unpacked into a folder that the sandbox may read."""

    def __init__(
        self,
        run: Run,
        signature: dict[str, Any],
        schema: DataSchema,
        vocabularies: dict[str, list[str]],
        folder: Path,
    ) -> None:
        self._vocabularies, self._missing = vocabularies, run.job().data.missing == "keep"
        self.schema, self.step = schema, int(signature["checkpoint_step"])
        self._folder, self._entry = folder, signature["entry"]
        self._limits = run.settings.predict_limits()
        self._request = {
            "source": str(folder / "source"),
            "entry": signature["entry"],
            "config": signature["config"],
            "precision": signature["precision"],
            "weights": str(folder / "model.safetensors"),
            "task": schema.task,
            "classes": schema.classes,
        }

    @classmethod
    def open(cls, run: Run, folder: Path) -> StoredModel:
        """Verify and unpack the model. Raises BadInput if the run is not finished."""
        manifest = run.find(Manifest)
        if manifest is None:
            raise BadInput(
                f"run: {run.uri} is not finished: it has no {Manifest.FILE}; allowed: a run whose "
                "step `store` is done"
            )
        signature = unpack_model(run, manifest.files, folder / "source")
        (folder / "model.safetensors").write_bytes(model_weights(run, signature))
        validation = _sealed(run, manifest, Validation)
        assert validation is not None  # a model is trained on validated data
        assert validation.data is not None
        vocabulary = _sealed(run, manifest, Vocabulary)
        names = vocabulary.names if vocabulary is not None else {}
        return cls(run, signature, validation.data, names, folder)

    def of_table(self, path: Path) -> tuple[list[str], Iterator[Any]]:
        """The ignored columns of a table, and its predictions chunk by chunk."""
        schema = self.schema
        if not schema.columns:
            raise BadInput(
                f"rows: got {path.name}, but the run's model takes no columns of a table; allowed: "
                f".npz with the arrays {', '.join(schema.inputs)}"
            )
        texts = [one.name for one in schema.columns if one.kind in ("category", "text")]
        table = TableRows.open(path, texts)
        ignored = require_columns(schema, table.schema, path.name)
        columns = [one.name for one in schema.columns]
        size = max(1, min(CHUNK_ROWS, _CHUNK_CELLS // len(columns)))
        return ignored, self._predicted_table(table.batches(columns, size), path.name)

    def _predicted_table(self, batches: Iterator[Any], where: str) -> Iterator[Any]:
        import pyarrow as pa

        with self._server() as server:
            if json.loads(self._ask(server, "form"))["raw"]:
                for batch in batches:
                    rows = self._folder / "rows.arrow"
                    with pa.ipc.new_file(str(rows), batch.schema) as writer:
                        writer.write_batch(batch)
                    yield self._predictions(server, "raw", rows=str(rows))
                return
            encode = ModelInput(self.schema, self._vocabularies, self._missing, where)
            for batch in batches:
                yield self._from_arrays(server, encode.arrays(batch))

    def of_arrays(self, path: Path) -> tuple[list[str], Iterator[Any]]:
        """The ignored arrays of an .npz file, and its predictions chunk by chunk."""
        if self.schema.columns:
            raise BadInput(
                f"rows: got {path.name}, but the run's model takes the columns of a table; "
                f"allowed: {' or '.join(TABLES)}"
            )
        found = ArrayRows.open(path, self.schema)
        row_bytes = sum(array[:1].nbytes for array in found.arrays.values())
        size = max(1, min(CHUNK_ROWS, _CHUNK_BYTES // max(1, row_bytes)))

        def chunks() -> Iterator[Any]:
            with self._server() as server:
                for arrays in found.batches(size):
                    yield self._from_arrays(server, arrays)

        return found.others, chunks()

    def _from_arrays(self, server: SandboxServer, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
        import numpy as np

        paths = {}
        for number, (name, array) in enumerate(arrays.items()):
            paths[name] = str(self._folder / f"input-{number}.npy")
            np.save(paths[name], array)
        return self._predictions(server, "arrays", arrays=paths)

    def _predictions(self, server: SandboxServer, asks: str, **rows: Any) -> Any:
        import pyarrow as pa

        return pa.ipc.open_stream(self._ask(server, asks, **rows)).read_all()

    def _server(self) -> SandboxServer:
        server = SandboxServer(PROCESS, environment=scrubbed_environment())
        try:
            server.wait_ready()
        except OSError as error:
            server.close()
            raise TrainwrightError(f"predict: {error}") from error
        return server

    def _ask(self, server: SandboxServer, asks: str, **more: Any) -> bytes:
        """The sandbox's answer. Raises the model's error, or BadInput if a limit ended it."""
        try:
            outcome = server.ask(
                self._request | {"asks": asks} | more, self._limits, [self._folder]
            )
        except OSError as error:
            raise TrainwrightError(f"predict: {error}") from error
        if not outcome.answer:
            memory = names_memory(outcome.last_line) or outcome.stopped_by == "memory"
            raised = {"time": "TIMEOUT_S"}.get(outcome.stopped_by or "", "")
            setting = "MEMORY_GIB" if memory else raised
            way_out = f"; TRAINWRIGHT_PREDICT_{setting} raises the limit" if setting else ""
            raise BadInput(
                f"model: predicting with {self._entry} {outcome.failure(self._limits)}{way_out}"
            )
        if outcome.answer.startswith(b'{"error"'):
            raise from_document(json.loads(outcome.answer)["error"])
        return outcome.answer
