"""Data as a model gets it: arrays, their schema, the split for validation, and batches of rows.

`tasks.data.sources` reads the source. This module repairs nothing: it refuses infinite values, and
missing ones unless the job permits them; validation (`tasks.validate`) reports them by row. `load`
holds all data in memory, `tasks.data.prepared` maps it from files. pandas is not loaded, because
each training rank uses this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from trainwright.tasks.data.column_scan import ColumnScan, scan
from trainwright.tasks.data.formats import Raw
from trainwright.tasks.data.row_split import RowSplit, split_rows, training_codes
from trainwright.tasks.data.sources import read
from trainwright.tasks.data.table_arrays import CATEGORIES, table_arrays
from trainwright.tasks.data.target_column import looks_like_numbers, target_column
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts import DataSchema
from trainwright.tasks.spec.job import DataSpec, Task

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_BATCH_ROWS = 1 << 16
_TABLE_TASKS = ("tabular-classification", "tabular-regression", "custom")
_IMAGE_TASKS = ("image-classification", "custom")


@dataclass(frozen=True)
class Dataset:
    """Input arrays by name, rows first, and targets: class numbers (int64) or quantities (float32).

    `inputs` are as stored; `batch` gives rows as the model gets them. A single input is called
    `inputs`, or `categories`. Images are (rows, channels, height, width), float32 from 0 to 1.
    `schema.classes` has the names of the classes. `vocabularies` has the values of the stored codes
    1, 2, … of each category column, in the schema's order of columns.
    """

    inputs: dict[str, Array]
    targets: Array
    schema: DataSchema
    split: RowSplit
    vocabularies: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def batch(self, rows: Array) -> tuple[dict[str, Array], Array]:
        """The inputs and targets of some rows, copied, in the types that the schema names."""
        import numpy as np

        inputs = {
            name: self._as_given(name, np.take(array, rows, axis=0))
            for name, array in self.inputs.items()
        }
        return inputs, np.take(self.targets, rows, axis=0)

    def _as_given(self, name: str, stored: Array) -> Array:
        import numpy as np

        if name != CATEGORIES or not self.split.codes:
            return stored
        codes = np.empty(stored.shape, np.int64)
        for column, given in enumerate(self.split.codes):
            np.take(given, stored[:, column], out=codes[:, column])
        return codes

    def names(self) -> dict[str, list[str]]:
        """The values of each category column by their code, from 1 on, and the target's classes.

        Codes are those of the training part, which `batch` gives.
        """
        found = {
            name: [values[code - 1] for code in given.nonzero()[0].tolist()]
            for (name, values), given in zip(
                self.vocabularies.items(), self.split.codes, strict=True
            )
        }
        classes = self.schema.classes
        return found if classes is None else {**found, self.schema.target: classes}


def load(spec: DataSpec, seed: int = 0) -> Dataset:
    """A job's data, in memory, with the split by `seed`.

    Raises BadInput if it can't be read or does not fit the task.
    """
    return from_raw(read(spec), spec, seed)


def describe(spec: DataSpec, seed: int = 0) -> DataSchema:
    """The schema of a job's data. Raises BadInput as `load` does."""
    return load(spec, seed).schema


def from_raw(raw: Raw, spec: DataSpec, seed: int = 0) -> Dataset:
    """The dataset made of a source's rows. Raises BadInput if they do not fit the task."""
    import numpy as np

    scans = _scans(raw, spec)
    task = _task(raw, spec, scans)
    if raw.rows < 2:
        split_rows(raw.rows, spec.validation_fraction, seed)  # raises BadInput
    table = table_arrays(scans, spec) if raw.is_table else None
    if table is not None:
        inputs = {
            name: np.empty((raw.rows, *shape), table.dtypes[name])
            for name, shape in table.inputs.items()
        }
        begin = 0
        for batch in raw.table.to_batches(_BATCH_ROWS):
            for name, chunk in table.of(batch).items():
                inputs[name][begin : begin + len(chunk)] = chunk
            begin += batch.num_rows
    elif raw.images is not None:
        inputs = {"inputs": _stacked(raw, spec)}
    else:
        inputs = {name: as_input(array, task) for name, array in raw.arrays.items()}
    if not raw.is_table:
        for name, array in inputs.items():
            _require_finite(array, f"data.uri: {spec.uri}: {name}")
    targets, classes = _targets(raw, spec, task, scans)
    schema = DataSchema(
        task=task,
        rows=raw.rows,
        train_rows=0,
        validation_rows=0,
        inputs={name: tuple(array.shape[1:]) for name, array in inputs.items()},
        input_dtypes={
            name: "int64" if name == CATEGORIES and table else str(array.dtype)
            for name, array in inputs.items()
        },
        target=spec.target,
        target_dtype=str(targets.dtype),
        classes=classes,
        columns=table.columns if table else [],
        dropped=table.dropped if table else [],
        sha256=raw.sha256,
    )
    vocabularies = {
        name: values.to_pylist() for name, values in (table.vocabularies if table else {}).items()
    }
    return divided(inputs, targets, schema, vocabularies, spec, seed)


def divided(
    inputs: dict[str, Array],
    targets: Array,
    schema: DataSchema,
    vocabularies: Mapping[str, Sequence[str]],
    spec: DataSpec,
    seed: int,
) -> Dataset:
    """The dataset of stored arrays with the split by a seed, whose sizes the schema gets."""
    train, validation = split_rows(schema.rows, spec.validation_fraction, seed)
    sizes = [one.vocabulary for one in schema.columns if one.kind == "category"]
    codes = training_codes(inputs[CATEGORIES], train, sizes) if sizes else []
    sizes_of_parts = {"train_rows": len(train), "validation_rows": len(validation)}
    return Dataset(
        inputs,
        targets,
        schema.model_copy(update=sizes_of_parts),
        RowSplit(train, validation, codes),
        vocabularies,
    )


def task_of(raw: Raw, spec: DataSpec) -> Task:
    """The job's task, or the inferred one. Raises BadInput if the job's does not fit the data."""
    return _task(raw, spec, _scans(raw, spec, inputs=False))


def _scans(raw: Raw, spec: DataSpec, *, inputs: bool = True) -> dict[str, ColumnScan]:
    """The scans of a source's columns: all of a table, else only the target."""
    table = raw.table
    if not (raw.is_table and inputs):
        table = table.select([name for name in table.column_names if name == spec.target])
    try:
        return scan(table.to_batches(_BATCH_ROWS), table.schema, spec.target)
    except ValueError as error:
        raise BadInput(f"data.uri: got {spec.uri}; it can't be read: {error}") from None


def _task(raw: Raw, spec: DataSpec, scans: Mapping[str, ColumnScan]) -> Task:
    images = raw.images is not None or any(
        _looks_like_images(array) for array in raw.arrays.values()
    )
    allowed = _TABLE_TASKS if raw.is_table else _IMAGE_TASKS if raw.images is not None else None
    if spec.task is not None:
        if allowed and spec.task not in allowed:
            what = "a table" if raw.is_table else "a folder of images"
            raise BadInput(f"data.task: got {spec.task}; allowed for {what}: {', '.join(allowed)}")
        if spec.task == "image-classification" and not (
            images or all(a.ndim == 3 for a in raw.arrays.values())
        ):
            raise BadInput(
                "data.task: got image-classification, but the arrays have no height and width; "
                "choose another task"
            )
        return spec.task
    if raw.targets is not None:
        return "forecasting"
    if spec.target not in scans:
        _no_such_target(raw, spec)
    numbers = looks_like_numbers(scans[spec.target])
    if images:
        return "custom" if numbers else "image-classification"
    return "tabular-regression" if numbers else "tabular-classification"


def as_input(array: Array, task: Task) -> Array:
    """A source's array as a model input.

    Images are scaled to 0..1, channels first; tokens are int64; everything else is float32.
    """
    import numpy as np

    if _looks_like_images(array) or (task == "image-classification" and array.ndim == 3):
        if array.ndim == 3:
            array = array[:, None]
        elif array.shape[1] > 4 and array.shape[3] <= 4:
            array = array.transpose(0, 3, 1, 2)
        scale = float(np.iinfo(array.dtype).max) if array.dtype.kind == "u" else 1.0
        return np.ascontiguousarray(array, dtype=np.float32) / np.float32(scale)
    whole = array.dtype.kind in "iu" and task in ("text-classification", "custom")
    return np.ascontiguousarray(array, dtype=np.int64 if whole else np.float32)


def _looks_like_images(array: Array) -> bool:
    return array.ndim == 4 or (array.ndim == 3 and array.dtype.str == "|u1")


def _stacked(raw: Raw, spec: DataSpec) -> Array:
    import numpy as np

    images = raw.images or []
    files = raw.table.column("file").to_pylist()
    for file, image in zip(files, images, strict=True):
        if image is None:
            raise BadInput(f"data.uri: {spec.uri}: {file} can't be read as an image")
        if images[0] is not None and image.shape != images[0].shape:
            raise BadInput(
                f"data.uri: {spec.uri}: {file} is {_size(image)}, "
                f"{files[0]} is {_size(images[0])}; allowed: one size"
            )
    return np.asarray(images, dtype=np.float32) / np.float32(255)


def _size(image: Array) -> str:
    channels, height, width = image.shape
    return f"{height}×{width} with {channels} channel{'s' if channels > 1 else ''}"


def _targets(
    raw: Raw, spec: DataSpec, task: Task, scans: Mapping[str, ColumnScan]
) -> tuple[Array, list[str] | None]:
    """Targets, and the names of the classes if they are classes."""
    import numpy as np

    if raw.targets is not None:
        if task.endswith("classification") or raw.targets.dtype.kind not in "biuf":
            shape = raw.targets.shape
            allowed = "one class per row" if task.endswith("classification") else "numbers"
            raise BadInput(
                f"data.target: {spec.target!r} has shape {shape} of {raw.targets.dtype}; "
                f"allowed for {task}: {allowed}"
            )
        targets = np.ascontiguousarray(raw.targets, dtype=np.float32)
        _require_finite(targets, f"data.target: {spec.target!r}")
        return targets, None
    if spec.target not in scans:
        _no_such_target(raw, spec)
    form = target_column(scans[spec.target], task)
    parts = [form.array(chunk) for chunk in raw.table.column(spec.target).chunks]
    return np.concatenate(parts), form.classes


def _no_such_target(raw: Raw, spec: DataSpec) -> NoReturn:
    names = raw.table.column_names
    listed = ", ".join(names[:20]) + (f", … ({len(names)} in all)" if len(names) > 20 else "")
    raise BadInput(
        f"data.target: got {spec.target!r}; "
        f"allowed: a column of {spec.uri}: {listed or 'it has none'}"
    )


def _require_finite(array: Array, where: str) -> None:
    import numpy as np

    if array.dtype.kind == "f" and not np.isfinite(array).all():
        count = int(np.count_nonzero(~np.isfinite(array)))
        raise BadInput(
            f"{where}: {count} of {array.size} values are NaN or infinite; allowed: none"
        )
