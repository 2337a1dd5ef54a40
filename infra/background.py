"""Background processes of the embedded stack: start one that outlives its starter, know it again, stop all of it.

A service is known by its process id together with the time that process started: a recycled id is never mistaken for it.
What it started is known by its session, and by a mark in the environment where it left the session. Linux only.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

_MARK = "TRAINWRIGHT_SERVICE"
_children: list[subprocess.Popen[bytes]] = []  # so that those that end before us are reaped


@dataclass(frozen=True)
class Service:
    """A process that runs in the background; its record and its log lie in `folder`."""

    name: str
    folder: Path

    @property
    def log(self) -> Path:
        """What it prints."""
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
        return pid if pid is not None and _started(pid) == started else None

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it in `folder`, in a session of its own, its output appended to its log."""
        with self.log.open("ab") as log:
            child = subprocess.Popen(
                command,
                env={**os.environ, **environment, _MARK: self._mark},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _children.append(child)
        write_private(self._record, json.dumps({"pid": child.pid, "started": _started(child.pid)}))

    def adopt(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment for a process that a service starts, and that belongs to this one instead: it ends with this one."""
        return {**environment, **({_MARK: self._mark} if _MARK in environment else {})}

    def processes(self) -> list[psutil.Process]:
        """It and every process it started, also those whose parents are gone."""
        pid, started = self._recorded()
        session = pid if pid is not None and _started(pid) in (started, None) else None
        return [
            process
            for process in psutil.process_iter()
            if _started(process.pid) is not None
            and (_session(process) == session or self._marked(process))
        ]

    def _recorded(self) -> tuple[int | None, int | None]:
        try:
            record = json.loads(self._record.read_text())
        except FileNotFoundError:
            return None, None
        return record["pid"], record["started"]

    def _marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(_MARK) == self._mark
        except (
            psutil.NoSuchProcess,
            psutil.AccessDenied,
            ProcessLookupError,
        ):  # gone, or another user's
            return False

    def last_words(self) -> str:
        """The last line of its log."""
        lines = self.log.read_text(errors="replace").split("\n") if self.log.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def _started(pid: int) -> int | None:
    """When a process started, in the kernel's ticks since boot; None where it is gone or only waits to be reaped."""
    for child in _children:
        child.poll()
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return None


def stop(services: Iterable[Service], grace_s: float) -> None:
    """End services and all their processes: SIGTERM, and SIGKILL after `grace_s`.

    SIGTERM goes to the leaders of process groups, who end what they started in their own order, and to orphans.
    """
    services = list(services)
    deadline = time.monotonic() + grace_s
    asked: set[int] = set()
    while left := [process for service in services for process in service.processes()]:
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


def wait_until(ready: Callable[[], bool], services: Iterable[Service], timeout_s: float) -> None:
    """Wait for services to be ready. Raises OSError where one ended, TimeoutError where they never were."""
    services = list(services)
    deadline = time.monotonic() + timeout_s
    while not ready():
        for service in services:
            if service.pid() is None:
                raise OSError(
                    f"{service.name} ended while it started: {service.last_words()} (log: {service.log})"
                )
        if time.monotonic() > deadline:
            names = ", ".join(service.name for service in services)
            raise TimeoutError(
                f"{names}: not ready within {timeout_s:.0f} s (logs: {services[0].folder})"
            )
        time.sleep(0.2)


@contextmanager
def free_ports(count: int, preferred: int) -> Iterator[int]:
    """The first of `count` consecutive ports that are free on 127.0.0.1: `preferred`, or others. Raises OSError.

    Whoever else asks gets others until the block ends: by then a server should listen. They lie below the kernel's range for
    outgoing connections, which could take them at any moment.
    """
    candidates = [preferred, *(random.randrange(10_000, 32_000 - count) for _ in range(200))]
    for first in candidates:
        with ExitStack() as kept:
            if all(_keep(port, kept) for port in range(first, first + count)):
                yield first
                return
    raise OSError(f"no {count} consecutive free ports on 127.0.0.1")


def _keep(port: int, until: ExitStack) -> bool:
    """Whether a port is free and nobody else has been given it; kept by a name that the kernel frees with the process."""
    name, probe = until.enter_context(socket.socket(socket.AF_UNIX)), socket.socket()
    with probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            name.bind(f"\0trainwright-port-{port}")
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def private_folder(path: Path) -> Path:
    """A folder that only its owner may open."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


def write_private(path: Path, content: str) -> None:
    """Write a file that only its owner may read; a reader sees the old content or the new."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(content)
    part.replace(path)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """One process at a time does what this encloses; the others wait."""
    with (private_folder(folder) / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
