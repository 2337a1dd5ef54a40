"""Recognises what was given instead of a job file or a pool file, and says what it is for."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal

from trainwright.tasks.errors import BadInput

RUN_ID = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{6}")


def refuse_run(given: str | Path, wanted: Literal["job", "pool"]) -> None:
    """Raise BadInput if it is a run: its URI, its id or its folder."""
    # A path's parts are joined by single slashes, also those of a URI.
    text = str(given).replace("s3:/", "s3://").replace("file:/", "file:///")
    path = Path(given)
    if not RUN_ID.fullmatch(path.name) or os.path.isfile(given):
        return
    run = path.resolve().as_uri() if os.path.isdir(given) else text
    raise BadInput(
        f"{text}: is a run; allowed: a {wanted} file; `trainwright show {run}` shows the run"
    )


def refuse_other(values: dict[str, Any], wanted: Literal["job", "pool"], name: str) -> None:
    """Raise BadInput if a document is of another kind than the wanted one."""
    kind = _kind(values)
    if kind is None or kind == wanted:
        return
    if kind == "job":
        own = values.get("pool")
        shown = f"; its pool is {own}" if isinstance(own, str) else ""
        line = (
            f"is a job file{shown}; allowed: a pool file; `trainwright plan {name}` plans the job"
        )
    elif kind == "pool":
        line = f"is a pool file; allowed: a job file, and this one as --pool {name}"
    elif kind == "plan":
        line = (
            f"is a plan; allowed: a {wanted} file; "
            f"`trainwright train JOB --plan {name}` trains by the plan"
        )
    else:
        line = (
            f"is a file of a run; allowed: a {wanted} file; "
            "`trainwright show RUN` shows a run, and `trainwright runs` lists them"
        )
    raise BadInput(f"{name}: {line}")


def _kind(values: dict[str, Any]) -> str | None:
    """The kind of a document by its fields; None if they show none."""
    if "hosts" in values and "data" not in values:
        return "pool"
    if {"feasible", "devices"} <= values.keys():
        return "plan"
    if "schema_version" in values:
        return "artefact"
    if {"name", "data"} <= values.keys():
        return "job"
    return None
