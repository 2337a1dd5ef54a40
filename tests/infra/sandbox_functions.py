"""Functions that tests run in a sandbox. The server imports this module, so it must stay light."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from trainwright.infra.sandbox import supervise


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


def fill_file_in_memory(request: dict[str, Any]) -> str:
    """Write to files in memory that no process maps."""
    for _ in range(request["mebibytes"] // 8):
        os.write(os.memfd_create("filled"), bytes(2**23))
    return "written"


def fill_segment(request: dict[str, Any]) -> str:
    """Write to System V segments, and detach each."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    for _ in range(request["mebibytes"] // 16):
        segment = libc.shmget(0, ctypes.c_size_t(2**24), 0o1600)
        if segment < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        address = ctypes.c_void_p(libc.shmat(segment, None, 0))
        ctypes.memset(address, 1, 2**24)
        libc.shmdt(address)
    return "written"


if os.environ.get("GROUPS_OF_MEMORY") == "none":  # as without the right to make one
    supervise.memory_group = lambda _: None
