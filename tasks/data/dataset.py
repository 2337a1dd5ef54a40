"""Data as a model gets it: arrays, their schema, the split for validation, and batches of rows.

`tasks.data.sources` opens the source, `stored_rows` says what is stored of it. Nothing is repaired:
infinite values are refused, and missing ones unless the job permits them; validation
(`tasks.validate`) reports them by row. `load` holds all data in memory, `tasks.data.prepared` reads
it from files. pandas is not loaded, because each training rank uses this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from trainwright.tasks import progress
from trainwright.tasks.data.formats import Raw
from trainwright.tasks.data.modalities.augmentation import Augmentation, augmented
from trainwright.tasks.data.modalities.images import ImageRows
from trainwright.tasks.data.modalities.kept import Kept
from trainwright.tasks.data.modalities.series import WindowParts
from trainwright.tasks.data.row_file import RowFile
from trainwright.tasks.data.row_split import CHUNK_ROWS, validation_rows
from trainwright.tasks.data.sources import content_sha256, open_source, readable
from trainwright.tasks.data.stored_rows import KEYS, TARGETS, StoredRows, of_arrays, of_table
from trainwright.tasks.data.tables.table_arrays import CATEGORIES
from trainwright.tasks.data.tables.table_source import TableSource
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.spec.data_spec import DataSpec

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    Sliced = Array | RowFile
    Stored = Sliced | Kept


@dataclass(frozen=True)
class RowSplit:
    """Row numbers, rising, and the codes of the training part.

    `codes[k][c]` is the model's code of the k-th category column's stored code c: the value's place
    among those of the training rows, from 1 on; 0 if no training row has it.
    """

    train: Sliced
    validation: Sliced
    codes: list[Array] = field(default_factory=list)


@dataclass(frozen=True)
class Dataset:
    """Input arrays by name, rows first, and targets: class numbers (int64) or quantities (float32).

    `inputs` are as stored; `batch` gives rows as the model gets them. A single input is called
    `inputs`, or `categories`. Images are (rows, channels, height, width), float32 from 0 to 1.
    `schema.classes` has the names of the classes. `vocabularies` has the values of the stored codes
    1, 2, … of each category column, in the schema's order of columns.
    """

    inputs: dict[str, Stored]
    targets: Stored
    schema: DataSchema
    split: RowSplit
    vocabularies: Mapping[str, Sequence[str]] = field(default_factory=dict)
    augmentation: Augmentation = "none"
    seed: int = 0
    epoch: int | None = None
    """the epoch of training for which images are augmented; None: they are not"""

    def class_rows(self) -> list[int]:
        """The number of rows of each class, in both parts; empty without classes."""
        import numpy as np

        count, targets = len(self.schema.classes or ()), cast("Sliced", self.targets)
        found = np.zeros(count, np.int64)
        for begin in range(0, self.schema.rows if count else 0, CHUNK_ROWS):
            found += np.bincount(targets[begin : begin + CHUNK_ROWS], minlength=count)
        return [int(one) for one in found]

    def in_epoch(self, epoch: int) -> Dataset:
        """The same data as an epoch of training sees it."""
        return replace(self, epoch=epoch) if self.augmentation != "none" else self

    @property
    def costly(self) -> bool:
        """Whether a batch takes more than copying: images to decode or to augment."""
        encoded = any(isinstance(one, ImageRows) for one in self.inputs.values())
        return encoded or self.augmentation != "none"

    @property
    def nbytes(self) -> int:
        """The size of all arrays as stored."""
        return sum(array.nbytes for array in (*self.inputs.values(), self.targets))

    @property
    def row_bytes(self) -> int:
        """The size of a row as stored."""
        return self.nbytes // len(self.targets)

    def batch(self, rows: Array) -> tuple[dict[str, Array], Array]:
        """The inputs and targets of some rows, copied, in the types that the schema names."""
        inputs = {name: self._as_given(name, _rows(one, rows)) for name, one in self.inputs.items()}
        if self.epoch is not None:
            for name, given in inputs.items():
                if given.ndim == 4:
                    changed = augmented(given, rows, self.augmentation, self.seed, self.epoch)
                    inputs[name] = changed
        return inputs, _rows(self.targets, rows)

    def _as_given(self, name: str, stored: Array) -> Array:
        import numpy as np

        if name != CATEGORIES or not self.split.codes:
            given = stored.astype(self.schema.input_dtypes[name], copy=False)
            if stored.dtype == np.uint8 and given.dtype.kind == "f":  # pixels
                given /= np.float32(255)
            return given
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


def _rows(array: Stored, rows: Array) -> Array:
    import numpy as np

    if isinstance(array, RowFile | ImageRows | WindowParts):
        return array.take(rows)
    return np.take(np.asarray(array), rows, axis=0)


def stored_rows(source: TableSource | Raw, sha256: str, spec: DataSpec) -> StoredRows:
    """What is stored of a source. Raises BadInput if it does not fit the task.

    If it fits the task that is inferred without `data.task`, the error says so.
    """
    try:
        return _stored_rows(source, sha256, spec)
    except BadInput as error:
        if spec.task is None:
            raise
        try:
            fits = _stored_rows(source, sha256, spec.model_copy(update={"task": None}))
        except BadInput:
            raise error from None
        raise BadInput(f"{error}; or clear data.task: the data is {fits.schema.task}") from None


def _stored_rows(source: TableSource | Raw, sha256: str, spec: DataSpec) -> StoredRows:
    if isinstance(source, TableSource):
        return of_table(source, sha256, spec)
    return of_arrays(source, spec)


def load(spec: DataSpec, seed: int = 0) -> Dataset:
    """A job's data, in memory, with the split by `seed`.

    Raises BadInput if it can't be read or does not fit the task.
    """
    with readable(spec):
        return _held(stored_rows(open_source(spec), content_sha256(spec), spec), spec, seed)


def describe(spec: DataSpec, seed: int = 0) -> DataSchema:
    """The schema of a job's data, in bounded memory. Raises BadInput as `load` does."""
    import numpy as np

    with readable(spec):
        stored = stored_rows(open_source(spec), content_sha256(spec), spec)
        schema = stored.schema
        if spec.time is not None:  # series are split already
            return schema
        kept = {
            name: np.empty(stored.arrays[name][0], "uint16" if name == TARGETS else "int64")
            for name in (TARGETS, KEYS)
            if name in stored.arrays and (name == KEYS or schema.classes is not None)
        }
        begin = 0
        for chunk in stored.chunks() if kept else ():
            for name, array in kept.items():
                array[begin : begin + len(chunk[name])] = chunk[name]
            begin += len(chunk[TARGETS])
    held_out = validation_rows(spec, seed, schema.rows, kept.get(TARGETS), kept.get(KEYS))
    count = int(np.count_nonzero(held_out))
    return schema.model_copy(update={"train_rows": schema.rows - count, "validation_rows": count})


def first_targets(spec: DataSpec, most_rows: int, most_numbers: int) -> Array | None:
    """Targets of some rows, evenly spaced in the first part of the data; None of series."""
    import numpy as np

    with readable(spec):
        stored = stored_rows(open_source(spec), "", spec)
        targets = next(stored.chunks(), {}).get(TARGETS)
    if targets is None or not len(targets):
        return None
    count = min(len(targets), most_rows, max(4, most_numbers // max(1, targets[0].size)))
    chosen: Array = targets[np.linspace(0, len(targets) - 1, count).round().astype(int)]
    return chosen


def say_changes(schema: DataSchema) -> None:
    """Notices: how the source was read, which columns are left out or get another form."""
    for note in schema.notes:
        progress.emit("notice", message=f"data: {note}")
    for name in schema.dropped:
        what = f"column {name!r} has no values" if name else "a column has no name"
        progress.emit("notice", message=f"data: {what}; it is left out")
    for name in schema.index:
        message = f"data: column {name!r} is the index of a pandas table; it is left out"
        progress.emit("notice", message=message)
    for name, parts in schema.dates.items():
        listed = ", ".join(map(repr, parts))
        progress.emit(
            "notice", message=f"data: column {name!r} holds dates; the model gets {listed}"
        )


def from_raw(raw: Raw, spec: DataSpec, seed: int = 0) -> Dataset:
    """The dataset made of rows in memory. Raises BadInput if they do not fit the task."""
    source = TableSource.of(raw.table) if raw.is_table else raw
    return _held(stored_rows(source, raw.sha256, spec), spec, seed)


def _held(stored: StoredRows, spec: DataSpec, seed: int) -> Dataset:
    import numpy as np

    arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in stored.arrays.items()}
    begin = 0
    for chunk in stored.chunks():
        for name, part in chunk.items():
            arrays[name][begin : begin + len(part)] = part
        begin += len(next(iter(chunk.values())))
    whole: dict[str, Stored] = {**arrays, **stored.kept}
    split = split_of(whole, stored.schema, spec, seed)
    return divided(whole, stored.schema, stored.vocabularies, split, spec, seed)


def split_of(
    arrays: Mapping[str, Stored], schema: DataSchema, spec: DataSpec, seed: int
) -> RowSplit:
    """The split by a seed of what is stored (`StoredRows.arrays`). Raises BadInput.

    Of series, the first windows are for training, and their codes are those of the training part.
    """
    import numpy as np

    if spec.time is not None:
        count = schema.train_rows
        series = [one.vocabulary for one in schema.columns if one.kind == "series"]
        codes = [np.arange(size) for size in series]
        return RowSplit(np.arange(count), np.arange(count, schema.rows), codes)
    classes = arrays[TARGETS] if schema.classes is not None else None
    held_out = validation_rows(spec, seed, schema.rows, classes, arrays.get(KEYS))
    sizes = [one.vocabulary for one in schema.columns if one.kind == "category"]
    codes = _training_codes(arrays[CATEGORIES], ~held_out, sizes) if sizes else []
    return RowSplit(_numbers(held_out, part=False), _numbers(held_out, part=True), codes)


def _numbers(held_out: Array, *, part: bool) -> Array:
    """The row numbers of a part, in 32 bits if they fit, without a large array beside them."""
    import numpy as np

    rows, count = len(held_out), int(np.count_nonzero(held_out))
    found = np.empty(count if part else rows - count, np.int32 if rows < 2**31 else np.int64)
    at = 0
    for begin in range(0, rows, CHUNK_ROWS):
        chunk = np.flatnonzero(held_out[begin : begin + CHUNK_ROWS] == part)
        found[at : at + len(chunk)] = chunk + begin
        at += len(chunk)
    return found


def _training_codes(categories: Any, train: Array, sizes: Sequence[int]) -> list[Array]:
    """See `RowSplit.codes`."""
    import numpy as np

    present = [np.zeros(size, bool) for size in sizes]
    for begin in range(0, len(train), CHUNK_ROWS):
        chunk = categories[begin : begin + CHUNK_ROWS][train[begin : begin + CHUNK_ROWS]]
        for column, found in enumerate(present):
            found[chunk[:, column]] = True
    for found in present:
        found[0] = False
    return [np.where(found, np.cumsum(found), 0) for found in present]


def divided(
    arrays: Mapping[str, Stored],
    schema: DataSchema,
    vocabularies: Mapping[str, Sequence[str]],
    split: RowSplit,
    spec: DataSpec,
    seed: int,
) -> Dataset:
    """The dataset of what is stored, with a split, whose sizes the schema gets."""
    sizes = {"train_rows": len(split.train), "validation_rows": len(split.validation)}
    return Dataset(
        {name: arrays[name] for name in schema.inputs},
        arrays[TARGETS],
        schema.model_copy(update=sizes),
        split,
        vocabularies,
        "none" if spec.augment == "auto" else spec.augment,
        seed,
    )
