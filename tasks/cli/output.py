"""Checks output files that users name: only a file of the same kind is replaced."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from trainwright.estimator.named_file import read_named
from trainwright.tasks.errors import BadInput

_MOST_BYTES = 256 * 2**20  # a run's report includes the chart library


def check_output(path: Path, option: str, kind: str, ours: Callable[[bytes], bool]) -> None:
    """Check an output path before the work is done. Raises BadInput if it can't be written.

    `kind` is the kind of file, in words; `ours` returns whether a file's content is of that kind. A
    folder, a device, a pipe or a file of another kind is not overwritten.
    """
    if not os.path.isdir(path.parent):
        raise BadInput(f"{option}: {path} can't be written (there is no folder {path.parent})")
    if os.path.lexists(path) and not ours(read_named(path, option, _MOST_BYTES)):
        raise BadInput(
            f"{option}: {path} exists and is not a {kind}; choose another file, or remove it"
        )
