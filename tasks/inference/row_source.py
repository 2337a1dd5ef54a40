"""Reads the rows to predict: batches of a table, of arrays or of images, in bounded memory."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.tasks.data.formats import INDEX
from trainwright.tasks.data.modalities.array_inputs import as_input
from trainwright.tasks.data.modalities.date_columns import (
    DateParts,
    in_parts,
    is_date,
    schema_in_parts,
)
from trainwright.tasks.data.modalities.images import ImageFiles, ImageRows, ImageShape
from trainwright.tasks.data.tables.column_scan import shown_type
from trainwright.tasks.data.tables.table_source import (
    BATCH_ROWS,
    open_parquet,
    open_table,
    parquet_files,
)
from trainwright.tasks.errors import BadInput
from trainwright.tasks.inference.csv_rows import CsvRows
from trainwright.tasks.runs.artefacts.data_schema import Column, DataSchema
from trainwright.tasks.spec.data_spec import Channels

TABLES = (".parquet", ".csv")
_IMAGES = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True)
class TableRows:
    """The rows of a Parquet or CSV file or of a folder of Parquet files, and their Arrow schema."""

    path: Path
    schema: Any
    dates: DateParts
    _csv: CsvRows | None

    @classmethod
    def open(cls, path: Path, model: DataSchema, columns: Sequence[Column]) -> TableRows:
        """The rows of a file, unread, with `columns` as far as it has them.

        CSV columns of texts are read as such, and numbers in the form of the model's data. Columns
        of dates in the file are given as their parts.

        Raises BadInput if it can't be read, or if a column occurs twice.
        """
        dates, opened = model.dates, None
        with _readable(path):
            if path.is_dir() and not parquet_files(path):
                raise BadInput(
                    f"rows: got {path.name}, a folder without parquet files; allowed: a folder of "
                    f"them, or a {' or '.join(TABLES)} file"
                )
            if _is_parquet(path):
                schema = open_parquet(path).schema
            else:
                opened = CsvRows.open(path, model, columns)
                schema = opened.schema
        twice = next((name for name in schema.names if schema.names.count(name) > 1), None)
        if twice is not None:
            raise BadInput(f"rows: {path.name}: the column {twice!r} occurs twice")
        absent = {name: parts for name, parts in dates.items() if parts[0] not in schema.names}
        there = {name: parts for name, parts in absent.items() if name in schema.names}
        for name in absent:
            if name in there and not _may_hold_dates(schema.field(name).type):
                raise BadInput(
                    f"rows: {path.name}: the column {name!r} holds "
                    f"{shown_type(schema.field(name).type)}; the run's model takes dates"
                )
            if name not in there:
                raise BadInput(
                    f"rows: {path.name} has no column {name!r}; the run's model takes its dates"
                )
        return cls(path, schema_in_parts(schema, there), there, opened)

    def batches(self, columns: Sequence[str], rows: int) -> Iterator[Any]:
        """These columns as record batches of at most `rows` rows; only the last one has fewer."""
        import pyarrow as pa

        kept: list[Any] = []
        made = {part for parts in self.dates.values() for part in parts}
        stored = [*(name for name in columns if name not in made), *self.dates]
        with _readable(self.path):
            for batch in self._read(stored, rows):
                kept.append(in_parts(batch, self.dates).select(list(columns)))
                while sum(map(len, kept)) >= rows:
                    whole = kept[0] if len(kept) == 1 else pa.concat_batches(kept)
                    yield whole.slice(0, rows)
                    kept = [whole.slice(rows)]
            if any(map(len, kept)):
                yield pa.concat_batches(kept)

    def _read(self, columns: Sequence[str], rows: int) -> Iterator[Any]:
        if self._csv is not None:
            yield from self._csv.batches(columns)
            return
        yield from open_parquet(self.path, columns, min(rows, BATCH_ROWS)).batches()


@dataclass(frozen=True)
class ArrayRows:
    """The input arrays of an .npz file, one entry per row."""

    path: Path
    arrays: dict[str, Any]
    others: list[str]
    """arrays that the model does not get"""

    @classmethod
    def open(cls, path: Path, schema: DataSchema, channels: Channels = "auto") -> ArrayRows:
        """The arrays of a run's inputs, by its schema and its `data.channels`.

        Raises BadInput if they don't fit the schema.
        """
        import numpy as np

        with _readable(path), np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
        names = {name: name for name in schema.inputs}
        others = [name for name in found if name not in names and name != schema.target]
        if list(names) == ["inputs"] and "inputs" not in found and len(others) == 1:
            names["inputs"] = others.pop()  # a single input may have any name
        arrays = {}
        for name, given in names.items():
            if given not in found:
                raise BadInput(
                    f"rows: {path.name} has no array {given!r}; allowed: the inputs of the run's "
                    f"model: {', '.join(names)}"
                )
            if found[given].dtype.kind not in "biuf" or found[given].ndim < 1:
                raise BadInput(
                    f"rows: {path.name}: the array {given!r} holds {found[given].dtype}; "
                    "allowed: numbers, by row"
                )
            array = as_input(found[given], schema.task, channels)
            if array.shape[1:] != schema.inputs[name]:
                raise BadInput(
                    f"rows: {path.name}: the array {given!r} has rows of shape {array.shape[1:]}; "
                    f"the run's model takes {schema.inputs[name]}"
                )
            array = array.astype(schema.input_dtypes[name], copy=False)
            if array.dtype.kind == "f" and np.isinf(array).any():
                row = int(np.isinf(array).reshape(len(array), -1).any(axis=1).argmax())
                raise BadInput(
                    f"rows: {path.name}: the array {given!r} has an infinite number in row {row} "
                    "(from 0); allowed: a value, as in the run's data"
                )
            arrays[name] = array
        if len({len(array) for array in arrays.values()}) > 1:
            raise BadInput(f"rows: {path.name}: its arrays differ in length")
        return cls(path, arrays, others)

    def batches(self, rows: int) -> Iterator[dict[str, Any]]:
        """The arrays of at most `rows` rows at a time."""
        total = len(next(iter(self.arrays.values())))
        for at in range(0, total, rows):
            yield {name: array[at : at + rows] for name, array in self.arrays.items()}


@dataclass(frozen=True)
class FolderImages:
    """The images of a folder, by the names of their files in it."""

    folder: Path
    files: list[str]

    @classmethod
    def open(cls, folder: Path) -> FolderImages:
        """The files that the folder's index lists, else all JPEG and PNG files at any depth.

        Raises BadInput if there are none, or if the index has no column `file` or is unreadable.
        """
        if not (folder / INDEX).is_file():
            files = sorted(_images_below(folder))
            if not files:
                raise BadInput(
                    f"rows: got {folder.name}, a folder without images; allowed: "
                    f"{', '.join(_IMAGES)} files, or an {INDEX} with a column 'file'"
                )
            return cls(folder, files)
        with _readable(folder / INDEX):
            index = open_table(folder / INDEX, ["file"], left=["file"]).read()
            if "file" not in index.column_names:
                raise BadInput(f"rows: {folder.name}/{INDEX} has no column 'file'")
            files = [str(name) for name in index.column("file").to_pylist()]
        for name in files:
            path = folder / name
            if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
                raise BadInput(
                    f"rows: {folder.name}/{INDEX} names {name!r}; allowed: files within the folder"
                )
        return cls(folder, files)

    def batches(self, image: ImageShape, rows: int) -> Iterator[tuple[list[str], Any]]:
        """File names and pixels, uint8 (rows, channels, height, width), of at most `rows` images.

        In the shape `image`, as in training. Raises BadInput for one that can't be decoded.
        """
        import numpy as np

        source = ImageRows(ImageFiles(self.folder, self.files), image)
        for at in range(0, len(self.files), rows):
            names = self.files[at : at + rows]
            try:
                yield names, source.take(np.arange(at, at + len(names)))
            except BadInput as error:
                raise BadInput(str(error).replace("data.uri:", "rows:", 1)) from None


def _images_below(folder: Path) -> Iterator[str]:
    """The images below a folder, by their paths in it; hidden ones are left out."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in name.parts)
        if path.suffix.lower() in _IMAGES and not hidden and path.is_file():
            yield name.as_posix()


class _readable:
    """Turns an error of reading this file into BadInput with one line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        import pyarrow as pa

        kinds = (pa.ArrowException, OSError, ValueError, EOFError, zipfile.BadZipFile)
        if not isinstance(error, kinds) or isinstance(error, BadInput):
            return
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise BadInput(f"rows: {self._path.name} can't be read: {reason}") from error


def _may_hold_dates(kind: Any) -> bool:
    import pyarrow as pa

    return is_date(kind) or bool(pa.types.is_null(kind))


def _is_parquet(path: Path) -> bool:
    return path.is_dir() or path.suffix.lower() == ".parquet"
