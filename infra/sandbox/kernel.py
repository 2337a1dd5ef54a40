"""Linux system calls without a Python function. Each raises OSError if the kernel refuses.

Names and numbers are from the kernel's headers sched, mount, prctl, capability and landlock.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2

_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE = 2, -100, 0x8000
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP = 1, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_CAPABILITY_VERSION_3 = 0x20080522
# Same numbers on every architecture; libc lacks functions for them, or only recent ones have.
_SYS_MOUNT_SETATTR = 442
_SYS_LANDLOCK_CREATE_RULESET, _SYS_LANDLOCK_ADD_RULE, _SYS_LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_CREATE_RULESET_VERSION = 1
_LANDLOCK_RULE_PATH_BENEATH = 1

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Move this process into new namespaces; for `CLONE_NEWPID`, its children."""
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """Mount a file system at `target`."""
    texts = [None if one is None else os.fsencode(one) for one in (source, target, kind, data)]
    made = _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    _checked(made, f"mount {target}")


def change_mount(target: str, *, add: int = 0, clear: int = 0, recursive: bool = False) -> None:
    """Change a mount's attributes; with `recursive`, also of mounts below it (Linux 5.12)."""
    attributes = struct.pack("QQQQ", add, clear, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    path, size = os.fsencode(target), len(attributes)
    _syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path, flags, attributes, size)


def pivot_root(root: str, old: str) -> None:
    """Make `root` this process's root, and move the former root to `old`."""
    _checked(_libc.pivot_root(os.fsencode(root), os.fsencode(old)), f"pivot_root {root}")


def detach(target: str) -> None:
    """Unmount."""
    _checked(_libc.umount2(os.fsencode(target), _MNT_DETACH), f"umount {target}")


def end_with_parent(signal_number: int) -> None:
    """Send this process a signal when its parent ends."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl PDEATHSIG")


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends."""
    _checked(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl CHILD_SUBREAPER")


def no_new_privileges() -> None:
    """Prevent programs that this process executes from gaining privileges."""
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl NO_NEW_PRIVS")


def control_process(option: int, kind: int, data: bytes) -> None:
    """Change this process by `prctl` with a structure."""
    _checked(_libc.prctl(option, ctypes.c_ulong(kind), data, 0, 0), f"prctl {option}")


def drop_capabilities() -> None:
    """Drop all capabilities permanently."""
    with contextlib.suppress(OSError):  # EINVAL: beyond the last capability that the kernel knows
        for capability in range(64):
            dropped = _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
            _checked(dropped, f"prctl CAPBSET_DROP {capability}")
    no_new_privileges()
    header, none = struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24)
    _checked(_libc.capset(header, none), "capset")


def landlock_version() -> int:
    """The version of Landlock's interface; 0 if the kernel has none."""
    try:
        flag = _LANDLOCK_CREATE_RULESET_VERSION
        return _syscall(_SYS_LANDLOCK_CREATE_RULESET, None, 0, flag)
    except OSError:
        return 0


def landlock_ruleset(files: int, network: int, scopes: int) -> int:
    """A file descriptor of rules that forbid these kinds of access unless a rule allows them."""
    version = landlock_version()
    known = 24 if version >= 6 else 16 if version >= 4 else 8
    attributes = struct.pack("QQQ", files, network, scopes)[:known]
    return _syscall(_SYS_LANDLOCK_CREATE_RULESET, attributes, known, 0)


def landlock_allow(ruleset: int, path: str, access: int) -> None:
    """Allow kinds of access to a file, or to all below a folder."""
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", access, descriptor)
        _syscall(_SYS_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)


def landlock_restrict(ruleset: int) -> None:
    """Apply the rules to this process and its children. Call `no_new_privileges` first."""
    _syscall(_SYS_LANDLOCK_RESTRICT_SELF, ruleset, 0)


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    wide = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    result: int = _libc.syscall(ctypes.c_long(number), *wide)
    return _checked(result, f"system call {number}")


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
