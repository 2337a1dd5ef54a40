"""A control group that limits all memory of a sandbox, if this process may make one.

It counts what no process maps, too: files in memory, System V segments, pipes and sockets.
(docs.kernel.org: Control Group v2, Memory Resource Controller of version 1.)
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from trainwright.infra.memory_limit import CGROUPS

_PREFIX = "trainwright-sandbox-"
_REMOVAL_TRIES = 100


class MemoryGroup:
    """A group with a limit, to which `join` adds the calling process."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        """Create it. Raises OSError if that is not permitted, or does not limit memory."""
        folder.mkdir()
        self._folder = folder
        try:
            self._limit(limit_bytes)
            self._procs = os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            folder.rmdir()
            raise

    def _limit(self, limit_bytes: int) -> None:
        second = (self._folder / "memory.max").exists()
        (self._folder / ("memory.max" if second else "memory.limit_in_bytes")).write_text(
            str(limit_bytes)
        )
        swap = self._folder / ("memory.swap.max" if second else "memory.memsw.limit_in_bytes")
        if swap.exists():  # the kernel counts swap
            swap.write_text("0" if second else str(limit_bytes))
        self._events = self._folder / ("memory.events" if second else "memory.oom_control")

    def join(self) -> None:
        """Add the calling process; its children belong to it too."""
        os.write(self._procs, b"0")

    def exceeded(self) -> bool:
        """Whether the kernel has killed one of its processes for lack of memory."""
        lines = self._events.read_text().splitlines()
        return any(line.startswith("oom_kill ") and line.split()[1] != "0" for line in lines)

    def remove(self) -> None:
        """Remove it. Its processes must have been killed."""
        os.close(self._procs)
        for _ in range(_REMOVAL_TRIES):
            with contextlib.suppress(OSError):  # a process has not quite ended
                self._folder.rmdir()
                return
            time.sleep(0.01)


def memory_group(limit_bytes: int) -> MemoryGroup | None:
    """A group for this process's sandbox; None without permission to make one."""
    for parent in _parents():
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            continue
        _remove_stale(parent)
        with contextlib.suppress(OSError):
            return MemoryGroup(parent / f"{_PREFIX}{os.getpid()}", limit_bytes)
    return None


def _parents() -> Iterator[Path]:
    """Own groups of memory, lowest first, so that the limits above apply as well."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            mount = CGROUPS / "unified" if (CGROUPS / "unified").is_dir() else CGROUPS
        elif "memory" in controllers.split(","):
            mount = CGROUPS / "memory"
        else:
            continue
        group = PurePosixPath("/", name)
        for above in (group, *group.parents):
            yield mount / above.relative_to("/")


def _remove_stale(parent: Path) -> None:
    """Remove the groups of supervisors that were killed."""
    for folder in parent.glob(f"{_PREFIX}*"):
        if not Path(f"/proc/{folder.name.removeprefix(_PREFIX)}").exists():
            with contextlib.suppress(OSError):  # its processes have not ended
                folder.rmdir()
