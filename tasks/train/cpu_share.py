"""Limits a rank to its CPU share once it has loaded.

Uses a cgroup's quota; without permission to create a cgroup, it stops and continues the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import signal
import threading
import time
from pathlib import Path

PERIOD_US = 10_000  # with the default of 100 ms, step times of a few ms vary widely
_ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
_PREFIX = "trainwright-"


def _parents() -> tuple[Path, ...]:
    """Where to create cgroups: with version 1 below our own, so that its quota applies too."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own = _ROOTS[0] / path.lstrip("/")
        if "cpu" in controllers.split(",") and path != "/" and own.is_dir():
            return (own,)
    return _ROOTS


def quota_us(cores: float) -> tuple[int, int]:
    """Quota and period in µs. The kernel's minimum quota is 1 ms: small shares get long periods."""
    period = min(1_000_000, max(PERIOD_US, math.ceil(1000 / cores)))
    return max(1000, round(cores * period)), period


def make_cgroup(name: str, cores: float) -> Path | None:
    """Create a cgroup with a quota of this many cores; None without permission."""
    for root in _parents():
        group = root / f"{_PREFIX}{os.getpid()}-{name}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / "cpu.cfs_quota_us").exists():
                quota, period = quota_us(cores)
                (group / "cpu.cfs_period_us").write_text(str(period))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
                return group
            if (group / "cpu.max").exists():
                (group / "cpu.max").write_text("{} {}".format(*quota_us(cores)))
                return group
        except OSError:
            pass  # no permission to set the quota: remove the cgroup
        group.rmdir()
    return None


def join_cgroup(group: Path) -> None:
    """Limit the calling thread, and all threads it starts later, to the cgroup's quota.

    With cgroup v1 the threads of the collectives, which started earlier, stay outside: otherwise a
    quota that computing has used up would delay every message by a period, unlike any real device.
    With v2 the whole process joins.
    """
    tasks = group / "tasks"
    if tasks.exists():
        tasks.write_text(str(threading.get_native_id()))
    else:
        (group / "cgroup.procs").write_text(str(os.getpid()))


def remove_cgroup(group: Path) -> None:
    """Remove a cgroup whose processes have ended, which may take a moment."""
    for _ in range(50):
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)
        else:
            return


def _hold(group: Path) -> int:
    """Lock a cgroup as one that is used. Raises BlockingIOError if another process holds it."""
    held = os.open(group, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise
    return held


def remove_stale_cgroups() -> None:
    """Remove the cgroups of launchers that were killed."""
    for root in _parents():
        for group in root.glob(f"{_PREFIX}*-*"):
            launcher = group.name.removeprefix(_PREFIX).split("-")[0]
            if not launcher.isdigit() or Path(f"/proc/{launcher}").exists():
                continue
            # some of its ranks may not have ended yet, or it runs in another container
            with contextlib.suppress(OSError):
                held = _hold(group)
                try:
                    group.rmdir()
                finally:
                    os.close(held)


class CpuShare:
    """A number of cores for one process.

    `how` names the mechanism: `cgroup`, `duty cycle` or `none`.
    """

    def __init__(self, name: str, cores: float | None) -> None:
        self._cores = cores
        self._cycle: DutyCycle | None = None
        self.group = make_cgroup(name, cores) if cores is not None else None
        """The cgroup that the process joins with `join_cgroup`, if any."""
        self._held: int | None = None
        if self.group is not None:
            with contextlib.suppress(OSError):  # then only its process's number protects it
                self._held = _hold(self.group)
        self.how = (
            "cgroup" if self.group else "duty cycle" if cores is not None and cores < 1 else "none"
        )

    def hold(self, pid: int) -> None:
        """Start the duty cycle of the process if there is no cgroup."""
        if self.how == "duty cycle" and self._cores is not None:
            self._cycle = DutyCycle(pid, self._cores)

    def let_go(self) -> None:
        """End the duty cycle. Call it before the process is reaped and its id is reused."""
        if self._cycle is not None:
            self._cycle.end()
            self._cycle = None

    def remove(self) -> None:
        """Remove the cgroup, once the process has ended."""
        if self.group is not None:
            remove_cgroup(self.group)
        if self._held is not None:
            os.close(self._held)
            self._held = None


class DutyCycle:
    """Lets a process run for a fraction of every 20 ms, by SIGSTOP and SIGCONT."""

    _CYCLE_S = 0.02

    def __init__(self, pid: int, fraction: float) -> None:
        self._pid, self._fraction = pid, fraction
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"duty-cycle-{pid}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._done.wait(self._CYCLE_S * self._fraction):
                os.kill(self._pid, signal.SIGSTOP)
                time.sleep(self._CYCLE_S * (1 - self._fraction))
                os.kill(self._pid, signal.SIGCONT)
        except ProcessLookupError:
            return

    def end(self) -> None:
        """Stop limiting the process."""
        self._done.set()
        self._thread.join()
