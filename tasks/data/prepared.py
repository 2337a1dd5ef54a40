"""Data in the form that ranks read: arrays in files, made once per content.

    <home>/prepared/<key>/schema.json, vocabularies.json, targets.npy, inputs-0.npy, …
        key: of content and job, without the split; see `modalities.kept` for images, series
    <home>/prepared/<key>/split-<key>/train.npy, validation.npy, codes.npy     of many rows
    <home>/prepared/digests/<file state>      a content's SHA-256

The first process that needs a content makes its folder, under a lock, in bounded memory; all
processes of the machine read the same files. A source that has not changed (path, size, time of
change) is not read again. What nobody used for 30 days is removed when another folder is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.estimator.named_file import write_named
from trainwright.infra.lock import locked
from trainwright.tasks.data.dataset import Dataset, RowSplit, divided, split_of, stored_rows
from trainwright.tasks.data.modalities.kept import Kept, kept_bytes, mapped, save
from trainwright.tasks.data.row_file import RowFile
from trainwright.tasks.data.sources import (
    content_sha256,
    files_of,
    open_source,
    readable,
    remove_unused,
    require_free,
)
from trainwright.tasks.data.stored_rows import KEYS, TARGETS, StoredRows
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.spec.data_spec import DataSpec

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    Stored = Array | RowFile | Kept

_FORMAT = 6
"""Counts changes of the arrays that `stored_rows` makes of a content."""
_MAPPED_BYTES = 64 * 2**20
"""Larger data is not mapped but read by rows (`row_file`)."""
_SPLIT_HERE = 1 << 20
"""The split of so many rows is made by each process, which is quicker than to keep it."""
_SCHEMA, _VOCABULARIES = "schema.json", "vocabularies.json"
_FORM = {"text", "time", "series", "horizon", "history", "image_size", "channels", "csv"}
"""The fields that decide what is stored, besides those of every job."""


def prepared(spec: DataSpec, home: Path, seed: int = 0) -> Dataset:
    """A local source's dataset, with arrays that are mapped from files below `home`.

    `seed` is that of the split. Raises BadInput if the source can't be read or does not fit the
    task, or if the disk is full.
    """
    with prepared_if_used(spec, home, seed) as found:
        return found


@contextlib.contextmanager
def prepared_if_used(spec: DataSpec, home: Path, seed: int = 0) -> Iterator[Dataset]:
    """The same inside a block; if it raises a TrainwrightError, what was made for it is removed."""
    made: list[Path] = []
    try:
        yield _prepared(spec, home, seed, made)
    except TrainwrightError:
        for path in made:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        raise


def _prepared(spec: DataSpec, home: Path, seed: int, made: list[Path]) -> Dataset:
    """The dataset; adds the files and folders that are made for it to `made`."""
    root = home / "prepared"
    known = root / "digests" / _state(spec)
    sha256 = _kept_digest(known) or content_sha256(spec)
    by = [spec.split, spec.split_by] if spec.split_by is not None else []
    form = spec.model_dump(mode="json", include=_FORM, exclude_defaults=True)
    if spec.time is not None:  # the windows of series are split by time
        form["validation_fraction"] = spec.validation_fraction
    if spec.ignore:
        form["ignore"] = list(spec.ignore)
    given = [_FORMAT, sha256, spec.target, spec.task, spec.missing, *by, *([form] if form else [])]
    folder = root / hashlib.sha256(json.dumps(given).encode()).hexdigest()[:32]
    found = _opened(folder, spec, seed)
    if found is None:
        with _locked(root / f"{folder.name}.lock"):
            found = _opened(folder, spec, seed)
            if found is None:  # else another process made it
                for kept in (root, known.parent):
                    remove_unused(kept)
                with readable(spec):
                    _write(stored_rows(open_source(spec), sha256, spec), folder)
                made.append(folder)  # also if the split is refused
                found = _opened(folder, spec, seed)
                assert found is not None
    if _kept_digest(known) is None:  # only of data that can be used
        write_named(known, sha256.encode(), "TRAINWRIGHT_HOME")
        made.append(known)
    return found


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock; its folder is made. Raises BadInput if the file can't be written."""
    with contextlib.ExitStack() as held:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(file, wait=True))
        except OSError as error:
            raise BadInput(
                f"TRAINWRIGHT_HOME: {file}: can't be written ({error.strerror})"
            ) from None
        yield


def _state(spec: DataSpec) -> str:
    """A short name of the state of the source's files."""
    states = [(path.absolute(), path.stat()) for path in files_of(spec)]
    state = [(str(path), one.st_ino, one.st_size, one.st_mtime_ns) for path, one in states]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]


def _kept_digest(file: Path) -> str | None:
    """The content's SHA-256 that is known for a state."""
    with contextlib.suppress(OSError):
        if len(text := file.read_text()) == 64:
            os.utime(file)
            return text
    return None


def _opened(folder: Path, spec: DataSpec, seed: int) -> Dataset | None:
    """The dataset in a folder; None if it is missing or damaged."""
    try:
        schema = DataSchema.model_validate_json((folder / _SCHEMA).read_bytes())
        vocabularies = json.loads((folder / _VOCABULARIES).read_bytes())
        os.utime(folder)
        names = [*schema.inputs, TARGETS, *([KEYS] if spec.split_by is not None else [])]
        files = {name: folder / file for name, file in _files(names).items()}
        parts = {name: mapped(path.stem, folder) for name, path in files.items()}
        kept: dict[str, Stored] = {name: one for name, one in parts.items() if one is not None}
        arrays = {**_arrays({n: path for n, path in files.items() if n not in kept}), **kept}
    except (OSError, ValueError, LookupError):
        return None
    if any(len(array) != schema.rows for array in arrays.values()):
        return None
    split = (
        split_of(arrays, schema, spec, seed)
        if schema.rows <= _SPLIT_HERE or spec.time is not None
        else _split(folder, arrays, schema, spec, seed)
    )
    return divided(arrays, schema, vocabularies, split, spec, seed)


def _arrays(files: Mapping[str, Path]) -> dict[str, Stored]:
    """The arrays in some files. Raises OSError, ValueError."""
    import numpy as np

    if sum(path.stat().st_size for path in files.values()) > _MAPPED_BYTES:
        return {name: RowFile(path) for name, path in files.items()}
    return {name: np.load(path, mmap_mode="r") for name, path in files.items()}


def _split(
    folder: Path, arrays: Mapping[str, Stored], schema: DataSchema, spec: DataSpec, seed: int
) -> RowSplit:
    """The split by a seed of many rows, made once and kept beside the arrays."""
    import numpy as np

    given = [seed, spec.validation_fraction, spec.split, spec.stratify]
    kept = folder / f"split-{hashlib.sha256(json.dumps(given).encode()).hexdigest()[:16]}"
    with _locked(folder.with_name(f"{folder.name}-{kept.name}.lock")):
        if not kept.is_dir():
            made = split_of(arrays, schema, spec, seed)
            part = kept.with_name(f"{kept.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            require_free(folder, made.train.nbytes + made.validation.nbytes)
            with _new_folder(part):
                np.save(part / "train", made.train[:])
                np.save(part / "validation", made.validation[:])
                np.save(part / "codes", np.concatenate([np.zeros(0, np.int64), *made.codes]))
                part.rename(kept)
    codes = np.load(kept / "codes.npy")
    sizes = [one.vocabulary for one in schema.columns if one.kind == "category"]
    return RowSplit(
        RowFile(kept / "train.npy"),
        RowFile(kept / "validation.npy"),
        np.split(codes, np.cumsum(sizes)[:-1]) if sizes else [],
    )


def _write(stored: StoredRows, folder: Path) -> None:
    """Write the arrays into a new folder, which appears whole."""
    import numpy as np

    part = folder.with_name(f"{folder.name}.part")
    for old in (part, folder):  # a killed process left it, or it is damaged
        shutil.rmtree(old, ignore_errors=True)
    sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in stored.arrays.values()]
    require_free(folder.parent, sum(sizes) + kept_bytes(stored.kept))
    keys = [KEYS] if KEYS in stored.arrays else []
    files = _files([*stored.schema.inputs, TARGETS, *keys])
    with _new_folder(part):
        with contextlib.ExitStack() as opened:
            append = {
                name: opened.enter_context(_array_file(part / file, *stored.arrays[name]))
                for name, file in files.items()
                if name in stored.arrays
            }
            for chunk in stored.chunks():
                for name, rows in chunk.items():
                    append[name](rows)
        save({Path(files[name]).stem: one for name, one in stored.kept.items()}, part)
        (part / _VOCABULARIES).write_text(json.dumps(stored.vocabularies))
        (part / _SCHEMA).write_text(stored.schema.model_dump_json(indent=1))
        part.rename(folder)


@contextlib.contextmanager
def _new_folder(part: Path) -> Iterator[None]:
    """Make a folder, which an error in the block removes; one of the disk becomes BadInput."""
    try:
        part.mkdir()
        yield
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise BadInput(f"TRAINWRIGHT_HOME: {part}: can't be written ({error.strerror})") from None
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


@contextlib.contextmanager
def _array_file(
    path: Path, shape: tuple[int, ...], dtype: str
) -> Iterator[Callable[[Array], None]]:
    """Inside the block, a function that appends rows to an array file of this shape."""
    import numpy as np
    from numpy.lib import format as npy

    kind = np.dtype(dtype)
    with path.open("wb") as file:
        header = {"descr": npy.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
        npy.write_array_header_1_0(file, header)

        def append(rows: Array) -> None:
            file.write(np.ascontiguousarray(rows, kind).data)

        yield append


def _files(names: Iterable[str]) -> dict[str, str]:
    """The name of each array's file."""
    names = list(names)
    inputs = [name for name in names if name not in (TARGETS, KEYS)]
    files = {name: f"inputs-{number}.npy" for number, name in enumerate(inputs)}
    return {**files, **{name: f"{name[1:]}.npy" for name in names if name in (TARGETS, KEYS)}}
