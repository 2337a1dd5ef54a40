"""Data as a model gets it: input and target arrays, their schema, the split for validation.

`tasks.data.sources` reads the source. This module repairs nothing: it refuses missing and
infinite values, which validation (`tasks.validate`) reports by row. All data is held in memory.
pandas is not loaded, because each training rank calls `load`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from trainwright.tasks.data.formats import Raw, to_arrow, to_numpy
from trainwright.tasks.data.sources import read
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts import DataSchema
from trainwright.tasks.spec.job import DataSpec, Task

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

MAX_CODES = 50
"""A text column with at most this many distinct values becomes numbers in alphabetical order."""
MAX_CLASSES = 100
"""An integer target with at most this many distinct values counts as classes."""

_TABLE_TASKS = ("tabular-classification", "tabular-regression", "custom")
_IMAGE_TASKS = ("image-classification", "custom")


@dataclass(frozen=True)
class Dataset:
    """Input arrays by name, rows first, and targets: class numbers (int64) or quantities (float32).

    A single input is called `inputs`. Images are (rows, channels, height, width), float32 from 0
    to 1. `schema.classes` has the names of the classes.
    """

    inputs: dict[str, Array]
    targets: Array
    schema: DataSchema


def load(spec: DataSpec) -> Dataset:
    """A job's data, in memory. Raises BadInput if it can't be read or does not fit the task."""
    return from_raw(read(spec), spec)


def describe(spec: DataSpec) -> DataSchema:
    """The schema of a job's data. Raises BadInput as `load` does."""
    return load(spec).schema


def split_rows(rows: int, validation_fraction: float, seed: int) -> tuple[Array, Array]:
    """The row numbers for training and validation: disjoint, complete, non-empty, rising.

    Deterministic on every machine: NumPy's permutation by PCG64. Raises BadInput below two rows.
    """
    import numpy as np

    if rows < 2:
        raise BadInput(
            f"data.uri: got {rows} rows; allowed: at least 2, for training and validation"
        )
    held_out = min(max(round(rows * validation_fraction), 1), rows - 1)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(rows)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def from_raw(raw: Raw, spec: DataSpec) -> Dataset:
    """The dataset made of a source's rows. Raises BadInput if they do not fit the task."""
    task = task_of(raw, spec)
    if raw.is_table:
        inputs = {"inputs": _features(raw.table, spec)}
    elif raw.images is not None:
        inputs = {"inputs": _stacked(raw, spec)}
    else:
        inputs = {name: as_input(array, task) for name, array in raw.arrays.items()}
    for name, array in inputs.items():
        _require_finite(array, f"data.uri: {spec.uri}: {name}")
    targets, classes = _targets(raw, spec, task)
    train, validation = split_rows(raw.rows, spec.validation_fraction, 0)
    schema = DataSchema(
        task=task,
        rows=raw.rows,
        train_rows=len(train),
        validation_rows=len(validation),
        inputs={name: tuple(array.shape[1:]) for name, array in inputs.items()},
        input_dtypes={name: str(array.dtype) for name, array in inputs.items()},
        target=spec.target,
        target_dtype=str(targets.dtype),
        classes=classes,
        sha256=raw.sha256,
    )
    return Dataset(inputs, targets, schema)


def task_of(raw: Raw, spec: DataSpec) -> Task:
    """The job's task, or the inferred one. Raises BadInput if the job's does not fit the data."""
    import pyarrow as pa

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
    if spec.target not in raw.table.column_names:
        _no_such_target(raw, spec)
    column = raw.table.column(spec.target)
    numbers = pa.types.is_floating(column.type) or (
        pa.types.is_integer(column.type)
        and len(column.unique()) > min(MAX_CLASSES, max(2, raw.rows // 2))
    )
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


def _features(table: Any, spec: DataSpec) -> Array:
    """All columns except the target as float32, (rows, columns)."""
    import numpy as np
    import pyarrow as pa

    names = [name for name in table.column_names if name != spec.target]
    if not names:
        raise BadInput(
            f"data.uri: {spec.uri} has no column except the target; allowed: at least one input"
        )
    features = np.empty((table.num_rows, len(names)), dtype=np.float32)
    for number, name in enumerate(names):
        column = table.column(name)
        _require_present(column, f"data.uri: {spec.uri}: column {name!r}")
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            column, values = _codes(column)
            if len(values) > MAX_CODES:
                raise BadInput(
                    f"data.uri: {spec.uri}: column {name!r} holds {len(values)} different texts; "
                    f"allowed: numbers, or at most {MAX_CODES} different texts"
                )
        elif not (
            pa.types.is_integer(column.type)
            or pa.types.is_floating(column.type)
            or pa.types.is_boolean(column.type)
        ):
            raise BadInput(
                f"data.uri: {spec.uri}: column {name!r} holds {column.type}; "
                f"allowed: numbers, or at most {MAX_CODES} different texts"
            )
        features[:, number] = to_numpy(column)
        _require_finite(features[:, number], f"data.uri: {spec.uri}: column {name!r}")
    return features


def _targets(raw: Raw, spec: DataSpec, task: Task) -> tuple[Array, list[str] | None]:
    """Targets, and the names of the classes if they are classes."""
    import numpy as np
    import pyarrow as pa

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
    if spec.target not in raw.table.column_names:
        _no_such_target(raw, spec)
    column = raw.table.column(spec.target)
    where = f"data.target: {spec.target!r}"
    _require_present(column, where)
    text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    whole, flag = pa.types.is_integer(column.type), pa.types.is_boolean(column.type)
    if not (text or whole or flag or pa.types.is_floating(column.type)):
        raise BadInput(f"{where} holds {column.type}; allowed: numbers, texts, true and false")
    if task.endswith("classification") or (task == "custom" and (text or flag)):
        if pa.types.is_floating(column.type):
            numbers = to_numpy(column)
            if not np.array_equal(numbers, np.floor(numbers)) or not np.isfinite(numbers).all():
                raise BadInput(
                    f"{where} holds fractions; "
                    f"allowed for {task}: whole numbers, texts, true and false"
                )
            column = pa.chunked_array([to_arrow(numbers.astype(np.int64))])
        codes, classes = _codes(column)
        return to_numpy(codes).astype(np.int64), classes
    if text:
        raise BadInput(f"{where} holds texts; allowed for {task}: numbers")
    targets = to_numpy(column).astype(np.int64 if whole and task == "custom" else np.float32)
    _require_finite(targets, where)
    return targets, None


def _codes(column: Any) -> tuple[Any, list[str]]:
    """Each value's index in the sorted list of distinct values, and that list."""
    from pyarrow import compute

    values = column.unique()
    values = values.take(compute.array_sort_indices(values))
    return compute.index_in(column, value_set=values), [str(value) for value in values.to_pylist()]


def _no_such_target(raw: Raw, spec: DataSpec) -> NoReturn:
    names = raw.table.column_names
    listed = ", ".join(names[:20]) + (f", … ({len(names)} in all)" if len(names) > 20 else "")
    raise BadInput(
        f"data.target: got {spec.target!r}; "
        f"allowed: a column of {spec.uri}: {listed or 'it has none'}"
    )


def _require_present(column: Any, where: str) -> None:
    missing = column.null_count
    if missing:
        raise BadInput(f"{where}: {missing} of {len(column)} values are missing; allowed: none")


def _require_finite(array: Array, where: str) -> None:
    import numpy as np

    if array.dtype.kind == "f" and not np.isfinite(array).all():
        count = int(np.count_nonzero(~np.isfinite(array)))
        raise BadInput(
            f"{where}: {count} of {array.size} values are NaN or infinite; allowed: none"
        )
