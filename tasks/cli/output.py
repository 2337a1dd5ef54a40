"""Files that a person names to be written: what is there already is replaced only where it is of the same kind, and ours."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from trainwright.estimator.named_file import read_named
from trainwright.tasks.errors import BadInput

_MOST_BYTES = 256 * 2**20  # a run's report holds its charts' library


def check_output(path: Path, option: str, kind: str, ours: Callable[[bytes], bool]) -> None:
    """Look at where a file is to be written, before the work is done. Raises BadInput, also where there is no such folder.

    `kind` is what is to be written, in words; `ours` says whether a file's content is one of those. A folder, a device, a pipe or
    a file of another kind is not written over.
    """
    if not os.path.isdir(path.parent):
        raise BadInput(f"{option}: {path} can't be written (there is no folder {path.parent})")
    if os.path.lexists(path) and not ours(read_named(path, option, _MOST_BYTES)):
        raise BadInput(
            f"{option}: {path} is there already and is no {kind}; name another file, or remove it"
        )
