"""Processes that end when their parent does, however it ends (Linux: PR_SET_PDEATHSIG).

The kernel sends the signal when the *thread* that started the process ends, so start the process
from a thread that lives long enough.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """The command, wrapped so that the kernel kills it when the calling process ends; same pid."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def allow_inspection(allowed: bool) -> None:
    """Allow or forbid this user's processes to read our environment, memory and open files."""
    import ctypes

    set_dumpable = 4
    ctypes.CDLL(None).prctl(set_dumpable, int(allowed), 0, 0, 0)


def _main() -> None:
    import ctypes
    import signal

    parent, command = int(sys.argv[1]), sys.argv[2:]
    set_parent_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        raise SystemExit(f"{command[0]}: the process that started it has ended")
    os.execvp(command[0], command)


if __name__ == "__main__":
    _main()
