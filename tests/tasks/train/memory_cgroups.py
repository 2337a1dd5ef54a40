"""Cgroups whose processes may hold little memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def limited_cgroup(name: str, megabytes: int) -> Iterator[Path]:
    """A cgroup with this limit; its processes must have ended after the block."""
    group = Path("/sys/fs/cgroup/memory") / f"trainwright-test-{name}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(megabytes << 20))
    except OSError:
        pytest.skip("no right to limit a process's memory by a cgroup")
    yield group
    for _ in range(100):
        try:
            return group.rmdir()
        except OSError:
            time.sleep(0.05)
