"""Files that people name (jobs, pools, structures, calibrations, plans): read whole; regular files of a bounded size only."""

from __future__ import annotations

import os
import stat
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
        raise BadInput(f"{named}: can't be read ({getattr(error, 'strerror', None) or error})") from None
    if max(state.st_size, len(content)) > most_bytes:
        raise BadInput(f"{named}: larger than {most_bytes} bytes, the most allowed")
    return content


def _without_waiting(path: str, flags: int) -> int:
    """Opening a pipe that nobody writes to would wait for who does."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "no file of bytes")
