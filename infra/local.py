"""The embedded stack: an S3 server (`infra.s3`) and Airflow (`infra.airflow`), on 127.0.0.1, below one home folder.

`run JOB` needs only `start_s3`, and Airflow's settings and database; `up` starts everything.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainwright.infra.airflow import (
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
from trainwright.infra.background import Service
from trainwright.infra.s3 import S3Access, s3_access, s3_answers, s3_service, start_s3, stop_s3

__all__ = [
    "S3Access",
    "airflow_environment",
    "down",
    "ensure_airflow_db",
    "s3_access",
    "start_s3",
    "status",
    "stop_s3",
    "up",
]


def up(home: Path, dags_folder: Path, progress: Callable[[str], None] | None = None) -> None:
    """Start what does not run, and wait until all of it is healthy. `progress` is told what is being done.

    Raises OSError or TimeoutError, saying which part and where its log is.
    """
    say = progress or (lambda _: None)
    say("starting the S3 server")
    start_s3(home)
    say("preparing Airflow's database")
    ensure_airflow_db(home, dags_folder)
    say("starting Airflow")
    start_airflow(home, dags_folder)


def down(home: Path) -> None:
    """Stop all of it; no process is left. Data, passwords and ports stay for the next `up`."""
    stop_airflow(home)
    stop_s3(home)


def status(home: Path) -> list[dict[str, Any]]:
    """What runs: name, state (running, not answering, stopped), pid, address, log and a note on how to log in."""
    found = [_entry("s3", s3_service(home), s3_answers(home), lambda: s3_access(home).endpoint)]
    healthy = airflow_answers(home)
    for service in airflow_services(home):
        serves = service.name == "airflow-api-server"
        entry = _entry(
            service.name, service, healthy, (lambda: airflow_address(home)) if serves else None
        )
        if serves and entry["pid"] is not None:
            entry["note"] = f"log in as {USER}; the password is in {password_file(home)}"
        found.append(entry)
    return found


def _entry(
    name: str, service: Service, answers: bool, address: Callable[[], str] | None
) -> dict[str, Any]:
    pid = service.pid()
    return {
        "name": name,
        "state": "stopped" if pid is None else "running" if answers else "not answering",
        "pid": pid,
        "address": address() if address is not None and pid is not None else None,
        "log": str(service.log),
        "note": None,
    }
