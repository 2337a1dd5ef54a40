"""Files that people name (jobs, pools, structures, calibrations, plans), read or written whole: regular, of a bounded size."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from trainwright.estimator.errors import BadInput

MOST_BYTES = 64 * 2**20
"""of what a command of ours has written: structure.json, plan.json, a calibration, a suite of expectations"""


def read_named(path: str | Path, field: str = "", most_bytes: int = MOST_BYTES) -> bytes:
    """The file's content. `field` is what it was given as, where its path alone does not say.

    Raises BadInput for what is no regular file (a folder, a pipe, a device: reading one may never end), for more than
    `most_bytes`, and where it can't be read.
    """
    named = f"{field}: {path}" if field else f"{path}"
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise BadInput(f"{named}: is {_kind(state.st_mode)}; allowed: a regular file")
            # What says a smaller size than it has, and what grows meanwhile, is bounded too.
            content = file.read(most_bytes + 1) if state.st_size <= most_bytes else b""
    except FileNotFoundError:
        raise BadInput(f"{named}: no such file") from None
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
    """Write a file at once or not at all, its folder too. Raises BadInput where that can't be: no right, no space."""
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
    """Raise BadInput, as `write_named` would, where a file of this size can't be written there."""
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
    """Opening a pipe that nobody writes to would wait for who does."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFIFO: "a pipe",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "no file of bytes")
