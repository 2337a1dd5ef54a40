"""The schema of data that a model's source reads, derived in the sandbox from its samples.

From two samples of each part; others are compared with these as far as a second allows. If the
dataset has an attribute `classes`, their names, the task is a classification.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trainwright.estimator.trace import source as model_source
from trainwright.infra.sandbox import SandboxLimits
from trainwright.infra.sandbox.client import call
from trainwright.tasks.data.model_reader import ModelReader
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
    Form = dict[str, tuple[tuple[int, ...], str]]

_LOOKED_AT, _LOOK_S = 10_000, 1.0
"""Up to so many samples, drawn at random, are looked at within about this time."""


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
        return derived_schema(reader, request["sha256"]).model_dump_json()
    except TrainwrightError as error:
        return json.dumps({"error": str(error)})


def derived_schema(reader: ModelReader, sha256: str) -> DataSchema:
    """The schema of what a source reads.

    Raises BadInput if its samples do not fit the job, or one of those looked at is unlike the first
    one or has a value that is not finite.
    """
    look_until = time.monotonic() + _LOOK_S
    train, validation = reader.split.train, reader.split.validation
    inputs, targets = _finite_batch(reader, train[:2])
    form = _form(inputs, targets)
    other = _like(reader, validation[:2], form)
    if _shapes(other) != _shapes(form):
        raise BadInput(
            "data.uri: inputs for training and validation have different shapes; allowed: one shape"
        )
    for rows in _drawn(len(train) + len(validation)):
        if time.monotonic() > look_until:
            break
        _like(reader, rows, form)
    shapes = _shapes(form)
    classes: Sequence[Any] | None = getattr(reader.parts[0], "classes", None)
    task = _task(reader.spec, classes, max(map(len, shapes.values())), str(targets.dtype))
    return DataSchema(
        task=task,
        rows=len(train) + len(validation),
        train_rows=len(train),
        validation_rows=len(validation),
        inputs=shapes,
        input_dtypes={name: str(one.dtype) for name, one in inputs.items()},
        nesting=reader.nesting,
        target=reader.spec.target,
        target_dtype=str(targets.dtype),
        target_shape=tuple(targets.shape[1:]),
        classes=[str(name) for name in classes or ()] if _classifies(task) else None,
        sha256=sha256,
    )


def _finite_batch(reader: ModelReader, rows: Array) -> tuple[dict[str, Array], Array]:
    inputs, targets = reader.batch(rows)
    reader.require_finite(rows, inputs, targets)
    return inputs, targets


def _like(reader: ModelReader, rows: Array, form: Form) -> Form:
    """The form of the samples of some rows. Raises BadInput if it is not that of the first sample.

    Unless the source has a collate of its own, which may pad samples of a batch.
    """
    found = _form(*_finite_batch(reader, rows))
    if not reader.own_collate and found != form:
        reader.require_alike(rows, [reader.sample(row) for row in rows.tolist()])
    return found


def _form(inputs: Mapping[str, Array], targets: Array) -> Form:
    """A sample's shape and type, by input; `""` is the target."""
    arrays = {**inputs, "": targets}
    return {name: (tuple(one.shape[1:]), str(one.dtype)) for name, one in arrays.items()}


def _shapes(form: Form) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, (shape, _) in form.items() if name}


def _drawn(count: int) -> Sequence[Array]:
    """Rows of both parts in twos, drawn at random, the same each time."""
    import numpy as np

    rows = np.random.default_rng(0).choice(count, min(count, _LOOKED_AT), replace=False)
    return np.array_split(rows, max(1, len(rows) // 2))


def _task(spec: DataSpec, classes: Any, dimensions: int, target_dtype: str) -> Task:
    """The job's task, or the one that the classes show."""
    task = spec.task
    if classes is None:
        if task is not None and _classifies(task):
            raise BadInput(
                f"data.task: got {task}, but the dataset has no attribute `classes`, the names of "
                "the classes"
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
