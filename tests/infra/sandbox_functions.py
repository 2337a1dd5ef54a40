"""Functions that tests run in a sandbox. The server imports this module, so it must stay light."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any


def echo(request: dict[str, Any]) -> str:
    """Return the request."""
    return json.dumps(request)


def use_lazily(_: dict[str, Any]) -> str:
    """Whether a module was loaded before this function imported it."""
    import sys

    known = "colorsys" in sys.modules
    import colorsys

    return f"{colorsys.__name__}: {known}"


def describe(_: dict[str, Any]) -> str:
    """The process's view of itself."""
    path = Path(tempfile.mkdtemp()) / "file"
    path.write_text("written")
    seen = {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "written": path.read_text(),
        "processes": [int(name) for name in os.listdir("/proc") if name.isdecimal()],
        "files": [int(name) for name in os.listdir("/proc/self/fd")],
    }
    return json.dumps(seen)


def read(request: dict[str, Any]) -> str:
    """The content of a file."""
    return Path(request["path"]).read_text()


def sleep(request: dict[str, Any]) -> str:
    """Start a process that sleeps for `seconds`, and wait for it."""
    subprocess.run(["sleep", request["seconds"]], check=True)
    return ""


def print_and_wait(_: dict[str, Any]) -> str:
    """Print two lines, and continue for a long time."""
    print("first\nlast", flush=True)  # noqa: T201
    time.sleep(100)
    return ""
