"""Data that a model's source reads: its `dataset(uri, part, **config)` replaces this room.

`part` is `train` or `validation`; the result is a map-style torch dataset of (input, target) pairs.
An optional `collate(samples)` makes a batch of samples; by default it is torch's. If the dataset
has an attribute `classes`, their names, the task is a classification.

The schema is derived in the sandbox, from two samples of each part. Ranks read batches by row
numbers, as of any other data; the rows of the validation part follow those of the training part.
"""

from __future__ import annotations

import json
import math
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trainwright.estimator.trace import source as model_source
from trainwright.estimator.trace.source import ModelDefinition, described
from trainwright.infra.sandbox import SandboxLimits
from trainwright.infra.sandbox.client import call
from trainwright.tasks.data.dataset import RowSplit
from trainwright.tasks.data.sources import content_sha256
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.model import ModelSource
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.data_spec import DataSpec, Task
from trainwright.tasks.spec.job import ModelSpec

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


def schema_in_sandbox(
    folder: Path, entry: str, config: Mapping[str, Any], spec: DataSpec, limits: SandboxLimits
) -> DataSchema:
    """The schema of a local source that the model's source in a folder reads.

    Raises BadInput if it can't be read or does not fit the task.
    """
    request = {
        "folder": str(folder.absolute()),
        "entry": entry,
        "config": dict(config),
        "data": spec.model_dump(mode="json"),
        "sha256": content_sha256(spec),
    }
    function = f"{answer.__module__}:{answer.__name__}"
    try:
        outcome = call(function, request, limits, readable=[folder, Path(spec.uri)])
    except OSError as error:
        raise TrainwrightError(f"data.uri: {spec.uri} can't be read: {error}") from error
    if not outcome.answer:
        raise BadInput(f"data.uri: reading {spec.uri} by {entry} {outcome.failure(limits)}")
    try:
        document = json.loads(outcome.answer)
        if "error" not in document:
            return DataSchema.model_validate(document)
        said = str(document["error"])
    except (ValueError, LookupError, TypeError, ValidationError):
        raise BadInput(f"model.source: {entry} returned something other than a schema") from None
    raise BadInput(said)


def schema_of_model(model: ModelSpec, spec: DataSpec, settings: Settings) -> DataSchema:
    """The schema of a local source that a job's model reads, without a run. Raises BadInput."""
    source = ModelSource.given(model)
    with tempfile.TemporaryDirectory(prefix="trainwright-source-") as name:
        folder, limits = source.unpack(Path(name)), settings.extract_limits()
        return schema_in_sandbox(folder, source.entry, source.config, spec, limits)


def answer(request: dict[str, Any]) -> str:
    """In the sandbox: the schema as JSON, or `{"error": …}`."""
    spec = DataSpec.model_validate(request["data"])
    try:
        definition = model_source.load(Path(request["folder"]), request["entry"])
        reader = ModelReader(definition, spec, request["config"])
        return reader.derived_schema(request["sha256"]).model_dump_json()
    except TrainwrightError as error:
        return json.dumps({"error": str(error)})


class ModelReader:
    """What a model's source reads, as ranks use a `dataset.Dataset`. Samples are read in turn."""

    costly = True
    nbytes = 0
    """Nothing is stored."""

    def __init__(
        self,
        definition: ModelDefinition,
        spec: DataSpec,
        config: Mapping[str, Any],
        validated: DataSchema | None = None,
    ) -> None:
        """Raises BadInput if the source has no `dataset`, it fails, or is not as validated."""
        import numpy as np
        import torch

        make = definition.dataset
        if make is None:
            raise BadInput(
                "data.reader: got model; the model's source defines no function "
                "dataset(uri, part, **config) -> torch.utils.data.Dataset"
            )
        with _users_code(f"dataset({spec.uri!r}, …)"):
            self._parts = [make(spec.uri, part, **config) for part in ("train", "validation")]
            train, validation = (len(part) for part in self._parts)
        if min(train, validation) < 1:
            raise BadInput(
                f"data.uri: dataset({spec.uri!r}, …) has {train} samples to train and {validation} "
                "to validate; allowed: at least one each"
            )
        if validated and (validated.train_rows, validated.validation_rows) != (train, validation):
            raise BadInput(
                f"data.uri: dataset({spec.uri!r}, …) has {train} and {validation} samples, but had "
                f"{validated.train_rows} and {validated.validation_rows} when it was validated; "
                "--new starts a new run"
            )
        self._spec, self._validated = spec, validated
        self._collate = definition.collate or torch.utils.data.default_collate
        self._one_thread = threading.Lock()
        self.split = RowSplit(np.arange(train), np.arange(train, train + validation))

    @property
    def schema(self) -> DataSchema:
        """The validated schema."""
        assert self._validated is not None
        return self._validated

    def names(self) -> dict[str, list[str]]:
        """The names of the classes, under the target's name."""
        classes = self.schema.classes
        return {} if classes is None else {self.schema.target: classes}

    @property
    def row_bytes(self) -> int:
        """The size of a row as the model gets it."""
        import numpy as np

        return sum(
            math.prod(shape) * np.dtype(self.schema.input_dtypes[name]).itemsize
            for name, shape in self.schema.inputs.items()
        )

    def in_epoch(self, epoch: int) -> ModelReader:
        """The same data: the source does not know of epochs."""
        return self

    def batch(self, rows: Array) -> tuple[dict[str, Array], Array]:
        """The inputs by name and the targets of some rows, as `collate` gives them.

        Raises BadInput if the user's code fails, or gives no pair of tensors.
        """
        import torch

        train = len(self.split.train)
        with self._one_thread:
            samples = []
            for row in rows.tolist():
                part, place = divmod(row, train) if row < train else (1, row - train)
                with _users_code(f"sample {place} of the part {('train', 'validation')[part]}"):
                    samples.append(self._parts[part][place])
            with _users_code("collate"):
                pair = self._collate(samples)
        if isinstance(pair, Sequence) and len(pair) == 2:
            inputs = pair[0] if isinstance(pair[0], dict) else {"inputs": pair[0]}
            tensors = [*inputs.values(), pair[1]]
            if all(isinstance(one, torch.Tensor) and len(one) == len(rows) for one in tensors):
                return {name: one.numpy() for name, one in inputs.items()}, pair[1].numpy()
        raise BadInput(
            f"model.source: collate gave {_shown(pair)} of {len(rows)} samples; allowed: a pair of "
            "inputs (a tensor, or a dict of them) and targets (a tensor), samples first"
        )

    def derived_schema(self, sha256: str) -> DataSchema:
        """The schema, from two samples of each part. Raises BadInput if they do not fit the job."""
        train, validation = self.split.train, self.split.validation
        inputs, targets = self.batch(train[:2])
        shapes = {name: tuple(one.shape[1:]) for name, one in inputs.items()}
        other, _ = self.batch(validation[:2])
        if {name: tuple(one.shape[1:]) for name, one in other.items()} != shapes:
            raise BadInput(
                "data.uri: inputs for training and validation have different shapes; "
                "allowed: one shape"
            )
        classes: Sequence[Any] | None = getattr(self._parts[0], "classes", None)
        task = self._task(classes, max(map(len, shapes.values())), str(targets.dtype))
        return DataSchema(
            task=task,
            rows=len(train) + len(validation),
            train_rows=len(train),
            validation_rows=len(validation),
            inputs=shapes,
            input_dtypes={name: str(one.dtype) for name, one in inputs.items()},
            target=self._spec.target,
            target_dtype=str(targets.dtype),
            target_shape=tuple(targets.shape[1:]),
            classes=[str(name) for name in classes or ()] if _classifies(task) else None,
            sha256=sha256,
        )

    def _task(self, classes: Any, dimensions: int, target_dtype: str) -> Task:
        """The job's task, or the one that the classes show."""
        task = self._spec.task
        if classes is None:
            if task is not None and _classifies(task):
                raise BadInput(
                    f"data.task: got {task}, but the dataset has no attribute `classes`, the names "
                    "of the classes"
                )
            return task or "custom"
        if task is None:
            task = "image-classification" if dimensions == 3 else "tabular-classification"
        if _classifies(task) and target_dtype != "int64":
            raise BadInput(
                f"data.task: got {task}, but targets are {target_dtype}; allowed: int64 numbers of "
                "classes"
            )
        return task


def _classifies(task: Task) -> bool:
    return task.endswith("classification")


@contextmanager
def _users_code(what: str) -> Iterator[None]:
    """Raise the errors of the model's source as BadInput, in one line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise BadInput(f"model.source: {what} raised {described(error)}") from error


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_shown(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(_shown, value[:4])) + ")"
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} {tuple(shape)}"
