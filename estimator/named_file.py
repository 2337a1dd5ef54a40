"""Reads and writes files that users name: jobs, pools, structures, calibrations, plans.

They must be regular files of a bounded size. Each is read or written completely.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from trainwright.estimator.errors import BadInput
from trainwright.estimator.near_names import meant_file

MOST_BYTES = 64 * 2**20
"""For a structure, a plan, a calibration or a suite of expectations."""


def read_named(path: str | Path, field: str = "", most_bytes: int = MOST_BYTES) -> bytes:
    """The file's content. `field` is the option or field that named it, for messages.

    Raises BadInput if it is not a regular file (reading a pipe or a device may never end), if it is
    larger than `most_bytes`, or if it can't be read.
    """
    named = f"{field}: {path}" if field else f"{path}"
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                kind = kind_of_file(state.st_mode)
                raise BadInput(f"{named}: is {kind}; allowed: a regular file")
            # Also bounds a file that reports a smaller size than it has, or grows meanwhile.
            content = file.read(most_bytes + 1) if state.st_size <= most_bytes else b""
    except FileNotFoundError:
        raise BadInput(f"{named}: no such file{meant_file(path)}") from None
    except IsADirectoryError:
        raise BadInput(f"{named}: is a folder; allowed: a regular file") from None
    except (OSError, ValueError) as error:  # a NUL in the name is a ValueError
        raise BadInput(
            f"{named}: can't be read ({getattr(error, 'strerror', None) or error})"
        ) from None
    if max(state.st_size, len(content)) > most_bytes:
        raise BadInput(f"{named}: larger than {most_bytes} bytes, the most allowed")
    return content


def write_named(path: Path, content: bytes, field: str = "") -> None:
    """Write a file atomically, and create its folder.

    Raises BadInput without permission or space.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        raise _unwritable(path, field, error) from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def require_space(path: Path, size: int, field: str = "") -> None:
    """Raise BadInput, as `write_named` would, if a file of this size can't be written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent) as file:
            file.write(bytes(size))
            file.flush()
    except OSError as error:
        raise _unwritable(path, field, error) from None


def _unwritable(path: Path, field: str, error: OSError) -> BadInput:
    named = f"{field}: {path}" if field else f"{path}"
    return BadInput(f"{named}: can't be written ({error.strerror})")


def _without_waiting(path: str, flags: int) -> int:
    """Opens a pipe without waiting for a writer, which may never come."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def kind_of_file(mode: int) -> str:
    """The kind of a file that is not a regular one, by its mode, in words."""
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "not a regular file")
