"""A job of Slurm that ends with the process that waits for it, however that process ends.

If srun is killed while its job waits, the job stays in the queue, is granted later, and holds its
node. So a guard, a process of its own session, cancels the job when srun has ended. Run as a
script, this replaces itself by srun and leaves the guard behind. Standard library only.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping

_CHANGES = ("SLURM_", "SRUN_", "SQUEUE_", "SINFO_", "SCANCEL_", "SCONTROL_")
_PAUSES_S = (0.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Before the attempts to cancel, while the job is still in the queue or nobody answers."""
_AGAIN_S = 30.0
"""After which it looks once more: the controller may handle a submission late."""


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
    # A cluster or a runtime that takes the launcher back sends these to all its processes.
    ignored = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, *ignored})
    if os.fork() == 0:
        os.setsid()
        for sent in ignored:
            signal.signal(sent, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        set_parent_death_signal = 1
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGUSR1)
        if os.getppid() == me:
            signal.sigwait({signal.SIGUSR1})
        cancel(name)
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1, *ignored})
    os.execvpe(command[0], command, own_environment(os.environ))


def cancel(name: str, sleep: Callable[[float], None] = time.sleep) -> None:
    """Cancel the job of this name until it has left the queue, and look again some time later."""
    if _has_left(name, sleep):
        sleep(_AGAIN_S)
        _has_left(name, sleep)


def _has_left(name: str, sleep: Callable[[float], None]) -> bool:
    """Cancel the job for some minutes; whether it is not in the queue any more."""
    for pause_s in _PAUSES_S:
        sleep(pause_s)
        _run("scancel", "--quiet", f"--name={name}")
        if _run("squeue", "--noheader", "--me", f"--name={name}", "--format=%i") == "":
            return True
    return False


def _run(*command: str) -> str | None:
    """What a command says; None if it failed."""
    import subprocess

    done = subprocess.run(
        command,
        env=own_environment(os.environ),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else None


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
