"""Processes that end when their parent does, whatever ends it (Linux: PR_SET_PDEATHSIG).

The kernel ties the signal to the *thread* that started the process: start them from one that lives as long as they should.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """The command, wrapped so that it is killed when the calling process dies. Its process id stays the one of Popen."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def kill_all_with(name: str, value: str) -> int:
    """Kill every process of ours that has this in its environment, whoever its parent is by now; how many there were."""
    import contextlib

    import psutil

    found = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # another's, or gone meanwhile
            if process.environ().get(name) == value:
                process.kill()
                found += 1
    return found


def hide() -> None:
    """Let no other process of the same user read this one's environment or memory (PR_SET_DUMPABLE)."""
    import ctypes

    set_dumpable = 4
    ctypes.CDLL(None).prctl(set_dumpable, 0, 0, 0, 0)


def _main() -> None:
    import ctypes
    import signal

    parent, command = int(sys.argv[1]), sys.argv[2:]
    set_parent_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel knew
        raise SystemExit(f"{command[0]}: the process that started it is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    _main()
