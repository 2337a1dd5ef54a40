"""The embedded Airflow: its settings and secrets, the loopback address, clean shutdown."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainwright.infra import local
from trainwright.infra.airflow import airflow_services, password_file
from trainwright.operators.links import SERVICE

DAGS = Path(__file__).parents[2] / "dags"


def test_settings_contain_the_dags_folder_the_loopback_address_and_stable_secrets(
    tmp_path: Path,
) -> None:
    first = local.airflow_environment(tmp_path, DAGS)
    assert first["AIRFLOW_HOME"] == str(tmp_path / "airflow")
    assert first["AIRFLOW__CORE__DAGS_FOLDER"] == str(DAGS)
    assert first["AIRFLOW__API__HOST"] == "127.0.0.1"
    assert first["AIRFLOW__CORE__LOAD_EXAMPLES"] == "False"
    assert len(first["AIRFLOW__API_AUTH__JWT_SECRET"]) >= 64
    assert local.airflow_environment(tmp_path, DAGS) == first
    other = local.airflow_environment(tmp_path / "other", DAGS)
    for secret in ("API_AUTH__JWT_SECRET", "API__SECRET_KEY", "CORE__FERNET_KEY"):
        assert first[f"AIRFLOW__{secret}"] != other[f"AIRFLOW__{secret}"]


def test_secrets_are_in_private_files(tmp_path: Path) -> None:
    local.airflow_environment(tmp_path, DAGS)
    assert (tmp_path / "airflow").stat().st_mode & 0o777 == 0o700
    assert password_file(tmp_path).stat().st_mode & 0o777 == 0o600
    assert len(json.loads(password_file(tmp_path).read_text())["admin"]) >= 16
    for path in (tmp_path / "airflow" / "secrets").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600


def test_the_database_is_migrated_once_per_version(tmp_path: Path) -> None:
    local.ensure_airflow_db(tmp_path, DAGS)
    database = tmp_path / "airflow" / "airflow.db"
    with sqlite3.connect(database) as connection:
        assert connection.execute(
            "select count(*) from sqlite_master where name = 'dag_run'"
        ).fetchone() == (1,)
    made = database.stat().st_mtime_ns
    (tmp_path / "airflow" / "migrate.log").unlink()
    local.ensure_airflow_db(tmp_path, DAGS)
    assert database.stat().st_mtime_ns == made
    assert not (tmp_path / "airflow" / "migrate.log").exists()


def test_a_failed_migration_is_an_error_that_names_its_log(tmp_path: Path) -> None:
    local.airflow_environment(tmp_path, DAGS)
    (tmp_path / "airflow" / "airflow.db").mkdir()
    with pytest.raises(OSError, match=r"airflow db migrate exited with 1 \(log: .*migrate\.log\)"):
        local.ensure_airflow_db(tmp_path, DAGS)


def test_an_empty_home_has_nothing_running_and_nothing_to_stop(tmp_path: Path) -> None:
    assert {entry["state"] for entry in local.status(tmp_path)} == {"stopped"}
    local.down(tmp_path)
    assert list(tmp_path.iterdir()) == []


def asked(
    address: str, method: str, path: str, token: str | None = None, body: Any = None
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
    headers = {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {token}"} if token else {}
    )
    connection.request(
        method, path, body=json.dumps(body) if body is not None else None, headers=headers
    )
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, json.loads(content) if content.startswith((b"{", b"[")) else None


def listening_elsewhere(pids: list[int]) -> list[str]:
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(link.readlink().as_posix())
            except FileNotFoundError:  # just closed
                continue
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [
        one[1]
        for one in lines
        if one[3] == "0A" and f"socket:[{one[9]}]" in inodes and not one[1].startswith("0100007F:")
    ]


@pytest.mark.slow
def test_up_serves_a_login_on_the_loopback_address_is_fast_when_repeated_and_down_leaves_no_process(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    taken = socket.socket()
    with contextlib.suppress(OSError):  # another program has it, perhaps not for long
        taken.bind(("127.0.0.1", 8080))
    try:
        local.up(tmp_path, DAGS, said.append)
        assert len(said) == 3
        before = local.status(tmp_path)
        assert {entry["state"] for entry in before} == {"running"}
        local.up(tmp_path, DAGS)
        assert local.status(tmp_path) == before
        services = airflow_services(tmp_path)
        family = [process for service in services for process in service.processes()]
        assert listening_elsewhere([process.pid for process in family]) == []

        server = next(entry for entry in before if entry["name"] == "airflow-api-server")
        address = server["address"]
        told = server["note"].endswith("because another program had 8080")
        assert told == (not address.endswith(":8080"))
        assert server["page"] == f"{address}{SERVICE}/page/"
        login = {
            "username": "admin",
            "password": json.loads(password_file(tmp_path).read_text())["admin"],
        }
        assert asked(address, "GET", "/api/v2/dags")[0] == 401
        assert asked(address, "POST", "/auth/token", body=login | {"password": "guess"})[0] == 401
        token = asked(address, "POST", "/auth/token", body=login)[1]["access_token"]
        assert asked(address, "GET", "/api/v2/dags", token)[0] == 200
        assert login["password"] not in json.dumps(before)

        killed = services[1].pid()  # the scheduler
        subprocess.run(["kill", "-KILL", str(killed)], check=True)
        while services[1].pid() in (None, killed):  # the supervisor starts it again
            time.sleep(0.2)
        local.up(tmp_path, DAGS)
        after = {entry["name"]: entry for entry in local.status(tmp_path)}
        assert {entry["state"] for entry in after.values()} == {"running"}
        assert "airflow-scheduler ended" in after["supervisor"]["note"]
        family += [process for service in services for process in service.processes()]
    finally:
        taken.close()
        local.down(tmp_path)
    assert {entry["state"] for entry in local.status(tmp_path)} == {"stopped"}
    assert [one for one in family if one.is_running() and one.status() != "zombie"] == []


def test_importing_the_stack_loads_neither_airflow_nor_anything_heavy() -> None:
    heavy = {"airflow", "minio", "numpy", "torch"}
    code = f"import sys, trainwright.infra.local; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ.copy(),
    )
    assert done.stdout.strip() == "[]"
