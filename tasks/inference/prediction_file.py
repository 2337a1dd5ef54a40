"""Writes predictions to a Parquet or CSV file, which appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from trainwright.tasks.errors import BadInput
from trainwright.tasks.settings import Settings
from trainwright.tasks.storage.connect import open_store
from trainwright.tasks.storage.objects import checked_key

SUFFIXES = (".parquet", ".csv")
_OURS = b"trainwright"
"""The key in a Parquet file's metadata that marks predictions."""
_CSV_START = re.compile(rb'"?prediction(_1)?"?[,\r\n]')
"""How the first line of a CSV file with predictions begins."""


class PredictionFile:
    """An output file. Inside a `with` block, `write` adds rows; at its end the file appears.

    A list column of a CSV file becomes one column for each place, from 1 on.
    """

    def __init__(
        self, uri: str, settings: Settings, source: Path, about: Mapping[str, str]
    ) -> None:
        """`about` is written into a Parquet file's metadata.

        Raises BadInput if the file can't be written: only earlier predictions are replaced.
        """
        self.uri, self._settings = uri, settings
        self._about = {_OURS: b"predictions"} | {
            name.encode(): value.encode() for name, value in about.items()
        }
        split = urlsplit(uri)
        self._remote = split.scheme == "s3"
        if not self._remote and split.scheme not in ("", "file"):
            raise BadInput(f"--out: got {uri}; allowed: a path, file://… or s3://…")
        self._path = Path(unquote(split.path) if split.scheme == "file" else uri)
        if self._path.suffix.lower() not in SUFFIXES:
            raise BadInput(
                f"--out: got {uri}; allowed: a file that ends in {' or '.join(SUFFIXES)}"
            )
        if self._remote:
            parent, _, name = uri.rpartition("/")
            if not urlsplit(parent).netloc:
                raise BadInput(f"--out: got {uri}; allowed: s3://bucket/key")
            self._store, self._key = open_store(parent, settings, field="--out"), checked_key(name)
            self._check_object()
        else:
            self._check_path(source)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._part = Path()
        self._writer: Any = None
        self._schema: Any = None

    def _check_object(self) -> None:
        with tempfile.TemporaryDirectory(prefix="trainwright-predict-") as folder:
            earlier = Path(folder) / f"earlier{self._path.suffix.lower()}"
            try:
                self._store.get_file(self._key, earlier)
            except FileNotFoundError:
                return
            if not _is_ours(earlier):
                raise self._not_ours(self.uri)

    def _check_path(self, source: Path) -> None:
        path = self._path
        if not path.parent.is_dir():
            raise BadInput(f"--out: {path} can't be written (there is no folder {path.parent})")
        if not os.path.lexists(path):
            return
        if not path.is_file():
            raise BadInput(f"--out: {path} is not a regular file; choose another")
        if path.samefile(source) or not _is_ours(path):
            raise self._not_ours(path)

    @staticmethod
    def _not_ours(given: str | Path) -> BadInput:
        return BadInput(
            f"--out: {given} exists and holds no predictions; choose another file, or remove it"
        )

    def __enter__(self) -> PredictionFile:
        beside = None if self._remote else self._path.absolute().parent
        try:
            self._folder = tempfile.TemporaryDirectory(prefix=".predictions-", dir=beside)
        except OSError as error:
            raise self._unwritable(error) from None
        self._part = Path(self._folder.name) / f"part{self._path.suffix.lower()}"
        return self

    def write(self, table: Any) -> None:
        """Add an Arrow table's rows. Raises BadInput if its columns differ from earlier ones."""
        flat = _flat(table) if self._part.suffix == ".csv" else table
        try:
            if self._writer is None:
                self._open(flat.schema)
            if flat.schema != self._schema:
                raise BadInput(
                    f"model: predict returned {_words(flat.schema)} for some rows, and "
                    f"{_words(self._schema)} for earlier ones"
                )
            self._writer.write_table(flat)
        except OSError as error:
            raise self._unwritable(error) from None

    def _open(self, schema: Any) -> None:
        from pyarrow import csv, parquet

        self._schema = schema
        if self._part.suffix == ".csv":
            self._writer = csv.CSVWriter(self._part, schema)
        else:
            self._writer = parquet.ParquetWriter(self._part, schema.with_metadata(self._about))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assert self._folder is not None
        try:
            if self._writer is not None:
                with contextlib.suppress(OSError) if error else contextlib.nullcontext():
                    self._writer.close()
            if error is None and self._remote:
                self._store.put_file(self._key, self._part)
            elif error is None:
                self._part.replace(self._path)
        except OSError as why:
            raise self._unwritable(why) from None
        finally:
            self._folder.cleanup()

    def _unwritable(self, error: OSError) -> BadInput:
        return BadInput(f"--out: {self.uri} can't be written ({error.strerror or error})")


def _is_ours(path: Path) -> bool:
    """Whether a file holds predictions, so that others may replace it."""
    import pyarrow as pa
    from pyarrow import parquet

    if path.suffix.lower() == ".csv":
        with path.open("rb") as file:
            return _CSV_START.match(file.readline(100)) is not None
    try:
        return _OURS in (parquet.read_schema(path).metadata or {})
    except (pa.ArrowException, OSError):
        return False


def _flat(table: Any) -> Any:
    """The table with one column for each place of a list column.

    Raises BadInput if its lists differ in length.
    """
    import pyarrow as pa
    from pyarrow import compute

    columns: dict[str, Any] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if not pa.types.is_list(column.type):
            columns[name] = column
            continue
        lengths = compute.min_max(compute.list_value_length(column)).as_py()
        if lengths["min"] != lengths["max"]:
            raise BadInput(
                f"--out: {name} has lists of {lengths['min']} to {lengths['max']} values, which a "
                "CSV file can't hold; allowed: a .parquet file"
            )
        for place in range(lengths["max"] or 0):
            columns[f"{name}_{place + 1}"] = compute.list_element(column, place)
    return pa.table(columns)


def _words(schema: Any) -> str:
    return ", ".join(f"{one.name}: {one.type}" for one in schema)
