"""Runs one function on an exportable model in the sandbox, and takes back the files it made.

Everything that runs the model's code, or a file made by it, runs there.
"""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainwright.infra.sandbox import SandboxLimits, names_memory
from trainwright.infra.sandbox.client import call
from trainwright.tasks.errors import BadInput, TrainwrightError, from_document
from trainwright.tasks.export.exportable import Exportable

_DISK_FACTOR = 8
"""Sizes of the weights that files and answer may have together, beyond the usual limit."""


def model_request(model: Exportable) -> dict[str, Any]:
    """What a sandboxed function needs to know of a model, as JSON."""
    rows = model.rows
    return {
        "source": str(model.source),
        "entry": model.entry,
        "config": dict(model.config),
        "precision": model.precision,
        "weights": str(model.weights),
        "schema": model.schema.model_dump(mode="json"),
        "vocabularies": {name: list(values) for name, values in model.vocabularies.items()},
        "metric": model.metric,
        "naive": model.naive,
        "validation": {name: str(path) for name, path in rows.validation.items()},
        "targets": str(rows.targets),
        "calibration": {name: str(path) for name, path in rows.calibration.items()},
        "calibration_targets": str(rows.calibration_targets),
        "stored_codes": None if rows.stored_codes is None else str(rows.stored_codes),
        "category_values": {name: list(values) for name, values in rows.category_values.items()},
    }


def run_in_sandbox(
    function: str, request: dict[str, Any], model: Exportable, limits: SandboxLimits, folder: Path
) -> dict[str, Any]:
    """The document of `packed` that a function returned; its files are put into a folder.

    Parameters and errors as of `answered`.
    """
    disk = limits.disk_bytes + _DISK_FACTOR * model.weights.stat().st_size
    document, files = answered(function, request, model, replace(limits, disk_bytes=disk))
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        archive.extractall(folder, filter="data")
    return document


def answered(
    function: str, request: dict[str, Any], model: Exportable, limits: SandboxLimits
) -> tuple[dict[str, Any], bytes]:
    """What a function returned: a document on the first line, and the bytes after it.

    `function` is "package.module:name", from `request` to bytes. Raises the function's error, or
    BadInput if a limit ended it.
    """
    try:
        outcome = call(function, request, limits, [model.folder])
    except OSError as error:
        raise TrainwrightError(f"export: {error}") from error
    if not outcome.answer:
        memory = names_memory(outcome.last_line) or outcome.stopped_by == "memory"
        raised = "MEMORY_GIB" if memory else "TIMEOUT_S" if outcome.stopped_by == "time" else ""
        way_out = f"; TRAINWRIGHT_EXPORT_{raised} raises the limit" if raised else ""
        raise BadInput(f"model: exporting {model.entry} {outcome.failure(limits)}{way_out}")
    head, _, rest = outcome.answer.partition(b"\n")
    document: dict[str, Any] = json.loads(head)
    if "error" in document:
        raise from_document(document["error"])
    return document, rest


def packed(document: dict[str, Any], folder: Path) -> bytes:
    """A sandboxed function's answer: a document, and the files in a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name)
    return json.dumps(document).encode() + b"\n" + buffer.getvalue()


def refused(error: TrainwrightError) -> bytes:
    """A sandboxed function's answer if it fails: one line, which the caller raises again."""
    return json.dumps({"error": error.document()}).encode() + b"\n"
