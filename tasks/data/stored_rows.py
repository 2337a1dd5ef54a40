"""A source's rows in the form in which they are stored: what the arrays are, and their chunks.

A table and arrays are read twice in bounded memory: once to see what they hold, once to make the
chunks. So nothing is written of data that is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from trainwright.estimator.near_names import meant
from trainwright.tasks import progress
from trainwright.tasks.data.formats import Raw
from trainwright.tasks.data.job_fields import require_ignored
from trainwright.tasks.data.modalities.array_inputs import (
    array_notes,
    as_input,
    as_stored,
    looks_like_images,
)
from trainwright.tasks.data.modalities.date_columns import (
    DateParts,
    date_parts,
    in_parts,
    schema_in_parts,
    used_dates,
)
from trainwright.tasks.data.modalities.forecast_table import forecast_windows
from trainwright.tasks.data.modalities.images import (
    SMALL_PIXELS,
    ImageFiles,
    ImageRows,
    common_shape,
)
from trainwright.tasks.data.modalities.kept import Kept
from trainwright.tasks.data.modalities.text_column import TextArrays, text_arrays, text_column
from trainwright.tasks.data.row_split import require_rows, split_keys
from trainwright.tasks.data.tables.column_scan import ColumnScan, is_text, require_one_kind, scan
from trainwright.tasks.data.tables.csv_table import require_names
from trainwright.tasks.data.tables.table_arrays import TableArrays, number_notes, table_arrays
from trainwright.tasks.data.tables.table_source import BATCH_ROWS, TableSource, listed
from trainwright.tasks.data.tables.target_column import (
    looks_like_numbers,
    target_column,
    target_notes,
)
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts.data_schema import Column, DataSchema
from trainwright.tasks.spec.data_spec import DataSpec, Task

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

TARGETS, KEYS = "\0targets", "\0keys"
"""names of arrays that no input can have: the targets, and what `data.split_by` splits by"""
GIVEN = {"uint8": "float32", "uint16": "int64", "int32": "int64"}
"""the types in which models get stored pixels, codes and tokens"""
_ROWS = "a table of rows"
_TABLE_TASKS = ("tabular-classification", "tabular-regression", "text-classification", "custom")
_IMAGE_TASKS = ("image-classification", "custom")
_SHOWN_ROWS = 1_000_000
_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class StoredRows:
    """What is stored of a source. The schema lacks the split: its parts have 0 rows.

    `arrays`: shape, rows first, and type of each input and of the targets. `chunks` reads the rows
    in order: arrays by name, some rows of each at a time. `kept`: inputs and targets in another
    form, images as they are encoded and windows of series. Series have their split already.
    """

    schema: DataSchema
    arrays: dict[str, tuple[tuple[int, ...], str]]
    chunks: Callable[[], Iterator[dict[str, Array]]]
    vocabularies: dict[str, list[str]] = field(default_factory=dict)
    """the values of the stored codes 1, 2, … by category column or series"""
    kept: dict[str, Kept] = field(default_factory=dict)


def of_table(source: TableSource, sha256: str, spec: DataSpec) -> StoredRows:
    """The stored form of a table. Raises BadInput if it does not fit the task."""
    if spec.time is not None:
        return _of_series(source, sha256, spec)
    _require_fields(spec, image_size="a folder of images", augment="images", channels="arrays")
    names = source.schema.names
    _require_task(spec, _TABLE_TASKS, "a table")
    if spec.target not in names:
        _no_such_column(spec.target, names, spec, "data.target")
    by = [spec.split_by] if spec.split_by is not None else []
    if by and by[0] not in names:
        _no_such_column(by[0], names, spec, "data.split_by")
    require_ignored(spec, names)
    others = [*by, *spec.ignore]
    dates = date_parts(source.schema, kept=[spec.target, *others])
    given, source = source, _with_parts(source, dates)
    try:
        scans = scan(_shown(source.batches(), spec), source.schema, spec.target)
    except ValueError as error:
        raise BadInput(f"data.uri: got {spec.uri}; it can't be read: {error}") from None
    target = scans[spec.target]
    require_rows(target.rows)
    texts_given = spec.csv.text_columns or ()
    if is_text(target.type) and given.csv is not None and spec.target not in texts_given:
        require_one_kind(target, f"data.target: {spec.target!r}")
    texts = text_column(scans, spec, others)
    table: TableArrays | TextArrays
    if texts is not None:
        table = text_arrays(source.batches(), scans[texts], spec)
    else:
        table = table_arrays(scans, spec, others)
    used, dropped = used_dates({} if texts is not None else dates, table.dropped)
    task = spec.task or _task_of_table(target, texts)
    form = target_column(target, task)

    def chunks() -> Iterator[dict[str, Array]]:
        for batch in _shown(source.batches(), spec, target.rows):
            found = {**table.of(batch), TARGETS: form.array(batch.column(spec.target))}
            if by:
                found[KEYS] = split_keys(batch.column(by[0]), spec)
            yield found

    schema = DataSchema(
        task=task,
        rows=target.rows,
        train_rows=0,
        validation_rows=0,
        inputs=table.inputs,
        input_dtypes={name: GIVEN.get(dtype, dtype) for name, dtype in table.dtypes.items()},
        target=spec.target,
        target_dtype=form.dtype,
        classes=form.classes,
        columns=table.columns,
        dropped=[*[""] * given.unnamed, *dropped],
        index=list(given.index),
        dates=used,
        csv=given.csv,
        notes=[
            *given.notes,
            *number_notes(scans, [one.name for one in table.columns if one.kind == "number"]),
            *target_notes(target, task, inferred=spec.task is None),
        ],
        sha256=sha256,
    )
    arrays = {
        name: ((target.rows, *shape), table.dtypes[name]) for name, shape in table.inputs.items()
    }
    arrays[TARGETS] = (target.rows,), form.dtype
    if by:
        arrays[KEYS] = (target.rows,), "int64"
    values = {name: one.to_pylist() for name, one in table.vocabularies.items()}
    return StoredRows(schema, arrays, chunks, values)


def _with_parts(source: TableSource, dates: DateParts) -> TableSource:
    """The table with its columns of dates as columns of numbers."""
    schema = schema_in_parts(source.schema, dates)
    require_names(schema)
    return TableSource(schema, lambda: (in_parts(batch, dates) for batch in source.batches()))


def _task_of_table(target: ColumnScan, texts: str | None) -> Task:
    """The task that the target's look and the column of texts, if there is one, imply."""
    numbers = looks_like_numbers(target)
    if texts is not None:
        return "custom" if numbers else "text-classification"
    return "tabular-regression" if numbers else "tabular-classification"


def _of_series(source: TableSource, sha256: str, spec: DataSpec) -> StoredRows:
    """The stored form of a table of series, which is held in memory for that. Raises BadInput."""
    import numpy as np

    images = {"image_size": "a folder of images", "augment": "images", "channels": "arrays"}
    _require_fields(spec, **images, ignore=_ROWS)
    used = [spec.time, spec.target, spec.series]
    given = all(name is None or name in source.schema.names for name in used)
    dates = date_parts(source.schema, kept=used) if given else {}
    windows, schema = forecast_windows(_with_parts(source, dates).read(), sha256, spec)
    read, dropped = used_dates(dates, schema.dropped)
    dropped = [*[""] * source.unnamed, *dropped]
    left: dict[str, Any] = {"dates": read, "dropped": dropped, "index": list(source.index)}
    left |= {"csv": source.csv, "notes": list(source.notes)}
    schema = schema.model_copy(update=left)
    kept: dict[str, Kept] = {TARGETS: windows.targets(), **windows.parts()}
    series = windows.series
    if series is None or spec.series is None:
        return StoredRows(schema, {}, lambda: iter(()), {}, kept)
    arrays = {"series": (series.shape, str(series.dtype))}
    chunks = [{"series": np.asarray(series)}]
    return StoredRows(schema, arrays, lambda: iter(chunks), {spec.series: windows.names}, kept)


def _require_fields(spec: DataSpec, **others: str) -> None:
    """Raise BadInput for fields that concern another kind of data, named by field."""
    for name, kind in others.items():
        if (value := getattr(spec, name)) not in (None, "auto", "none", ()):
            shown = ", ".join(value) if name == "ignore" else value
            raise BadInput(f"data.{name}: got {shown}; allowed only for {kind}")


def _shown(batches: Iterator[Any], spec: DataSpec, of: int | None = None) -> Iterator[Any]:
    """The batches, with a progress event every million rows. `of`: how many there are, if known."""
    rows = shown = 0
    for batch in batches:
        yield batch
        rows += batch.num_rows
        if rows - shown >= _SHOWN_ROWS:
            shown = rows
            progress.emit("prepare", uri=spec.uri, rows=rows, of=of)


def of_arrays(raw: Raw, spec: DataSpec) -> StoredRows:
    """The stored form of arrays or images. Raises BadInput if they do not fit the task."""
    import numpy as np

    _require_fields(spec, text="a table", time="a table", ignore=_ROWS)
    if raw.images is None:
        _require_fields(spec, image_size="a folder of images")
        if all(array.ndim < 3 for array in raw.arrays.values()):
            _require_fields(spec, augment="images")
        if all(array.ndim != 4 for array in raw.arrays.values()):
            _require_fields(spec, channels="arrays of images")
    else:
        _require_fields(spec, channels="arrays of images")
    scans = target_scan(raw, spec)
    task = task_of(raw, spec)
    require_rows(raw.rows)
    if spec.split != "rows":
        raise BadInput(f"data.split: got {spec.split}; allowed for arrays and images: rows")
    images = None if raw.images is None else _image_rows(raw.images, spec)
    kept: dict[str, Kept] = {"inputs": images} if isinstance(images, ImageRows) else {}
    form, targets = None, raw.targets
    if targets is None:
        if spec.target not in scans:
            _no_such_column(spec.target, raw.table.column_names, spec, "data.target")
        form = target_column(scans[spec.target], task)
    elif task.endswith("classification") or targets.dtype.kind not in "biuf":
        allowed = "one class per row" if task.endswith("classification") else "numbers"
        raise BadInput(
            f"data.target: {spec.target!r} has shape {targets.shape} of {targets.dtype}; "
            f"allowed for {task}: {allowed}"
        )

    def chunks() -> Iterator[dict[str, Array]]:
        rows = _chunk_rows([images] if isinstance(images, np.ndarray) else raw.arrays.values())
        for begin in range(0, raw.rows, rows):
            part = slice(begin, begin + rows)
            found = {
                name: as_input(array[part], task, spec.channels)
                for name, array in raw.arrays.items()
            }
            if isinstance(images, np.ndarray):
                found["inputs"] = images[part]
            if form is not None:
                column = raw.table.column(spec.target).slice(begin, rows)
                found[TARGETS] = form.array(column)
            elif targets is not None:
                part_targets = as_stored(targets[part])
                found[TARGETS] = part_targets if task == "custom" else part_targets.astype("f4")
            yield found

    first = _require_finite(chunks(), spec)
    stored = {name: ((raw.rows, *one.shape[1:]), str(one.dtype)) for name, one in first.items()}
    inputs = {name: one for name, one in stored.items() if name != TARGETS}
    inputs |= {name: (one.shape, str(one.dtype)) for name, one in kept.items()}
    schema = DataSchema(
        task=task,
        rows=raw.rows,
        train_rows=0,
        validation_rows=0,
        inputs={name: shape[1:] for name, (shape, _) in inputs.items()},
        input_dtypes={name: GIVEN.get(dtype, dtype) for name, (_, dtype) in inputs.items()},
        target=spec.target,
        target_dtype=stored[TARGETS][1],
        target_shape=stored[TARGETS][0][1:],
        classes=form.classes if form is not None else None,
        columns=[Column(name="image", kind="image")] if images is not None else [],
        notes=array_notes(raw.arrays, task, spec.channels),
        sha256=raw.sha256,
    )
    return StoredRows(schema, stored, chunks, kept=kept)


def _require_finite(chunks: Iterator[dict[str, Array]], spec: DataSpec) -> dict[str, Array]:
    """The first chunk. Raises BadInput if a number is NaN or infinite."""
    import numpy as np

    first: dict[str, Array] | None = None
    bad, sizes = Counter[str](), Counter[str]()
    for chunk in chunks:
        first = chunk if first is None else first
        for name, array in chunk.items():
            sizes[name] += array.size
            if array.dtype.kind == "f":
                bad[name] += array.size - int(np.count_nonzero(np.isfinite(array)))
    assert first is not None
    for name, count in bad.items():
        if count:
            where = f"data.uri: {spec.uri}: {name}"
            if name == TARGETS:
                where = f"data.target: {spec.target!r}"
            raise BadInput(
                f"{where}: {count} of {sizes[name]} values are NaN or infinite; allowed: none"
            )
    return first


def _chunk_rows(arrays: Iterable[Array]) -> int:
    widest = max((array.nbytes // max(1, len(array)) for array in arrays), default=1)
    return max(1, min(BATCH_ROWS, _CHUNK_BYTES // max(1, widest)))


def task_of(raw: Raw, spec: DataSpec) -> Task:
    """The job's task, or the inferred one. Raises BadInput if the job's does not fit the data."""
    images = raw.images is not None or any(map(looks_like_images, raw.arrays.values()))
    if raw.is_table and spec.time is not None:
        return "forecasting"
    if raw.is_table:
        _require_task(spec, _TABLE_TASKS, "a table")
    elif raw.images is not None:
        _require_task(spec, _IMAGE_TASKS, "a folder of images")
    if spec.task is not None:
        if spec.task == "image-classification" and not (
            images or all(array.ndim in (3, 4) for array in raw.arrays.values())
        ):
            raise BadInput(
                "data.task: got image-classification, but the arrays have no height and width; "
                "choose another task"
            )
        return spec.task
    if raw.targets is not None:  # whole numbers are classes of tokens or pixels
        return "custom" if raw.targets.dtype.kind in "iu" else "forecasting"
    scans = target_scan(raw, spec)
    if spec.target not in scans:
        _no_such_column(spec.target, raw.table.column_names, spec, "data.target")
    if images:
        numbers = looks_like_numbers(scans[spec.target])
        return "custom" if numbers else "image-classification"
    texts = text_column(scans, spec) if raw.is_table and len(scans) > 1 else None
    return _task_of_table(scans[spec.target], texts)


def target_scan(raw: Raw, spec: DataSpec) -> dict[str, ColumnScan]:
    """The scan of the target's column, by its name; empty if there is no such column.

    Of a table whose only input may be texts, all columns are scanned.
    """
    names = raw.table.column_names
    texts = raw.is_table and (spec.text is not None or len(names) == 2)
    table = raw.table.select([name for name in names if name == spec.target or texts])
    try:
        return scan(table.to_batches(BATCH_ROWS), table.schema, spec.target)
    except ValueError as error:
        raise BadInput(f"data.uri: got {spec.uri}; it can't be read: {error}") from None


def _require_task(spec: DataSpec, allowed: tuple[str, ...], what: str) -> None:
    if spec.task is not None and spec.task not in allowed:
        raise BadInput(f"data.task: got {spec.task}; allowed for {what}: {', '.join(allowed)}")


def _image_rows(images: ImageFiles, spec: DataSpec) -> ImageRows | Array:
    """A folder's images in one shape, decoded already if that is small."""
    import numpy as np

    rows = ImageRows(images, common_shape(images, spec.image_size))
    small = rows.image.height * rows.image.width <= SMALL_PIXELS
    return rows.take(np.arange(len(images))) if small else rows


def _no_such_column(name: str, names: list[str], spec: DataSpec, field: str) -> NoReturn:
    default = " (the default)" if name == DataSpec.model_fields["target"].default else ""
    raise BadInput(
        f"{field}: got {name!r}{default if field == 'data.target' else ''}; "
        f"allowed: a column of {spec.uri}: {listed(names) or 'it has none'}"
        f"{meant(name, names)}"
    )
