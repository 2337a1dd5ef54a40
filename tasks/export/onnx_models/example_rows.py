"""The example of an ONNX export: up to three validation rows, and the outputs expected of them."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.tasks.export.exportable import Exportable

EXAMPLE, TABLE = "example.npz", "example.csv"
_TYPES = {"float": "float32", "double": "float64", "int64": "int64"}
"""NumPy's names of ONNX types; others are as they come."""


def write_example(model: Exportable, found: Mapping[str, Any], folder: Path) -> None:
    """Write example.npz, and example.csv if the inputs are columns, into an export's folder.

    `found` is the sandboxed process's document: `example` has the numbers of the rows, their
    columns if the model takes columns, and the outputs by name.
    """
    import numpy as np

    example, inputs = found["example"], found["inputs"]
    columns, arrays = example["columns"], {}
    if columns is None:
        for one, path in zip(inputs, model.rows.validation.values(), strict=True):
            values = np.load(path, mmap_mode="r")[example["rows"]]
            arrays[one["name"]] = values.astype(_TYPES.get(one["dtype"], values.dtype))
    else:
        for one, values in zip(inputs, columns, strict=True):
            arrays[one["name"]] = np.array(values, _TYPES.get(one["dtype"]))
        with (folder / TABLE).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(arrays)
            writer.writerows(zip(*map(_cells, arrays.values()), strict=True))
    for one in found["outputs"]:
        values = example["outputs"][one["name"]]
        arrays[one["name"]] = np.array(values, _TYPES.get(one["dtype"]))
    with zipfile.ZipFile(folder / EXAMPLE, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _cells(column: Any) -> list[str]:
    """The texts of a column in a CSV file: as many digits as its numbers need, empty for NaN."""
    texts = map(str, column)
    return [*texts] if column.dtype.kind == "U" else ["" if one == "nan" else one for one in texts]
