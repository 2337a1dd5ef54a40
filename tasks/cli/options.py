"""Shared by all commands: common options, and printing JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pydantic import BaseModel

    from trainwright.tasks.settings import Settings

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="a job file (YAML or JSON)")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="set a field of the job; repeatable"),
]
PoolFile = Annotated[
    Path | None, typer.Option("--pool", metavar="FILE", help="a pool file; overrides the job's")
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document on stdout")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]
New = Annotated[
    bool, typer.Option("--new", help="start a new run instead of continuing an unfinished one")
]
Store = Annotated[
    str | None,
    typer.Option("--store", metavar="URI", help="where runs are kept; default: TRAINWRIGHT_STORE"),
]


def require_there(store: str | None, settings: Settings) -> None:
    """Raise BadInput if a store to read is given and its folder or bucket does not exist."""
    from trainwright.estimator.errors import BadInput
    from trainwright.tasks.storage.connect import open_store

    if store is not None and (missing := open_store(store, settings).missing()) is not None:
        raise BadInput(f"--store: got {store}; there is no {missing}")


def print_json(document: Any) -> None:
    """Print one JSON document on stdout.

    Raises TrainwrightError if stdout can't be written, BrokenPipeError if its reader has gone.
    """
    from trainwright.estimator.errors import TrainwrightError

    text = json.dumps(document, indent=2, allow_nan=False, default=str) + "\n"
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise TrainwrightError(f"standard output: can't be written ({error.strerror})") from error


def print_model(model: BaseModel, **options: Any) -> None:
    """Print an artefact as JSON, as in its file."""
    print_json(model.model_dump(mode="json", **options))
