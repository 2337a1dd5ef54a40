"""Runs the commands of the page "An Airflow of your own"; only a connection names the store."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import doors
import pytest
import yaml
from airflow_client import AirflowClient, until
from doc_pages import DOCS, ROOT, example

from trainwright.infra.airflow import USER, airflow_address, airflow_answers, password_file
from trainwright.infra.background_process import BackgroundProcess, stop
from trainwright.infra.ports import free_ports
from trainwright.infra.s3_server import S3Access
from trainwright.tasks.runs.run import list_runs
from trainwright.tasks.store import verify

DAGS = ROOT / "dags"
STORE = "s3://models/trainwright"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def commands(jobs: Path, access: S3Access) -> list[str]:
    """The page's commands, with this test's values in place of the page's."""
    block = example(DOCS / "how-to" / "own-airflow.md", "commands")
    said = [line.removeprefix("$ ") for line in block.splitlines()]
    said = [
        line for line in said if "my_ledger" not in line
    ]  # omitted: the ledger in a file, for one machine
    text = "\n".join(said)
    for theirs, ours in (
        ("/opt/jobs", str(jobs)),
        ("https://s3.example.com", access.endpoint),
        ('"KEY"', f'"{access.access_key}"'),
        ('"SECRET"', f'"{access.secret_key}"'),
    ):
        assert theirs in text
        text = text.replace(theirs, ours)
    return text.splitlines()


@pytest.fixture
def access(_server: S3Access) -> S3Access:
    """An S3 server that the environment does not name."""
    return _server


@pytest.fixture
def airflow(
    tmp_path: Path, jobs: Path, access: S3Access, _made_once: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[AirflowClient]:
    """`airflow standalone`, started by a shell after the page's commands."""
    home = tmp_path / "home"
    (home / "airflow" / "secrets").mkdir(parents=True)
    for name in ("calibrations", "links"):  # reuse this machine's measurements
        (home / name).symlink_to(_made_once / name)
    monkeypatch.setenv("TRAINWRIGHT_HOME", str(home))
    password_file(home).write_text(json.dumps({USER: secrets.token_urlsafe(15)}))
    service = BackgroundProcess("standalone", home / "airflow")
    with free_ports(3, 21_080) as port:
        (home / "airflow" / "secrets" / "port").write_text(str(port))
        environment = {
            "AIRFLOW_HOME": str(home / "airflow"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": f"{USER}:admin",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(password_file(home)),
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(port),
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__API__BASE_URL": airflow_address(home),
            "AIRFLOW__CORE__PARALLELISM": "4",
            "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(port + 1),
            "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(port + 2),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        script = "\n".join(["set -e", *commands(jobs, access), "exec airflow standalone"])
        service.start(["bash", "-c", script], environment)
        try:
            until(
                "Airflow answers", lambda: airflow_answers(home), 240, lambda: service.last_line()
            )
            yield AirflowClient(home)
        finally:
            stop([service], grace_s=20)


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """A folder of job files with model and pool in another folder."""
    folder = tmp_path / "jobs"
    folder.mkdir()
    job = {
        "name": "mine",
        "pool": str(DAGS / "pools" / "two-cpus.yaml"),
        "data": {"uri": "builtin:digits"},
        "model": {"source": str(DAGS / "jobs" / "cnn.py"), "config": {"width": 8}},
        "train": {"epochs": 2, "global_batch_size": 96, "learning_rate": 0.003},
        "objective": {"minimize": "time"},
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(job))
    return folder


def test_a_run_stores_everything_in_the_connections_store_and_its_key_nowhere(
    airflow: AirflowClient, tmp_path: Path, access: S3Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    until("the job has its DAG", lambda: airflow.has_dag("retrain_mine"), 240)
    where = airflow.start("retrain_mine")
    assert airflow.ended(where) == "success", airflow.states(where)
    assert set(airflow.states(where).values()) == {"success"}
    for name, value in (
        ("ENDPOINT", access.endpoint),
        ("ACCESS_KEY", access.access_key),
        ("SECRET_KEY", access.secret_key),
    ):
        monkeypatch.setenv(f"TRAINWRIGHT_S3_{name}", value)
    (run,) = list_runs(STORE, doors.settings(), "mine")
    assert run.uri == airflow.xcom(where, "validate")["run"]
    assert run.uri.startswith(f"{STORE}/runs/mine/")
    assert verify(doors.run_at(run.uri)).files
    assert run.status().state == "success"
    listed = airflow("GET", "/trainwright/runs")
    assert run.id in json.dumps(listed)
    links = airflow.links(where, "store")
    assert "<html" in airflow.page(str(links["Report"]))
    shown = [str(airflow.log(where, task)) for task in airflow.states(where)]
    kept = [path.read_text(errors="replace") for path in (tmp_path / "home").rglob("*.log")]
    kept += [run.objects.get(one.key).decode(errors="replace") for one in run.objects.list()]
    assert not [text for text in (*shown, *kept) if access.secret_key in text]
