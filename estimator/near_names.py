"""Which known name was probably meant, for the end of an error's line."""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

_LONGEST = 80
_MOST_FILES = 1000


def meant(given: object, names: Iterable[str]) -> str:
    """`; did you mean epochs?`; empty if no name is like the given one."""
    known = {one.lower(): one for one in names}
    found = get_close_matches(str(given)[:_LONGEST].lower(), known, 1)
    return f"; did you mean {known[found[0]]}?" if found else ""


def meant_file(path: str | Path) -> str:
    """The same for a missing file: the name in its folder that is most like its own."""
    folder, name = os.path.split(path)
    try:
        with os.scandir(folder or ".") as entries:
            names = [one.name for one, _ in zip(entries, range(_MOST_FILES), strict=False)]
    except (OSError, ValueError):  # the folder is missing too, or a NUL is in its name
        return ""
    return meant(name, names)
