"""Data in the form that ranks read: arrays that are mapped into memory, made once per content.

    <home>/prepared/<key>/schema.json, vocabularies.json, targets.npy, inputs-0.npy, …
        key: of content and job, without the split
    <home>/prepared/digests/<file state>                               a content's SHA-256

The first process that needs a content makes its folder, under a lock; all processes of the machine
map the same files. A source that has not changed (path, size, time of change) is not read again. A
folder that nobody used for `_KEPT_DAYS` is removed when another one is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.estimator.named_file import write_named
from trainwright.infra.lock import locked
from trainwright.tasks.data.dataset import Dataset, divided, load
from trainwright.tasks.data.sources import content_sha256, files_of
from trainwright.tasks.errors import BadInput
from trainwright.tasks.runs.artefacts import DataSchema
from trainwright.tasks.spec.job import DataSpec

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_FORMAT = 2
"""Counts changes of the arrays that `dataset.load` makes of a content."""
_KEPT_DAYS = 30
_SCHEMA, _VOCABULARIES, _TARGETS = "schema.json", "vocabularies.json", "targets.npy"


def prepared(spec: DataSpec, home: Path, seed: int = 0) -> Dataset:
    """A local source's dataset, with arrays that are mapped from files below `home`.

    `seed` is that of the split. Raises BadInput if the source can't be read or does not fit the
    task, or if the disk is full.
    """
    root = home / "prepared"
    given = [_FORMAT, _digest(spec, root), spec.target, spec.task, spec.missing]
    folder = root / hashlib.sha256(json.dumps(given).encode()).hexdigest()[:32]
    if (found := _mapped(folder, spec, seed)) is not None:
        return found
    root.mkdir(parents=True, exist_ok=True)
    with locked(root / f"{folder.name}.lock", wait=True):
        if (
            found := _mapped(folder, spec, seed)
        ) is None:  # else another process has made it meanwhile
            _remove_unused(root)
            _write(load(spec), folder)
            found = _mapped(folder, spec, seed)
            assert found is not None
    return found


def _digest(spec: DataSpec, root: Path) -> str:
    """The content's SHA-256, computed only if a file's state is new."""
    states = [(path.absolute(), path.stat()) for path in files_of(spec)]
    state = [(str(path), one.st_ino, one.st_size, one.st_mtime_ns) for path, one in states]
    known = root / "digests" / hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]
    with contextlib.suppress(OSError):
        if len(text := known.read_text()) == 64:
            return text
    found = content_sha256(spec)
    write_named(known, found.encode(), "TRAINWRIGHT_HOME")
    return found


def _mapped(folder: Path, spec: DataSpec, seed: int) -> Dataset | None:
    """The dataset in a folder; None if it is missing or damaged."""
    import numpy as np

    try:
        schema = DataSchema.model_validate_json((folder / _SCHEMA).read_bytes())
        vocabularies = json.loads((folder / _VOCABULARIES).read_bytes())
        os.utime(folder)
        # Copy on write: processes share the pages, and torch accepts the arrays.
        arrays = [
            np.load(folder / name, mmap_mode="c")
            for name in (_TARGETS, *(_file(number) for number in range(len(schema.inputs))))
        ]
    except (OSError, ValueError):
        return None
    targets, *inputs = arrays
    if any(len(array) != schema.rows for array in arrays):
        return None
    named = dict(zip(schema.inputs, inputs, strict=True))
    return divided(named, targets, schema, vocabularies, spec, seed)


def _write(dataset: Dataset, folder: Path) -> None:
    """Write the arrays into a new folder, which appears whole."""
    import numpy as np

    arrays = {_TARGETS: dataset.targets} | {
        _file(number): array for number, array in enumerate(dataset.inputs.values())
    }
    part = folder.with_name(f"{folder.name}.part")
    for old in (part, folder):  # a killed process left it, or it is damaged
        shutil.rmtree(old, ignore_errors=True)
    size = sum(array.nbytes for array in arrays.values())
    if (free := shutil.disk_usage(folder.parent).free) < size:
        raise BadInput(
            f"TRAINWRIGHT_HOME: the data needs {size / 2**20:,.0f} MiB in {folder.parent}; "
            f"{free / 2**20:,.0f} MiB are free"
        )
    try:
        part.mkdir()
        for name, array in arrays.items():
            np.save(part / name, array)
        (part / _VOCABULARIES).write_text(json.dumps(dataset.vocabularies))
        (part / _SCHEMA).write_text(dataset.schema.model_dump_json(indent=1))
        part.rename(folder)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise BadInput(f"TRAINWRIGHT_HOME: {part}: can't be written ({error.strerror})") from None


def _remove_unused(root: Path) -> None:
    oldest = time.time() - _KEPT_DAYS * 86_400
    for folder in root.iterdir():
        if len(folder.name) == 32 and folder.stat().st_mtime < oldest:
            shutil.rmtree(folder, ignore_errors=True)


def _file(number: int) -> str:
    return f"inputs-{number}.npy"
