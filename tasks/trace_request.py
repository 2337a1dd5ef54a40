"""Requests to the tracer in the sandbox, and the resulting structure or error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainwright.estimator.structure import Structure
from trainwright.estimator.trace.source import BatchSpec
from trainwright.infra.sandbox import Outcome, SandboxLimits, Stop, names_memory
from trainwright.tasks.errors import BadInput
from trainwright.tasks.spec.train_spec import Optimizer

TRACER = "trainwright.estimator.trace.trace:answer"
_SANDBOX_ERRORS = (
    "sandbox does not allow",
    "[Errno 2]",  # ENOENT: the sandbox hides the file
    "[Errno 13]",  # EACCES
    "[Errno 27]",  # EFBIG
    "[Errno 28]",  # ENOSPC
    "[Errno 30]",  # EROFS
    "[Errno 101]",  # ENETUNREACH
    "[Errno -3]",  # EAI_AGAIN, of name resolution
)


def trace_request(
    folder: Path,
    entry: str,
    config: Mapping[str, Any],
    *,
    batch_size: int,
    batch_spec: BatchSpec | None,
    optimizer: Optimizer,
    precision: str,
    accumulation: int,
    label_smoothing: float = 0.0,
    targets: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The request for the structure of a model whose source lies in a folder.

    `targets`: where to find real rows of them, see `estimator.trace.real_rows`.
    """
    return {
        "folder": str(folder.absolute()),
        "entry": entry,
        "config": dict(config),
        "batch_size": batch_size,
        "spec": batch_spec.model_dump(mode="json") if batch_spec else None,
        "optimizer": optimizer.model_dump(),
        "precision": precision,
        "accumulation": accumulation,
        "label_smoothing": label_smoothing,
        "targets": None if targets is None else dict(targets),
    }


def traced_structure(
    outcome: Outcome, entry: str, limits: SandboxLimits, raised_by: Mapping[Stop, str]
) -> Structure:
    """The structure in an outcome. `raised_by` names the setting that raises each limit.

    Raises BadInput if the tracing failed.
    """

    def way_out(stop: Stop | None) -> str:
        return f"; {raised_by[stop]} raises the limit" if stop and stop in raised_by else ""

    if not outcome.answer:
        stop: Stop | None = "memory" if names_memory(outcome.last_line) else outcome.stopped_by
        raise BadInput(f"model: tracing {entry} {outcome.failure(limits)}{way_out(stop)}")
    try:
        document = json.loads(outcome.answer)
        if "error" not in document:
            return Structure.model_validate(document)
        message = str(document["error"]["message"])
    except (ValueError, LookupError, TypeError, ValidationError):
        raise BadInput(f"model: {entry} returned something other than a structure") from None
    # The error is the model's, whatever kind its process reports.
    if names_memory(message):
        raise BadInput(f"{message}; allowed: {limits.memory_words()}{way_out('memory')}")
    if any(sign in message for sign in _SANDBOX_ERRORS):
        raise BadInput(
            f"{message}; models are traced without network, may read only their own source and "
            f"installed packages, and write at most {limits.disk_bytes / 2**20:g} MiB in TMPDIR"
        )
    raise BadInput(message)
