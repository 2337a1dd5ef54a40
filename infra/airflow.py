"""Airflow on SQLite, reachable only from 127.0.0.1: its settings, database and four processes.

They are the four processes of `airflow standalone`, started one by one, because standalone's log
servers listen on every interface, and its processes outlive it. The API server reads logs from
this machine's disk, so no log server is necessary.
"""

from __future__ import annotations

import base64
import http.client
import importlib.metadata
import json
import os
import secrets
import subprocess
import sys
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from trainwright.infra.background_process import BackgroundProcess, stop, wait_until
from trainwright.infra.lock import locked
from trainwright.infra.ports import free_ports
from trainwright.infra.private_files import private_folder, write_private

USER = "admin"
FIRST_PORT = 8080
_COMPONENTS = {
    "api-server": ["api-server"],
    "scheduler": ["scheduler", "--skip-serve-logs"],
    "dag-processor": ["dag-processor"],
    "triggerer": ["triggerer", "--skip-serve-logs"],
}
_AUTH_MANAGER = "airflow.api_fastapi.auth.managers.simple.simple_auth_manager.SimpleAuthManager"
_HEALTHY = ("metadatabase", "scheduler", "triggerer", "dag_processor")


def airflow_services(home: Path) -> list[BackgroundProcess]:
    """Airflow's processes."""
    return [BackgroundProcess(f"airflow-{name}", home / "airflow") for name in _COMPONENTS]


def training_service(home: Path) -> BackgroundProcess:
    """The owner of processes that outlive their task, and a restart of the scheduler.

    They end when Airflow is stopped.
    """
    return BackgroundProcess("airflow-training", home / "airflow")


def password_file(home: Path) -> Path:
    """The file with the password of `USER` (JSON, mode 0600)."""
    return home / "airflow" / "passwords.json"


def airflow_address(home: Path) -> str:
    """The URL of the UI and the REST API. Raises FileNotFoundError before the first set-up."""
    return f"http://127.0.0.1:{int(_secrets_file(home, 'port').read_text())}"


def airflow_environment(home: Path, dags_folder: Path) -> dict[str, str]:
    """The environment of this home's Airflow processes. The first call creates its secrets."""
    folder = home / "airflow"
    if not _secrets_file(home, "port").exists():
        with _locked(home):
            _set_up(home)
    address = airflow_address(home)
    settings = {
        "core": {
            "dags_folder": str(dags_folder),
            "load_examples": "False",
            "executor": "LocalExecutor",
            "parallelism": "4",
            "auth_manager": _AUTH_MANAGER,
            "simple_auth_manager_users": f"{USER}:admin",
            "simple_auth_manager_all_admins": "False",
            "simple_auth_manager_passwords_file": str(password_file(home)),
            "fernet_key": _secrets_file(home, "fernet-key").read_text(),
            "execution_api_server_url": f"{address}/execution/",
        },
        "database": {"sql_alchemy_conn": f"sqlite:///{folder / 'airflow.db'}"},
        "api": {
            "host": "127.0.0.1",
            "port": address.rpartition(":")[2],
            "base_url": address,
            "workers": "1",
            "secret_key": _secrets_file(home, "api-key").read_text(),
        },
        "api_auth": {"jwt_secret": _secrets_file(home, "jwt-secret").read_text()},
        "logging": {"base_log_folder": str(folder / "logs")},
        "scheduler": {"enable_health_check": "False"},
        # Answers are slow while this machine's devices train.
        "workers": {"execution_api_timeout": "60"},
    }
    environment = {
        f"AIRFLOW__{section.upper()}__{name.upper()}": value
        for section, values in settings.items()
        for name, value in values.items()
    }
    return environment | {"AIRFLOW_HOME": str(folder), "TRAINWRIGHT_HOME": str(home)}


def ensure_airflow_db(home: Path, dags_folder: Path) -> None:
    """Migrate the database to the installed version's schema, once for each version.

    Raises OSError if that fails.
    """
    folder = home / "airflow"
    environment = airflow_environment(home, dags_folder)
    version, done = importlib.metadata.version("apache-airflow"), folder / "migrated"

    def up_to_date() -> bool:
        return done.exists() and done.read_text() == version and (folder / "airflow.db").exists()

    if up_to_date():
        return
    with _locked(home):
        if up_to_date():  # the previous holder of the lock has done it
            return
        log_path = folder / "migrate.log"
        with log_path.open("wb") as log:
            command = [sys.executable, "-m", "airflow", "db", "migrate"]
            ended = subprocess.run(
                command,
                env=os.environ | environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if ended.returncode != 0:
            raise OSError(f"airflow db migrate exited with {ended.returncode} (log: {log_path})")
        write_private(done, version)


def start_airflow(home: Path, dags_folder: Path) -> None:
    """Start the processes that do not run, and wait until all are healthy.

    Raises OSError, TimeoutError.
    """
    ensure_airflow_db(home, dags_folder)
    services = airflow_services(home)
    with _locked(home):
        if all(service.pid() for service in services) and airflow_answers(home):
            return
        with ExitStack() as kept:
            # The port is the API server's. The other processes read it at their start.
            if services[0].pid() is None:
                stop(services, grace_s=20)
                port = _secrets_file(home, "port")
                write_private(port, str(kept.enter_context(free_ports(1, int(port.read_text())))))
            environment = airflow_environment(home, dags_folder)
            for service, arguments in zip(services, _COMPONENTS.values(), strict=True):
                if service.pid() is None:
                    stop([service], grace_s=20)  # an earlier one may have left children
                    service.start([sys.executable, "-m", "airflow", *arguments], environment)
            wait_until(lambda: airflow_answers(home), services, timeout_s=240)


def restart_service(home: Path, dags_folder: Path, service: BackgroundProcess) -> bool:
    """Start one of the processes again, at the same address, if it has ended by itself.

    Its children are ended. Returns whether it had ended.
    """
    with _locked(home):
        ended = service.ended()
        if ended:
            stop([service], grace_s=20)
            environment = airflow_environment(home, dags_folder)
            arguments = _COMPONENTS[service.name.removeprefix("airflow-")]
            service.start([sys.executable, "-m", "airflow", *arguments], environment)
        return ended


def stop_airflow(home: Path) -> None:
    """Stop all its processes and running tasks. Its database and logs stay."""
    if (home / "airflow").exists():
        with _locked(home):
            services = [*airflow_services(home), training_service(home)]
            stop(services, grace_s=20)
            for service in services:
                service.forget()


def airflow_answers(home: Path) -> bool:
    """Whether every process reports that it is healthy."""
    try:
        host = airflow_address(home).removeprefix("http://")
    except FileNotFoundError:
        return False
    connection = http.client.HTTPConnection(host, timeout=5)
    try:
        connection.request("GET", "/api/v2/monitor/health")
        response = connection.getresponse()
        if response.status != 200:
            return False
        health = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()
    return all((health.get(part) or {}).get("status") == "healthy" for part in _HEALTHY)


def _locked(home: Path) -> AbstractContextManager[int]:
    return locked(private_folder(home / "airflow") / "lock", wait=True)


def _secrets_file(home: Path, name: str) -> Path:
    return home / "airflow" / "secrets" / name


def _set_up(home: Path) -> None:
    """Generate passwords and keys once. Writes the port last, when the rest is complete."""
    if _secrets_file(home, "port").exists():
        return
    private_folder(home / "airflow" / "secrets")
    write_private(password_file(home), json.dumps({USER: secrets.token_urlsafe(15)}) + "\n")
    write_private(_secrets_file(home, "jwt-secret"), secrets.token_urlsafe(64))
    write_private(_secrets_file(home, "api-key"), secrets.token_urlsafe(32))
    write_private(
        _secrets_file(home, "fernet-key"),
        base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
    )
    with free_ports(1, FIRST_PORT) as port:
        write_private(_secrets_file(home, "port"), str(port))
