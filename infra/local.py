"""The embedded stack on 127.0.0.1, in one home folder: the S3 server (`s3_server`) and Airflow.

`run JOB` needs only `start_s3` and Airflow's settings and database; `up` starts everything.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainwright.infra.airflow import (
    FIRST_PORT,
    USER,
    airflow_address,
    airflow_answers,
    airflow_environment,
    airflow_services,
    ensure_airflow_db,
    password_file,
    start_airflow,
    stop_airflow,
)
from trainwright.infra.background_process import BackgroundProcess, stop
from trainwright.infra.s3_server import (
    S3Access,
    s3_access,
    s3_answers,
    s3_service,
    start_s3,
    stop_s3,
)
from trainwright.infra.supervisor import (
    Supervisor,
    start_supervisor,
    supervised,
    supervisor_service,
)

__all__ = [
    "S3Access",
    "Supervisor",
    "airflow_environment",
    "down",
    "ensure_airflow_db",
    "s3_access",
    "start_s3",
    "status",
    "stop_s3",
    "supervised",
    "up",
]


def up(home: Path, dags_folder: Path, progress: Callable[[str], None] | None = None) -> None:
    """Start all parts that do not run, and wait until they are healthy. `progress` gets each name.

    From then on a supervisor restarts parts that end, until `down`.

    Raises OSError or TimeoutError with the part that failed and the path of its log.
    """
    say = progress or (lambda _: None)
    say("starting the S3 server")
    start_s3(home)
    say("preparing Airflow's database")
    ensure_airflow_db(home, dags_folder)
    say("starting Airflow")
    start_airflow(home, dags_folder)
    start_supervisor(home, dags_folder)


def down(home: Path) -> None:
    """Stop all parts. Data, passwords and ports stay for the next `up`."""
    stop([supervisor_service(home)], grace_s=0)
    stop_airflow(home)
    stop_s3(home)


def status(home: Path) -> list[dict[str, Any]]:
    """Each part's name, state, pid, address and log; of the API server how to log in, and the page.

    The state is `running`, `not answering` or `stopped`.
    """
    found = [_entry("s3", s3_service(home), s3_answers(home), lambda: s3_access(home).endpoint)]
    healthy = airflow_answers(home)
    for service in airflow_services(home):
        serves = service.name == "airflow-api-server"
        entry = _entry(
            service.name, service, healthy, (lambda: airflow_address(home)) if serves else None
        )
        if serves and entry["pid"] is not None:
            entry["note"] = f"log in as {USER}; the password is in {password_file(home)}"
            if (port := int(entry["address"].rpartition(":")[2])) != FIRST_PORT:
                entry["note"] += f"; at port {port}, because another program had {FIRST_PORT}"
            entry["page"] = f"{entry['address']}/trainwright/page/"
        found.append(entry)
    supervisor = supervisor_service(home)
    found.append(_entry(supervisor.name, supervisor, True, None))
    if supervisor.pid() is not None and supervisor.log.stat().st_size:
        found[-1]["note"] = supervisor.last_line()
    return found


def _entry(
    name: str, process: BackgroundProcess, answers: bool, address: Callable[[], str] | None
) -> dict[str, Any]:
    pid = process.pid()
    return {
        "name": name,
        "state": "stopped" if pid is None else "running" if answers else "not answering",
        "pid": pid,
        "address": address() if address is not None and pid is not None else None,
        "log": str(process.log),
        "note": None,
    }
