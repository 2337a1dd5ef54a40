"""The stored model of a finished run: verified, unpacked, and run in the sandbox."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.infra.sandbox import names_memory
from trainwright.infra.sandbox.client import SandboxServer, scrubbed_environment
from trainwright.tasks.data.modalities.images import ImageShape
from trainwright.tasks.errors import BadInput, TrainwrightError, from_document
from trainwright.tasks.inference.arrow_arrays import text_array
from trainwright.tasks.inference.model_input import (
    ModelInput,
    from_offsets,
    require_columns,
    require_finite,
)
from trainwright.tasks.inference.row_source import ArrayRows, FolderImages, TableRows
from trainwright.tasks.inference.series_rows import ForecastColumns, SeriesRows
from trainwright.tasks.inference.unseen_values import UnseenValues, counted
from trainwright.tasks.runs.artefacts.data_schema import Column, DataSchema, Vocabulary
from trainwright.tasks.runs.artefacts.run_status import Manifest
from trainwright.tasks.runs.artefacts.training_result import Result
from trainwright.tasks.runs.artefacts.validation import Validation
from trainwright.tasks.runs.run import Run
from trainwright.tasks.store import model_weights, unpack_model

if TYPE_CHECKING:
    import numpy as np

CHUNK_ROWS = 65_536
_CHUNK_CELLS = 4_000_000
_CHUNK_BYTES = 64 * 2**20
PROCESS = "trainwright.tasks.inference.model_process:answer"


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
        self._vocabularies, self._data = vocabularies, run.job().data
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
            "nesting": schema.nesting,
        }

    @classmethod
    def open(cls, run: Run, folder: Path) -> StoredModel:
        """Verify and unpack the model. Raises BadInput if the run is not finished."""
        manifest = run.find(Manifest)
        if manifest is None and run.has(Result):
            raise BadInput(
                f"run: {run.uri} is trained, but its model is not stored; `trainwright run JOB` "
                "with its job stores it"
            )
        if manifest is None:
            raise BadInput(
                f"run: {run.uri} is not finished: it has no {Manifest.FILE}; allowed: a run whose "
                "step `store` is done"
            )
        signature = unpack_model(run, manifest.files, folder / "source")
        (folder / "model.safetensors").write_bytes(model_weights(run))
        validation = run.find(Validation)
        assert validation is not None  # a model is trained on validated data
        assert validation.data is not None
        vocabulary = run.find(Vocabulary)
        names = vocabulary.names if vocabulary is not None else {}
        return cls(run, signature, validation.data, names, folder)

    def of_table(
        self, path: Path, *, allow_unseen: bool = False
    ) -> tuple[list[str], Iterator[Any], dict[str, int]]:
        """The ignored columns of a table, its predictions chunk by chunk, and unseen values.

        The latter are the rows by column whose value the training part lacks, counted while the
        predictions are read. Unless they are allowed, a column of nothing else raises BadInput at
        the end, and numbers in a column of texts at once.
        """
        schema = self.schema
        if not schema.columns or any(one.kind == "image" for one in schema.columns):
            raise BadInput(
                f"rows: got {path.name}, but the run's model takes no columns of a table; allowed: "
                f"{self._array_file}{', or a folder of images' if self.image else ''}"
            )
        wanted = schema.columns
        if self._of_series:  # past values of the target are inputs too
            wanted = [*wanted, Column(name=schema.target, kind="number")]
        table = TableRows.open(path, schema, wanted)
        ignored = require_columns(
            wanted, table.schema, path.name, schema.dates, allow_numbers=allow_unseen
        )
        columns = [one.name for one in wanted]
        size = max(1, _CHUNK_CELLS // len(columns))
        size = size if self._of_series else min(CHUNK_ROWS, size)
        parts = {part for one in schema.dates.values() for part in one}
        ignored = [name for name in ignored if name != schema.target and name not in parts]
        unseen = UnseenValues(schema.columns, self._vocabularies)
        batches = counted(table.batches(columns, size), schema.columns, unseen)
        predicted = self._predicted_table(batches, path.name)

        def chunks() -> Iterator[Any]:
            yield from predicted
            if not allow_unseen:
                unseen.require_some_seen(path.name)

        return ignored, chunks(), unseen.counts

    def of_images(self, folder: Path) -> tuple[list[str], Iterator[Any]]:
        """No ignored columns, and the predictions of a folder of images with their files' names.

        Only for a model with an `image`.
        """
        import numpy as np

        image = self.image
        assert image is not None
        found = FolderImages.open(folder)
        [name] = self.schema.inputs
        size = max(1, min(CHUNK_ROWS, _CHUNK_BYTES // (4 * math.prod(image))))

        def chunks() -> Iterator[Any]:
            with self._server() as server:
                raw = json.loads(self._ask(server, "form"))["raw"]
                for files, pixels in found.batches(image, size):
                    if raw:
                        path = str(self._folder / "images.npy")
                        np.save(path, pixels)
                        table = self._predictions(server, "raw", images=path, at_once=False)
                    else:
                        given = pixels.astype(self.schema.input_dtypes[name])
                        given /= given.dtype.type(255)
                        table = self._from_arrays(server, {name: given})
                    if "file" in table.column_names:
                        table = table.drop_columns("file")
                    yield table.append_column("file", text_array(files))

        return [], chunks()

    @property
    def image(self) -> ImageShape | None:
        """The shape of the images that the model takes; None if it takes no images."""
        shapes = list(self.schema.inputs.values())
        if self.schema.task != "image-classification" or len(shapes) != 1 or len(shapes[0]) != 3:
            return None
        return ImageShape(*shapes[0])

    @property
    def _of_series(self) -> bool:
        """Whether the rows are times of series, which can't be predicted one by one."""
        return any(one.kind == "time" for one in self.schema.columns)

    @property
    def _array_file(self) -> str:
        return f".npz with the arrays {', '.join(self.schema.inputs)}"

    def _predicted_table(self, batches: Iterator[Any], where: str) -> Iterator[Any]:
        with self._server() as server:
            if json.loads(self._ask(server, "form"))["raw"]:
                if self._of_series:
                    yield self._from_series(server, list(itertools.islice(batches, 2)), where)
                    return
                seen = 0
                for batch in batches:
                    for one in self.schema.columns:
                        if one.kind == "number":
                            require_finite(batch.column(one.name), one.name, seen, where)
                    seen += len(batch)
                    yield self._from_rows(server, from_offsets(batch, self.schema.columns))
                return
            encode = self._encoder(where)
            for batch in batches:
                yield self._from_arrays(server, encode.arrays(batch))

    def _from_series(self, server: SandboxServer, batches: list[Any], where: str) -> Any:
        import pyarrow as pa

        if len(batches) > 1:
            raise BadInput(
                f"rows: {where} has more than {_CHUNK_CELLS:,} values; series are "
                "predicted at once; allowed: fewer series, or the last rows of each"
            )
        if not batches:
            raise BadInput(f"rows: {where} has no rows")
        columns = ForecastColumns.of(self.schema)
        trained = self._vocabularies.get(columns.series or "", [])
        found = SeriesRows.of(pa.Table.from_batches(batches), columns, trained, where)
        return found.joined(self._from_rows(server, found.for_model()))

    def _encoder(self, where: str) -> ModelInput:
        """Raises BadInput if only the source's own `predict` can take such columns."""
        kinds = sorted({one.kind for one in self.schema.columns} - {"number", "category", "text"})
        if kinds:
            raise BadInput(
                f"rows: {where}: the run's model takes columns of the kind {', '.join(kinds)}; "
                f"allowed: a model source that defines predict(model, rows), or {self._array_file}"
            )
        return ModelInput(self.schema, self._vocabularies, self._data.missing == "keep", where)

    def _from_rows(self, server: SandboxServer, batch: Any) -> Any:
        import pyarrow as pa

        rows = self._folder / "rows.arrow"
        with pa.ipc.new_file(str(rows), batch.schema) as writer:
            writer.write_batch(batch)
        return self._predictions(server, "raw", rows=str(rows), at_once=self._of_series)

    def of_arrays(self, path: Path) -> tuple[list[str], Iterator[Any]]:
        """The ignored arrays of an .npz file, and its predictions chunk by chunk."""
        found = ArrayRows.open(path, self.schema, self._data.channels)
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
