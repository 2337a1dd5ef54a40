"""A job of Slurm that ends with the process that waits for it, however that process ends.

If srun is killed while its job waits, the job stays in the queue, is granted later, and holds its
node. So a guard, a process of its own session, cancels the job when srun has ended. Run as a
script, this replaces itself by srun and leaves the guard behind. Standard library only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

_CHANGES = ("SLURM_", "SRUN_", "SQUEUE_", "SINFO_", "SCANCEL_", "SCONTROL_")
_PAUSES_S = (0.0, 2.0, 5.0, 30.0, 120.0)
"""Between attempts to cancel. The first may be too early for a job that is just being submitted."""


def new_name(label: str) -> str:
    """A name that no other job has."""
    return f"{label}-{os.urandom(6).hex()}"


def ended_with_its_process(name: str) -> list[str]:
    """The words before a command that submits the job of this name; same process."""
    return [sys.executable, "-I", "-S", __file__, name]


def own_environment(given: Mapping[str, str]) -> dict[str, str]:
    """The environment without what changes the meaning of Slurm's commands.

    Started in a job of Slurm's, srun would take that job's nodes. The variables of squeue, sinfo
    and scancel hide jobs and nodes, and SLURM_TIME_FORMAT changes times.
    """
    return {
        name: value
        for name, value in given.items()
        if not name.startswith(_CHANGES) or name.startswith("SLURM_CONF")
    }


def _main(name: str, command: list[str]) -> None:
    import ctypes
    import signal

    me = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    if os.fork() == 0:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        set_parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGUSR1)
        if os.getppid() == me:
            signal.sigwait({signal.SIGUSR1})
        _cancel(name)
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    os.execvpe(command[0], command, own_environment(os.environ))


def _cancel(name: str) -> None:
    """Cancel the job, and look again, until the controller has said twice that it is done."""
    import subprocess
    import time

    answers = 0
    for pause_s in _PAUSES_S:
        time.sleep(pause_s)
        done = subprocess.run(["scancel", "--quiet", f"--name={name}"], check=False)
        answers += done.returncode == 0
        if answers == 2:
            return


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
