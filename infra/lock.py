"""A file lock between processes of one machine.

The kernel frees it when the last process that holds it has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[int]:
    """Hold the lock. Yields its file descriptor; a child process that inherits it holds it too.

    Raises BlockingIOError if another process holds it and `wait` is false, OSError if the file
    can't be created.
    """
    descriptor = _take(path, wait)
    try:
        yield descriptor
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _take(path: Path, wait: bool) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has deleted the file, so this lock guards nothing
