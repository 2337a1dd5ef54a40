"""A temporary folder that outlives no process: a later one removes what a killed one left."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainwright.infra.lock import locked

_SUFFIX = ".lock"


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """An empty folder in TMPDIR, removed at the end. Raises OSError.

    First removes the folders with this prefix whose process has ended without that. A process holds
    the lock `<folder>.lock` as long as it uses its folder.
    """
    parent = Path(tempfile.gettempdir())
    for lock in parent.glob(f"{prefix}*{_SUFFIX}"):
        with contextlib.suppress(OSError), locked(lock, wait=False):
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    folder = parent / f"{prefix}{secrets.token_hex(8)}"
    with locked(parent / f"{folder.name}{_SUFFIX}", wait=False):
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
