"""A finished run's model as a value that every kind of export takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainwright.infra.sandbox import SandboxLimits
from trainwright.tasks.runs.artefacts.data_schema import DataSchema

CALIBRATION_ROWS = 2_000
"""The most rows of the training part that a kind of export gets."""


@dataclass(frozen=True)
class RowsFiles:
    """Rows as the model gets them, in .npy files, rows first."""

    validation: Mapping[str, Path]
    """by input; all rows of the validation part"""
    targets: Path
    calibration: Mapping[str, Path]
    """by input; evenly spaced rows of the training part, at most CALIBRATION_ROWS"""
    calibration_targets: Path
    stored_codes: Path | None = None
    """of a table with categories: each validation row's codes in `category_values`, 0: missing"""
    category_values: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """by category column: the values of stored codes 1, 2, … of the whole table"""


@dataclass(frozen=True)
class Exportable:
    """The verified model of a finished run, unpacked into a folder that the sandbox may read."""

    folder: Path
    """holds everything below"""
    source: Path
    """the folder with the files of the model's source"""
    entry: str
    config: Mapping[str, Any]
    precision: str
    weights: Path
    """safetensors"""
    schema: DataSchema
    vocabularies: Mapping[str, list[str]]
    """by category column: the values of codes 1, 2, …"""
    run_uri: str
    data_sha256: str
    metric: str
    """the job's main metric, such as accuracy or rmse"""
    trained: float
    """that metric of the stored model on the validation rows, from result.json"""
    rows: RowsFiles
    naive: float | None = None
    """the scale of the metric mase; None for other tasks"""
    keeps_missing: bool = False
    """whether the model was trained with missing values among its inputs"""


CIRCUIT_TOLERANCE = 0.01
"""The tolerance of `rtl`, unless the job or the command has another."""


@dataclass(frozen=True)
class ExportOptions:
    """How to export. `tolerance`: how much worse the metric may be.

    Of a share such as accuracy it is the difference, of an error such as rmse the relative rise.
    """

    limits: SandboxLimits
    tolerance: float = 0.005
    fine_tune: bool = False
    """onnx-int8: train again for a short time if the metric falls by more than that"""
    style: Literal["pipelined", "sequential", "both"] = "both"
