"""Restarts parts of the embedded stack that ended without being stopped.

A command that needs the S3 server supervises it while it runs (`supervised`). `up` starts a
background process that supervises the S3 server and Airflow until Airflow is stopped.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from trainwright.infra.airflow import airflow_services, restart_service
from trainwright.infra.background_process import BackgroundProcess
from trainwright.infra.private_files import private_folder
from trainwright.infra.s3_server import restart_s3, s3_service

LOOK_EVERY_S = 1.0
MOST_RESTARTS = 5
WITHIN_S = 600.0
"""After this many restarts within this time, a part is left as it is."""


class Supervisor:
    """Supervises the S3 server of a home and, with `dags_folder`, its Airflow.

    `tell` gets one line for each restart. `now` returns seconds.
    """

    def __init__(
        self,
        home: Path,
        tell: Callable[[str], None],
        dags_folder: Path | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._home, self._tell, self._dags_folder, self._now = home, tell, dags_folder, now
        self._restarts: dict[str, deque[float]] = {}

    def look(self) -> None:
        """Restart each part that has ended since it was started."""
        self._look_at(s3_service(self._home), partial(restart_s3, self._home))
        if self._dags_folder is not None:
            for one in airflow_services(self._home):
                self._look_at(one, partial(restart_service, self._home, self._dags_folder, one))

    def _look_at(self, service: BackgroundProcess, restart: Callable[[], bool]) -> None:
        if not service.ended():
            return
        before, now = self._restarts.setdefault(service.name, deque()), self._now()
        while before and before[0] < now - WITHIN_S:
            before.popleft()
        if len(before) > MOST_RESTARTS:
            return
        where = f"(log: {service.log})"
        if len(before) == MOST_RESTARTS:
            before.append(now)
            self._tell(
                f"{service.name} ended {len(before)} times within {WITHIN_S / 60:.0f} min, and is "
                f"not started again: {service.last_line()} {where}"
            )
            return
        try:
            restarted = restart()
        except (OSError, TimeoutError) as error:
            restarted = False
            before.append(now)
            self._tell(f"{service.name} ended, and can't be started again: {error}")
        if restarted:  # else another process did, or it was being stopped
            before.append(now)
            self._tell(f"{service.name} ended unexpectedly; started again {where}")


@contextlib.contextmanager
def supervised(supervisor: Supervisor) -> Iterator[None]:
    """Inside the block, look after the parts in a thread."""
    over = threading.Event()

    def loop() -> None:
        while not over.wait(LOOK_EVERY_S):
            supervisor.look()

    thread = threading.Thread(target=loop, name="supervisor", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def supervisor_service(home: Path) -> BackgroundProcess:
    """The supervisor of `up`, as a background process."""
    return BackgroundProcess("supervisor", home / "supervisor")


def start_supervisor(home: Path, dags_folder: Path) -> None:
    """Start it unless it runs."""
    service = supervisor_service(home)
    if service.pid() is None:
        private_folder(service.folder)
        command = [sys.executable, "-m", "trainwright.infra.supervisor"]
        service.start([*command, str(home.resolve()), str(dags_folder.resolve())], {})


def _main() -> None:
    def tell(line: str) -> None:
        print(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC  {line}", flush=True)  # noqa: T201

    home, dags_folder = map(Path, sys.argv[1:])
    supervisor = Supervisor(home, tell, dags_folder)
    while any(one.known() for one in airflow_services(home)):  # until Airflow is stopped
        supervisor.look()
        time.sleep(LOOK_EVERY_S)


if __name__ == "__main__":
    _main()
