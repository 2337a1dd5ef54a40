"""Writes the rows that an export is compared on, and those for calibration, as the model gets them.

The rows are those of the run: the same content, split by the same seed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.tasks.data.dataset import Dataset
from trainwright.tasks.data.prepared import prepared
from trainwright.tasks.data.row_file import RowFile
from trainwright.tasks.data.sources import localized, require_free
from trainwright.tasks.data.tables.table_arrays import CATEGORIES
from trainwright.tasks.errors import BadInput
from trainwright.tasks.export.exportable import CALIBRATION_ROWS, RowsFiles
from trainwright.tasks.runs.artefacts.data_schema import DataSchema
from trainwright.tasks.runs.run import Run

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_BATCH_ROWS = 1024


def write_rows(run: Run, schema: DataSchema, folder: Path) -> RowsFiles:
    """Write the validation rows, and evenly spaced training rows, of a run's data into a folder.

    Raises BadInput if the data can't be read, or has changed since the run.
    """
    import numpy as np

    job = run.job()
    if job.data.reader == "model":
        raise BadInput(
            "data.reader: the run's data is read by its model's source; allowed for an export: "
            "data that trainwright reads"
        )
    data = prepared(localized(job.data, run.settings), run.settings.home, job.train.seed)
    if data.schema.sha256 != schema.sha256:
        raise BadInput(
            f"data.uri: {job.data.uri} has changed since the run; allowed: the content of the run, "
            "whose validation rows the exported model is compared on"
        )
    folder.mkdir()
    train, validation = data.split.train, data.split.validation
    step = max(1, -(-len(train) // CALIBRATION_ROWS))
    held_out, targets = _written(data, validation, folder, "validation", schema)
    calibration, calibration_targets = _written(data, train[::step], folder, "calibration", schema)
    codes = None
    stored = data.inputs.get(CATEGORIES)
    if stored is not None and data.vocabularies:
        codes = folder / "stored-codes.npy"
        rows = validation[:]
        np.save(codes, stored.take(rows) if isinstance(stored, RowFile) else _array(stored)[rows])
    return RowsFiles(held_out, targets, calibration, calibration_targets, codes, data.vocabularies)


def _array(stored: Any) -> Array:
    import numpy as np

    return np.asarray(stored)


def _written(
    data: Dataset, chosen: Any, folder: Path, part: str, schema: DataSchema
) -> tuple[dict[str, Path], Path]:
    """The files of the inputs, by name, and of the targets."""
    from numpy.lib.format import open_memmap

    rows = chosen[:]
    files = {name: folder / f"{part}-{n}.npy" for n, name in enumerate(schema.inputs)}
    targets = folder / f"{part}-targets.npy"
    arrays: dict[Path, Any] = {}
    for at in range(0, len(rows), _BATCH_ROWS):
        inputs, wanted = data.batch(rows[at : at + _BATCH_ROWS])
        found = {**{files[name]: inputs[name] for name in files}, targets: wanted}
        if not arrays:
            row_bytes = sum(one.nbytes for one in found.values()) // len(wanted)
            require_free(folder, row_bytes * len(rows), "TMPDIR")
        for path, one in found.items():
            if path not in arrays:
                shape = (len(rows), *one.shape[1:])
                arrays[path] = open_memmap(path, mode="w+", dtype=one.dtype, shape=shape)
            arrays[path][at : at + len(one)] = one
    for array in arrays.values():
        array.flush()
    return files, targets
