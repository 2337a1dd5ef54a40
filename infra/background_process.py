"""Background processes of the embedded stack, which outlive the process that starts them.

A process is identified by its id and its start time, so that a recycled id is never mistaken for
it. Its children are identified by its session, or by a mark in the environment if they left the
session. Linux only.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from trainwright.infra.private_files import write_private

_MARK = "TRAINWRIGHT_SERVICE"


@dataclass(frozen=True)
class BackgroundProcess:
    """A background process. Its record and its log are in `folder`."""

    name: str
    folder: Path

    @property
    def log(self) -> Path:
        """The file with its output."""
        return self.folder / f"{self.name}.log"

    @property
    def _record(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def _mark(self) -> str:
        return str(self._record.resolve())

    def pid(self) -> int | None:
        """Its process id, if it runs."""
        pid, started = self._recorded()
        return pid if pid is not None and _start_time(pid) == started else None

    def known(self) -> bool:
        """Whether it was started, and not forgotten since."""
        return self._record.exists()

    def ended(self) -> bool:
        """Whether it was started, and has ended by itself."""
        return self.known() and self.pid() is None

    def forget(self) -> None:
        """Remove its record: it was stopped on purpose."""
        self._record.unlink(missing_ok=True)

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it in `folder`, in its own session; appends its output to its log."""
        with self.log.open("ab") as log:
            child = subprocess.Popen(
                command,
                env={**os.environ, **environment, _MARK: self._mark},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=0o077,
            )
        record = {"pid": child.pid, "started": _start_time(child.pid)}
        write_private(self._record, json.dumps(record))
        child.returncode = 0  # no warning from Popen: the process outlives it (see _start_time)

    def adopt(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment that makes another's child process end with this background process."""
        return {**environment, **({_MARK: self._mark} if _MARK in environment else {})}

    def processes(self) -> list[psutil.Process]:
        """The process and all its descendants, also those whose parents have ended."""
        pid, started = self._recorded()
        session = pid if pid is not None and _start_time(pid) in (started, None) else None
        return [
            process
            for process in psutil.process_iter()
            if _start_time(process.pid) is not None
            and (_session(process) == session or self._is_marked(process))
        ]

    def _recorded(self) -> tuple[int | None, int | None]:
        try:
            record = json.loads(self._record.read_text())
        except FileNotFoundError:
            return None, None
        return record["pid"], record["started"]

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(_MARK) == self._mark
        except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
            return False  # it has ended, or is another user's

    def last_line(self) -> str:
        """The last line of its log."""
        lines = self.log.read_text(errors="replace").split("\n") if self.log.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


def _start_time(pid: int) -> int | None:
    """The start time of a process, in the kernel's ticks since boot; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] not in "ZX":
        return int(fields[19])
    with suppress(ChildProcessError):  # another process's child
        os.waitpid(pid, os.WNOHANG)
    return None


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None


def stop(stopped: Iterable[BackgroundProcess], grace_s: float) -> None:
    """End background processes and their descendants: by SIGTERM, then SIGKILL after `grace_s`.

    SIGTERM goes to the leaders of process groups, which end their children in their own order, and
    to processes whose parent is not among them.
    """
    stopped = list(stopped)
    deadline = time.monotonic() + grace_s
    asked: set[int] = set()
    while left := [process for one in stopped for process in one.processes()]:
        late, family = time.monotonic() > deadline, {process.pid for process in left}
        for process in left:
            try:
                if late:
                    process.kill()
                elif process.pid not in asked and (
                    os.getpgid(process.pid) == process.pid or process.ppid() not in family
                ):
                    process.terminate()
                    asked.add(process.pid)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        time.sleep(0.1)


def wait_until(
    ready: Callable[[], bool], started: Iterable[BackgroundProcess], timeout_s: float
) -> None:
    """Wait until `ready()`. Raises OSError if one of the processes ends, TimeoutError."""
    started = list(started)
    deadline = time.monotonic() + timeout_s
    while not ready():
        for one in started:
            if one.pid() is None:
                raise OSError(
                    f"{one.name} ended during its start: {one.last_line()} (log: {one.log})"
                )
        if time.monotonic() > deadline:
            names = ", ".join(one.name for one in started)
            raise TimeoutError(
                f"{names}: not ready within {timeout_s:.0f} s (logs: {started[0].folder})"
            )
        time.sleep(0.2)
