"""A complete Airflow loses its scheduler, workers and triggerer during a training."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import doors
import psutil
import pytest
from airflow_client import AirflowClient, until
from airflow_whole import only_retrain, run_of, whole_airflow, write_job

from trainwright.infra.airflow import airflow_services, start_airflow
from trainwright.tasks.runs.run import Run
from trainwright.tasks.train.checkpoint import files
from trainwright.tasks.train.launcher import background

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture
def airflow(stack: Path) -> Iterator[AirflowClient]:
    with whole_airflow(stack) as api:
        yield api


def kill(home: Path, *names: str) -> None:
    """Kill these parts of Airflow and all their children."""
    for service in airflow_services(home):
        if service.name in names:
            for process in service.processes():
                os.kill(process.pid, signal.SIGKILL)


def ranks(run: Run) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            if (
                "trainwright.tasks.train.worker.entry" in line
                and run.id in line
                and process.status() != "zombie"
            ):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def newest(run: Run) -> int:
    states = files.list_states(run.objects)
    return states[-1].step if states else 0


def log_of(airflow: AirflowClient, where: str, task: str) -> str:
    return str(airflow("GET", f"{where}/taskInstances/{task}/logs/1?full_content=true"))


def test_training_continues_without_airflow_and_a_task_marked_failed_stops_it(
    airflow: AirflowClient, stack: Path, tmp_path: Path
) -> None:
    where = airflow.start(job=str(write_job(tmp_path, "lasting", 5000)))
    until(
        "it trains",
        lambda: (found := run_of("lasting")) and newest(found),
        1000,
        lambda: str(airflow.states(where)),
    )
    run: Any = run_of("lasting")
    airflow.reached(where, "train", "deferred")
    launcher, processes = background.launcher(run), ranks(run)
    until(
        "the ranks' log is in the task's, live",
        lambda: "train step=" in log_of(airflow, where, "train"),
        60,
    )

    kill(stack, "airflow-scheduler", "airflow-triggerer")
    reached = newest(run)
    until("training goes on", lambda: newest(run) > reached)
    start_airflow(stack, only_retrain(stack))
    assert airflow.state(where, "train") == "deferred"
    assert background.launcher(run) == launcher
    assert set(processes) <= set(
        ranks(run)
    )  # a rank may have started a separate process that writes its checkpoints
    # Airflow moves a lost triggerer's triggers when its last heartbeat is half a minute old.
    relayed = (run.work_folder() / "relayed.json").stat().st_mtime_ns
    until(
        "it is followed again",
        lambda: (run.work_folder() / "relayed.json").stat().st_mtime_ns > relayed,
    )

    airflow("PATCH", f"{where}/taskInstances/train", {"new_state": "failed"})
    until("no rank is left", lambda: not ranks(run), 60)
    until("the DAG run is over", lambda: airflow("GET", where)["state"] == "failed", 120)
    assert background.launcher(run) is None
    assert [one for one in doors.ledger().held() if one.run == run.uri] == []
    assert run.status().state == "interrupted"
