"""The memory that processes of this machine, or of this container, may use."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import psutil

CGROUPS = Path("/sys/fs/cgroup")
_OF_THIS_PROCESS = Path("/proc/self/cgroup")


def usable_memory_bytes(root: Path = CGROUPS, of_process: Path = _OF_THIS_PROCESS) -> int:
    """The machine's memory, or the lowest limit of the process's cgroups and of those above them.

    `memory.max` of version 2, `memory.limit_in_bytes` of version 1 (docs.kernel.org, Control Group
    v2 and Memory Resource Controller). `root` is the mount point of cgroups, `of_process` the
    process's `/proc/<pid>/cgroup`.
    """
    try:
        lines = of_process.read_text().splitlines()
    except OSError:
        lines = []
    limits = [psutil.virtual_memory().total]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = PurePosixPath("/", path)
        limits += [
            limit
            for each in (group, *group.parents)
            if (limit := _limit(mount / each.relative_to("/") / name)) is not None
        ]
    return min(limits)


def _limit(file: Path) -> int | None:
    """The limit in a file; None if it is "max", or the file is invisible to the container."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def kernel_oom_kills() -> int:
    """The number of processes killed for lack of memory since boot; 0 if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
