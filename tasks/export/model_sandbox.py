"""Runs one function on an exportable model in the sandbox, and takes back the file it made.

Everything that runs the model's code, or a file made by it, runs there.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainwright.infra.sandbox import SandboxLimits, names_memory
from trainwright.infra.sandbox.client import call
from trainwright.tasks.errors import BadInput, TrainwrightError, from_document
from trainwright.tasks.export.exportable import Exportable

_DISK_FACTOR = 8
"""Sizes of the weights that file and answer may have together, beyond the usual limit."""


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
    function: str, request: dict[str, Any], model: Exportable, limits: SandboxLimits, path: Path
) -> dict[str, Any]:
    """The document that a function returned by `file_or_error`; its file is written to `path`.

    `function` is "package.module:name", from `request` to bytes. Raises the function's error, or
    BadInput if a limit ended it.
    """
    disk = limits.disk_bytes + _DISK_FACTOR * model.weights.stat().st_size
    allowed = replace(limits, disk_bytes=disk)
    try:
        outcome = call(function, request, allowed, [model.folder])
    except OSError as error:
        raise TrainwrightError(f"export: {error}") from error
    if not outcome.answer:
        memory = names_memory(outcome.last_line) or outcome.stopped_by == "memory"
        raised = "MEMORY_GIB" if memory else "TIMEOUT_S" if outcome.stopped_by == "time" else ""
        way_out = f"; TRAINWRIGHT_EXPORT_{raised} raises the limit" if raised else ""
        raise BadInput(f"model: exporting {model.entry} {outcome.failure(allowed)}{way_out}")
    head, _, content = outcome.answer.partition(b"\n")
    document: dict[str, Any] = json.loads(head)
    if "error" in document:
        raise from_document(document["error"])
    path.write_bytes(content)
    return document


def file_or_error(make: Callable[[Path], dict[str, Any]]) -> bytes:
    """A sandboxed function's answer: a line of JSON, then the file's content.

    `make` writes the file to the path that it gets, and returns the document. If it fails, the line
    is `{"error": …}`, which the caller raises again.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "made")
            document = make(path)
            return json.dumps(document).encode() + b"\n" + path.read_bytes()
    except TrainwrightError as error:
        found = error
    except MemoryError:
        found = BadInput("model: exporting it ended in a MemoryError")
    return json.dumps({"error": found.document()}).encode() + b"\n"
