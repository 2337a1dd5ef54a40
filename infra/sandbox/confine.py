"""Confines sandboxed code: no network, few readable files, one writable temporary folder.

There are two ways; `strongest` finds the one that the kernel permits:

- own namespaces: user, mount, process, network and IPC namespaces. The file system has only the
  readable paths, read-only, and an empty /tmp. No process outside is visible.
- the fallback (`fallback`): Landlock, if the kernel has it, and a Python audit hook.

Every function raises OSError if the kernel refuses: code never runs with less protection than
stated.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from trainwright.infra.sandbox import Protection, kernel

_LIBRARIES = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store", "/gnu/store")
_OF_THE_SYSTEM = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
_HARDWARE = ("/sys/devices/system/cpu", "/sys/devices/system/node")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_PRIVATE = ("/", "/tmp", "/dev", "/proc")
"""each sandbox has its own; those of the machine are never visible"""


def strongest() -> Protection:
    """The strongest protection that works here, tested in a child process."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            enter_namespaces()
            first = os.fork()
            if first != 0:
                code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
            else:
                enter_root((), 2**20)
                code = 0
        finally:
            os._exit(code)
    if os.waitpid(child, 0)[1] == 0:
        return "own namespaces"
    return "Landlock and audit hook" if kernel.landlock_version() else "audit hook"


def readable_paths(more: Iterable[str] = ()) -> list[str]:
    """The system's libraries, Python, everything that this process can import, and `more`.

    Leaves out paths below other listed paths.
    """
    found = {*_LIBRARIES, *_OF_THE_SYSTEM, *_HARDWARE, *DEVICES, *_importable(), *more}
    found |= {os.path.realpath(one) for one in found}
    kept: list[str] = []
    for path in sorted(found):
        below = any(path.startswith(f"{one}/") for one in kept)
        if path not in _PRIVATE and not below and os.path.exists(path):
            kept.append(path)
    return kept


def _importable() -> Iterator[str]:
    yield from (sys.prefix, sys.base_prefix, sys.exec_prefix)
    yield from (path for path in sys.path if os.path.isabs(path))
    libraries = os.environ.get("LD_LIBRARY_PATH", "")
    yield from (path for path in libraries.split(":") if os.path.isabs(path))
    for name, module in sys.modules.items():  # editable installs by setuptools
        if name.startswith("__editable__"):
            yield from getattr(module, "MAPPING", {}).values()


def enter_namespaces() -> None:
    """Move this process into its own namespaces. Its next child is the first process in them."""
    user, group = os.getuid(), os.getgid()
    kernel.unshare(
        kernel.CLONE_NEWUSER | kernel.CLONE_NEWNET | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC
    )
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def enter_root(readable: Iterable[str], writable_bytes: int) -> None:
    """Give the first process of the namespaces its own file system, and drop its privileges.

    The file system has only the readable paths, and is read-only except for /tmp, which has
    `writable_bytes`.
    """
    kernel.unshare(kernel.CLONE_NEWNS)
    # No further user namespaces: inside one, code has all capabilities, and more kernel access.
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    targets = {path: os.path.realpath(path) for path in readable}
    safe = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", safe, "size=1m,mode=755")
    os.mkdir("/tmp/machine")
    kernel.pivot_root("/tmp", "/tmp/machine")
    os.chdir("/")
    for path in ("/tmp", "/dev", "/dev/shm", "/proc"):
        os.mkdir(path)
    size = f"size={writable_bytes},nr_inodes=10000,mode=1777"
    kernel.mount("tmpfs", "/tmp", "tmpfs", safe, size)
    for path, target in targets.items():
        _bind(f"/machine{target}", path)
    # Read-only, because user 0 may write most of /proc/sys without any capability.
    kernel.mount("proc", "/proc", "proc", safe | kernel.MS_NOEXEC | kernel.MS_RDONLY)
    kernel.detach("/machine")
    os.rmdir("/machine")
    os.symlink("/proc/self/fd", "/dev/fd")
    fixed = kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NOSUID
    kernel.change_mount("/", add=fixed, recursive=True)
    kernel.change_mount("/tmp", clear=kernel.MOUNT_ATTR_RDONLY)
    kernel.mount("/tmp", "/dev/shm", None, kernel.MS_BIND)
    os.chdir("/tmp")
    kernel.drop_capabilities()


def _bind(source: str, path: str) -> None:
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT))
    kernel.mount(source, path, None, kernel.MS_BIND | kernel.MS_REC)
