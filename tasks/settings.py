"""The one place where the environment is read.

| variable | default | meaning |
|---|---|---|
| TRAINWRIGHT_HOME | ~/.trainwright | where the embedded stack, the ledger and the calibrations live |
| TRAINWRIGHT_STORE | s3://trainwright | where runs are kept: s3://bucket/prefix or file:///folder |
| TRAINWRIGHT_S3_ENDPOINT | the embedded server | http(s)://host:port of any S3 server |
| TRAINWRIGHT_S3_ACCESS_KEY, TRAINWRIGHT_S3_SECRET_KEY | the embedded server's | its credentials |
| TRAINWRIGHT_S3_REGION | us-east-1 | its region |
| TRAINWRIGHT_SSH_USER, _PORT, _IDENTITY, _KNOWN_HOSTS | as ssh is set up | how to log in to hosts whose pool file does not say |
| TRAINWRIGHT_LEDGER | sqlite under TRAINWRIGHT_HOME | SQLAlchemy URL of the table of leases |
| TRAINWRIGHT_JOBS | the shipped dags/jobs | the folder of job files that become scheduled DAGs |
| TRAINWRIGHT_POOLS | the shipped dags/pools | the folder of pool files that the service knows by name |
| TRAINWRIGHT_SERVICE_TOKEN | a file, see `serve` | the service's token of those who may start runs |
| TRAINWRIGHT_SERVICE_READ_TOKEN | a file | and of those who may not |
| TRAINWRIGHT_EXTRACT_TIMEOUT_S | 120 | seconds that tracing a model may take |
| TRAINWRIGHT_EXTRACT_MEMORY_GIB | 12 | and address space of its process, GiB |
| TRAINWRIGHT_HOLDER, TRAINWRIGHT_HOLDER_PID | none | in whose name leases are taken, and the process they end with |
| TRAINWRIGHT_PROGRESS | none | a file to which steps append progress, one JSON object a line |
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trainwright.estimator.errors import BadInput

EXTRACT_TIMEOUT_S = 120.0
EXTRACT_MEMORY_GIB = 12.0  # torch alone maps some
SERVICE_SECRETS: dict[Literal["read", "run"], str] = {
    "run": "TRAINWRIGHT_SERVICE_TOKEN",
    "read": "TRAINWRIGHT_SERVICE_READ_TOKEN",
}
_over: ContextVar[Mapping[str, str]] = ContextVar("over", default={})  # noqa: B039  # never changed in place


@contextlib.contextmanager
def overridden(values: Mapping[str, str]) -> Iterator[None]:
    """Within the block, and its context alone, these variables stand before the environment's."""
    token = _over.set({**_over.get(), **values})
    try:
        yield
    finally:
        _over.reset(token)


def environment() -> dict[str, str]:
    """The environment as this context sees it, for a process that works in its place."""
    return {**os.environ, **_over.get()}


def _variable(name: str) -> str:
    over = _over.get()
    return over[name] if name in over else os.environ.get(name, "")


@dataclass(frozen=True)
class Settings:
    """Where things are. Secrets are kept out of `repr`, so that no log shows them."""

    home: Path
    store: str
    s3_endpoint: str | None
    s3_region: str
    ledger_url: str = field(repr=False)  # it may hold a password
    jobs: Path
    pools: Path
    progress: Path | None
    holder: str | None
    holder_pid: int | None

    def s3_credentials(self) -> tuple[str, str] | None:
        """Access and secret key from the environment; None where the embedded server's own are to be used."""
        access, secret = (
            _variable("TRAINWRIGHT_S3_ACCESS_KEY"),
            _variable("TRAINWRIGHT_S3_SECRET_KEY"),
        )
        return (access, secret) if access and secret else None

    def ssh_login(self) -> dict[str, str | int]:
        """How to log in to hosts: the fields of a pool file's `ssh` that are set."""
        given = {
            name: _variable(f"TRAINWRIGHT_SSH_{name.upper()}")
            for name in ("user", "port", "identity", "known_hosts")
        }
        return {
            name: int(text) if name == "port" and text.isdecimal() else text
            for name, text in given.items()
            if text
        }

    def extract_limits(self) -> tuple[float, int]:
        """Seconds and bytes of address space that tracing a model may take. Raises BadInput."""
        timeout_s = _positive("TRAINWRIGHT_EXTRACT_TIMEOUT_S", EXTRACT_TIMEOUT_S, 86_400)
        return timeout_s, int(
            2**30 * _positive("TRAINWRIGHT_EXTRACT_MEMORY_GIB", EXTRACT_MEMORY_GIB, 2**20)
        )

    def service_tokens(self) -> dict[Literal["read", "run"], str]:
        """The service's tokens that the environment names, by role."""
        found: dict[Literal["read", "run"], str] = {}
        for role, name in SERVICE_SECRETS.items():
            if token := _variable(name):
                found[role] = token
        return found


def settings() -> Settings:
    """The settings as the environment has them now."""
    home = (
        Path(_variable("TRAINWRIGHT_HOME") or Path.home() / ".trainwright").expanduser().absolute()
    )
    progress = _variable("TRAINWRIGHT_PROGRESS")
    pid = _variable("TRAINWRIGHT_HOLDER_PID")
    return Settings(
        home=home,
        store=_variable("TRAINWRIGHT_STORE") or "s3://trainwright",
        s3_endpoint=_variable("TRAINWRIGHT_S3_ENDPOINT") or None,
        s3_region=_variable("TRAINWRIGHT_S3_REGION") or "us-east-1",
        ledger_url=_variable("TRAINWRIGHT_LEDGER") or f"sqlite:///{home / 'ledger.sqlite'}",
        jobs=Path(_variable("TRAINWRIGHT_JOBS") or _shipped("jobs")),
        pools=Path(_variable("TRAINWRIGHT_POOLS") or _shipped("pools")),
        progress=Path(progress) if progress else None,
        holder=_variable("TRAINWRIGHT_HOLDER") or None,
        holder_pid=int(pid) if pid.isdigit() else None,
    )


def dags_folder() -> Path:
    """The folder of the installed package `trainwright.dags`. Raises BadInput if it is not installed."""
    spec = importlib.util.find_spec("trainwright.dags")
    if spec is None or spec.origin is None:
        raise BadInput("trainwright.dags: not installed; install trainwright with its DAGs")
    return Path(spec.origin).parent


def _shipped(folder: str) -> Path:
    return dags_folder() / folder


def _positive(name: str, default: float, most: float) -> float:
    text = _variable(name)
    try:
        value = float(text) if text else default
    except ValueError:
        value = 0.0
    if not 0 < value <= most:
        raise BadInput(f"{name}: got {text!r}; allowed: a number above 0, at most {most:g}")
    return value
