"""Gives a process its share of this machine's CPUs, against other programs too.

A cgroup has a weight and, for a device that is less than the whole machine, a quota. Without
permission to create cgroups, the process is stopped and continued.

The weight matters most for several threads: they wait for each other in each operation. With the
weight of an ordinary process, the thread that wakes last queues behind any other program, even one
of low priority, and a step takes 4 to 24 times as long (Linux 6.18, two threads, 1024 shares).
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

PERIOD_US = 10_000  # with the default of 100 ms, step times of a few ms vary widely
_ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
_PREFIX = "trainwright-"
_COMPUTE = "compute"
"""With version 1: the child with the quota, for the threads that compute."""
SHARES_PER_CORE = 10_240
"""Ten times an ordinary process's weight: with a fifth of it, two threads already wait."""
_LEAST_SHARES, MOST_SHARES = 1024, 262_144


def _parents() -> tuple[Path, ...]:
    """Where to create cgroups: with version 1 below our own, so that its quota applies too."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own = _ROOTS[0] / path.lstrip("/")
        if "cpu" in controllers.split(",") and path != "/" and own.is_dir():
            return (own,)
    return _ROOTS


def processors() -> int:
    """The number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def quota_us(cores: float) -> tuple[int, int]:
    """Quota and period in µs. The kernel's minimum quota is 1 ms: small shares get long periods."""
    period = min(1_000_000, max(PERIOD_US, math.ceil(1000 / cores)))
    return max(1000, round(cores * period)), period


def shares_of(cores: float) -> int:
    """The weight of a device, as `cpu.shares`: a group's weight is divided among its CPUs."""
    return min(MOST_SHARES, max(_LEAST_SHARES, round(SHARES_PER_CORE * cores)))


def make_cgroup(name: str, cores: float) -> Path | None:
    """Create a cgroup with the weight of this many cores, and a quota unless that is all.

    Returns None without permission.
    """
    quota = quota_us(cores) if cores < processors() else None
    for root in _parents():
        group = root / f"{_PREFIX}{os.getpid()}-{name}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / "cpu.shares").exists():
                _limit_v1(group, shares_of(cores), quota)
                return group
            if (group / "cpu.max").exists():
                # version 2 counts from 1 to 10,000, and an ordinary group has 100
                (group / "cpu.weight").write_text(str(min(10_000, shares_of(cores) * 100 // 1024)))
                if quota is not None:
                    (group / "cpu.max").write_text("{} {}".format(*quota))
                return group
        except OSError:
            pass  # no permission to set the weight or the quota: remove the cgroup
        remove_cgroup(group)
    return None


def _limit_v1(group: Path, shares: int, quota: tuple[int, int] | None) -> None:
    """Set the weight; put the quota on a child.

    The threads of the collectives stay outside the child: a quota that computing has used up would
    delay every message by a period, unlike any real device.
    """
    (group / "cpu.shares").write_text(str(shares))
    if quota is not None:
        compute = group / _COMPUTE
        compute.mkdir()
        (compute / "cpu.cfs_period_us").write_text(str(quota[1]))
        (compute / "cpu.cfs_quota_us").write_text(str(quota[0]))


def join_cgroup(group: Path) -> None:
    """Let this process have the cgroup's weight.

    The quota is for the calling thread and all threads that it starts later; with version 2 for the
    whole process.
    """
    (group / "cgroup.procs").write_text(str(os.getpid()))
    if (group / _COMPUTE).exists():
        (group / _COMPUTE / "tasks").write_text(str(threading.get_native_id()))


def remove_cgroup(group: Path) -> None:
    """Remove a cgroup whose processes have ended, which may take a moment."""
    for _ in range(50):
        try:
            _remove_now(group)
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)
        else:
            return


def _remove_now(group: Path) -> None:
    if (group / _COMPUTE).is_dir():
        (group / _COMPUTE).rmdir()
    group.rmdir()


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
                    _remove_now(group)
                finally:
                    os.close(held)


class CpuShare:
    """A number of cores for one process, or for one and its children.

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

    def take(self, pid: int) -> None:
        """Put a process into the cgroup, if there is one: all its threads, and its children."""
        if self.group is not None:
            inner = self.group / _COMPUTE
            place = inner if inner.exists() else self.group
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                (place / "cgroup.procs").write_text(str(pid))

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


@contextlib.contextmanager
def cpu_share(name: str, cores: float) -> Iterator[CpuShare]:
    """A share that is removed at the end, after its processes have ended."""
    share = CpuShare(f"{name}-{os.urandom(4).hex()}", cores)
    try:
        yield share
    finally:
        share.remove()


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
