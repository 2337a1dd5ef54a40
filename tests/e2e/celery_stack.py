"""A production-like Airflow: PostgreSQL, Redis, the four parts of Airflow, and a Celery worker.

Each part is a background process that can be killed and restarted. Airflow's settings are those of
the embedded one (`infra.airflow`), except for its database, its executor, and the timeouts for lost
parts. PostgreSQL also holds the ledger of leases.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from trainwright.infra.airflow import airflow_answers, airflow_environment, training_service
from trainwright.infra.background_process import BackgroundProcess, stop, wait_until
from trainwright.infra.ports import free_ports
from trainwright.infra.private_files import write_private

AIRFLOW = {
    "api-server": ["api-server"],
    "scheduler": ["scheduler", "--skip-serve-logs"],
    "dag-processor": ["dag-processor"],
    "triggerer": ["triggerer", "--skip-serve-logs"],
    "worker": [
        "celery",
        "worker",
        "--concurrency",
        "2",
        "--skip-serve-logs",
        "--without-gossip",
        "--without-mingle",
    ],
}
# Notice a lost part within half a minute instead of five, and retry at once.
_NOTICING = {
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20",
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
    "SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "10",
    "SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "15",
    "TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "15",
    "CORE__DEFAULT_TASK_RETRY_DELAY": "1",
}


class CeleryStack:
    """The parts, by name: `postgresql`, `redis` and those of `AIRFLOW`."""

    def __init__(self, home: Path, dags: Path, folder: Path, more: Mapping[str, str]) -> None:
        """`home` is trainwright's, `folder` for logs and sockets, `more` adds variables."""
        self.home, self.folder = home, folder
        self._sockets = folder / "postgresql"
        self._redis_port, self._redis_password = _any_port(), secrets.token_urlsafe(16)
        airflow_environment(home, dags)
        # Not the usual port, because the worker binds this one only after a minute.
        write_private(home / "airflow" / "secrets" / "port", str(_any_port()))
        self.ledger_url = self._database("ledger")
        self.environment = (
            airflow_environment(home, dags)
            | {"TRAINWRIGHT_LEDGER": self.ledger_url}
            | {f"AIRFLOW__{name}": value for name, value in (self._settings() | _NOTICING).items()}
            | {"C_FORCE_ROOT": "1"}  # Celery requires this if it runs as root
            | dict(more)
        )
        self._services = {
            name: BackgroundProcess(name, self._part_folder(name))
            for name in ("postgresql", "redis", *AIRFLOW)
        }

    def _part_folder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return folder

    def _database(self, name: str) -> str:
        return f"postgresql+psycopg://trainwright@/{name}?host={self._sockets}"

    def _settings(self) -> dict[str, str]:
        return {
            "CORE__EXECUTOR": "CeleryExecutor",
            "DATABASE__SQL_ALCHEMY_CONN": self._database("airflow"),
            "DATABASE__SQL_ALCHEMY_CONN_ASYNC": self._database(
                "airflow"
            ),  # without it, another driver (asyncpg) is necessary
            "CELERY__BROKER_URL": f"redis://:{self._redis_password}@127.0.0.1:{self._redis_port}/0",
            "CELERY__RESULT_BACKEND": f"db+{self._database('airflow')}",
            "CELERY__WORKER_PREFETCH_MULTIPLIER": "1",
        }

    def log(self, name: str) -> Path:
        """The output of a part."""
        return self._services[name].log

    def running(self, name: str) -> bool:
        """Whether the part's main process runs."""
        return self._services[name].pid() is not None

    def start(self, *names: str) -> None:
        """Start parts that do not run, and wait until they answer. Raises OSError, TimeoutError."""
        for name in names:
            if not self.running(name):
                self._services[name].start(self._command(name), self.environment)
        waited = [self._services[name] for name in names]
        wait_until(lambda: all(self._ready(name) for name in names), waited, timeout_s=240)

    def kill(self, name: str) -> None:
        """Kill -9 a part and the processes of its session. Processes in other sessions stay."""
        pid = self._services[name].pid()
        assert pid is not None, f"{name} does not run"
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getsid(process.pid) == pid:
                    process.kill()
        psutil.wait_procs([family[0]], timeout=10)

    def stop(self, *names: str) -> None:
        """Stop parts and their children, with SIGKILL after 20 s."""
        stop([self._services[name] for name in names], grace_s=20)

    def restart(self, name: str) -> None:
        """Stop and start a part."""
        self.stop(name)
        self.start(name)

    def up(self) -> None:
        """Start everything, on an empty database."""
        postgresql, data = self._services["postgresql"].folder, self._sockets / "data"
        if os.geteuid() == 0:
            shutil.chown(postgresql, "postgres", "postgres")
        initdb = [
            *_as_postgres(),
            str(_programs() / "initdb"),
            "-D",
            str(data),
            "-A",
            "trust",
            "-U",
            "trainwright",
            "-N",
        ]
        subprocess.run(initdb, check=True, capture_output=True, cwd="/")
        self.start("postgresql", "redis")
        self._query("postgres", "CREATE DATABASE airflow")
        self._query("postgres", "CREATE DATABASE ledger")
        with (self.folder / "migrate.log").open("wb") as log:
            subprocess.run(
                [sys.executable, "-m", "airflow", "db", "migrate"],
                env=os.environ | self.environment,
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
            )
        self.start(*AIRFLOW)

    def _query(self, database: str, text: str) -> None:
        import psycopg

        url = self._database(database).replace("+psycopg", "")
        with psycopg.connect(url, autocommit=True, connect_timeout=2) as connection:
            connection.execute(text)  # type: ignore[call-overload]

    def _command(self, name: str) -> list[str]:
        if name == "postgresql":
            options = ["listen_addresses=", "max_connections=200", "fsync=off"]
            settings = [word for option in options for word in ("-c", option)]
            return [
                *_as_postgres(),
                str(_programs() / "postgres"),
                "-D",
                str(self._sockets / "data"),
                "-k",
                str(self._sockets),
                *settings,
            ]
        if name == "redis":
            where = [
                "--bind",
                "127.0.0.1",
                "--port",
                str(self._redis_port),
                "--dir",
                str(self._part_folder(name)),
            ]
            return [
                "redis-server",
                *where,
                "--requirepass",
                self._redis_password,
                "--appendonly",
                "yes",
            ]
        return [sys.executable, "-m", "airflow", *AIRFLOW[name]]

    def _ready(self, name: str) -> bool:
        if name == "postgresql":
            import psycopg

            try:
                self._query("postgres", "SELECT 1")
            except psycopg.OperationalError:
                return False
            return True
        broker = self.environment["AIRFLOW__CELERY__BROKER_URL"]
        if name == "redis":
            import redis

            try:
                return bool(redis.Redis.from_url(broker).ping())
            except redis.RedisError:
                return False
        if name == "worker":
            from celery import Celery

            with Celery(broker=broker) as app:
                return bool(app.control.ping(timeout=1))
        return airflow_answers(self.home)


@contextlib.contextmanager
def celery_stack(home: Path, dags: Path, **environment: str) -> Iterator[CeleryStack]:
    """A stack that runs until the block ends. If it does not start, its logs are printed."""
    with tempfile.TemporaryDirectory(
        prefix="trainwright-celery-", ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL's own user goes through it
        stack = CeleryStack(home, dags, folder, environment)
        try:
            stack.up()
            yield stack
        except BaseException:
            for log in sorted(folder.rglob("*.log")):
                print(f"== {log.name}", log.read_text(errors="replace")[-4000:], sep="\n")  # noqa: T201 pytest shows it
            raise
        finally:
            stop([*stack._services.values(), training_service(home)], grace_s=5)


def _any_port() -> int:
    """A random free port, so that concurrent callers rarely get the same one."""
    with free_ports(1, random.randrange(10_000, 32_000)) as port:
        return port


def _programs() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not found:
        raise FileNotFoundError("PostgreSQL is not installed (make setup-system installs it)")
    return found[-1]


def _as_postgres() -> list[str]:
    """The prefix that runs PostgreSQL as its own user, because it refuses root."""
    return (
        ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        if os.geteuid() == 0
        else []
    )
