"""The sandbox without namespaces: Landlock, if the kernel has it, and a Python audit hook.

Landlock (docs.kernel.org/userspace-api/landlock.html) restricts files, TCP, and signals to other
processes. It covers neither UDP nor chmod and similar calls; the hook refuses these, and the start
of processes. The hook stops Python code only; hostile code can bypass it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from trainwright.infra.sandbox import kernel
from trainwright.infra.sandbox.confine import DEVICES

_OWN_PROCESS = ("/proc/self", "/proc/cpuinfo", "/proc/meminfo")

# linux/landlock.h: kinds of file access, and how many each version of the interface supports
_EXECUTE, _WRITE, _READ, _LIST, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_KINDS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_BIND_AND_CONNECT, _SOCKETS_AND_SIGNALS = 0b11, 0b11

# Audit events (docs.python.org/3/library/audit_events.html), by the start of their names
_NETWORK = ("socket.",)
_PROCESSES = (
    "subprocess.",
    "pty.",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
)
_OTHERS = ("os.kill", "ctypes.dlopen")
_REFUSED = (*_NETWORK, *_PROCESSES, *_OTHERS)
_READS = ("os.listdir", "os.scandir")
_CHANGES = ("os.chmod", "os.chown", "os.setxattr", "os.utime", "os.truncate", "os.link")
_MOVES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink")
_WRITES = (*_CHANGES, *_MOVES)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def restrict(readable: Iterable[str], folder: str) -> None:
    """Limit this process and its children to reading these paths and writing below a folder."""
    allowed = [*readable, *filter(os.path.exists, _OWN_PROCESS)]
    if version := kernel.landlock_version():
        _landlock(version, allowed, folder)
    sys.addaudithook(_hook([os.path.realpath(path) for path in allowed], os.path.realpath(folder)))


def _landlock(version: int, readable: Iterable[str], folder: str) -> None:
    every_kind = (1 << _KINDS[min(version, max(_KINDS))]) - 1
    of_a_file = every_kind & (_EXECUTE | _WRITE | _READ | _TRUNCATE)
    rules = kernel.landlock_ruleset(every_kind, _BIND_AND_CONNECT, _SOCKETS_AND_SIGNALS)
    for path in readable:
        kinds = _EXECUTE | _READ | _LIST | (_WRITE if path in DEVICES else 0)
        kernel.landlock_allow(rules, path, kinds if os.path.isdir(path) else kinds & of_a_file)
    kernel.landlock_allow(rules, folder, every_kind)
    kernel.no_new_privileges()
    kernel.landlock_restrict(rules)
    os.close(rules)


def _hook(readable: list[str], folder: str) -> Callable[[str, tuple[Any, ...]], None]:
    writable = [folder, "/dev/null"]

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(_REFUSED):
            raise PermissionError(f"the sandbox does not allow {event}")
        if event == "open":
            writes = bool(arguments[2] & _WRITING)
            require(arguments[0], writable if writes else [*readable, *writable])
        elif event.startswith(_READS):
            require("." if arguments[0] is None else arguments[0], [*readable, *writable])
        elif event.startswith(_WRITES):
            for path in arguments:
                if isinstance(path, str | bytes | os.PathLike):
                    require(path, writable)

    def require(path: Any, roots: list[str]) -> None:
        if isinstance(path, int):  # an open file descriptor
            return
        real = os.path.realpath(os.fsdecode(path))
        if not any(real == root or real.startswith(f"{root}/") for root in roots):
            raise PermissionError(f"the sandbox does not allow access to {real}")

    return check
