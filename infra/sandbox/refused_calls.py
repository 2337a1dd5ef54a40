"""System calls that sandboxed code may not make, as a seccomp filter (seccomp(2)).

They make memory that belongs to no process's address space, so neither the kernel's limits of a
process nor the supervisor's sum count it. Without a group that counts it (`memory_group`), the
calls fail as on a kernel without them.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

from trainwright.infra.sandbox import kernel

# audit architecture (linux/audit.h), and numbers of memfd_create, shmget, msgget, mq_open, semget;
# memfd_secret and io_uring_setup have the same numbers everywhere
_GENERIC = (279, 194, 186, 180, 190)
_MACHINES = {
    "x86_64": (0xC000003E, (319, 29, 68, 240, 64)),
    "aarch64": (0xC00000B7, _GENERIC),
    "riscv64": (0xC00000F3, _GENERIC),
}
_EVERYWHERE = (447, 425)
_X32 = 0x40000000
"""bit of the numbers of x86-64's second set of calls, which no usual program makes"""

# linux/bpf_common.h, linux/seccomp.h
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


def refuse_uncounted_memory() -> None:
    """Refuse these calls to this process and its children. Call `no_new_privileges` first.

    Raises OSError if the kernel, or this type of machine, has no filters.
    """
    machine = platform.machine()
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no filter of system calls is known for {machine}")
    program = _program(*_MACHINES[machine])
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    kernel.control_process(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header)


def _program(architecture: int, numbers: tuple[int, ...]) -> bytes:
    """The filter: other architectures' calls and the listed ones fail, all others are allowed."""
    refused = (*numbers, *_EVERYWHERE)
    left = len(refused) + 1
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 0, left + 2, architecture),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, left, 0, _X32),
        *((_EQUAL, left - 1 - place, 0, number) for place, number in enumerate(refused)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    return b"".join(struct.pack("HBBI", *line) for line in lines)
