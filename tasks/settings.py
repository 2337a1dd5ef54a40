"""The settings: a value that is passed to the code that needs one of them.

Only entry points read the environment: the command line, an operator, the service, or the main
function of a process that trainwright starts. They create the value with
`Settings.from_environment` and pass it on. A child process gets `Settings.environment()`.

| variable | default | meaning |
|---|---|---|
| TRAINWRIGHT_HOME | ~/.trainwright | embedded stack, ledger, calibrations, prepared data |
| TRAINWRIGHT_STORE | s3://trainwright | the store of runs: s3://bucket/prefix or file:///folder |
| TRAINWRIGHT_S3_ENDPOINT | the embedded server | http(s)://host:port of any S3 server |
| TRAINWRIGHT_S3_ACCESS_KEY, TRAINWRIGHT_S3_SECRET_KEY | the embedded server's | its credentials |
| TRAINWRIGHT_S3_REGION | us-east-1 | its region |
| TRAINWRIGHT_SSH_USER, _PORT, _IDENTITY, _KNOWN_HOSTS | as in ssh_config | login to hosts |
| TRAINWRIGHT_SLURM_ACCOUNT, _PARTITION, _QOS, _RESERVATION | Slurm's | options of jobs in Slurm |
| TRAINWRIGHT_SLURM_CONFIG | Slurm's | path of the cluster's slurm.conf |
| TRAINWRIGHT_KUBERNETES_API, _TOKEN, _CA, _NAMESPACE | the pod's | API server and login |
| TRAINWRIGHT_LEDGER | SQLite under TRAINWRIGHT_HOME | SQLAlchemy URL of the ledger of leases |
| TRAINWRIGHT_JOBS | the shipped dags/jobs | the folder of job files that become DAGs |
| TRAINWRIGHT_POOLS | the shipped dags/pools | the folder of the service's named pool files |
| TRAINWRIGHT_SERVICE_TOKEN | a file, see `serve` | the service's token to start runs |
| TRAINWRIGHT_SERVICE_READ_TOKEN | a file | the service's token to read |
| TRAINWRIGHT_VALIDATE_TIMEOUT_S | 3600 | seconds that checking data may take |
| TRAINWRIGHT_EXTRACT_TIMEOUT_S | 120 | seconds that tracing a model may take |
| TRAINWRIGHT_EXTRACT_MEMORY_GIB | 12 | address space of the tracing process, GiB |
| TRAINWRIGHT_PREDICT_TIMEOUT_S | 600 | seconds that a stored model may take for 65,536 rows |
| TRAINWRIGHT_PREDICT_MEMORY_GIB | 12 | address space of the predicting process, GiB |
| TRAINWRIGHT_EXPORT_TIMEOUT_S | 1800 | seconds that exporting a model may take |
| TRAINWRIGHT_EXPORT_MEMORY_GIB | 12 | address space of the exporting process, GiB |
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trainwright.estimator.errors import BadInput
from trainwright.infra.sandbox import SandboxLimits

VALIDATE_TIMEOUT_S = 3600.0
EXTRACT_TIMEOUT_S = 120.0
EXTRACT_MEMORY_GIB = 12.0
"""high, because torch alone maps several GiB of address space"""
PREDICT_TIMEOUT_S = 600.0
EXPORT_TIMEOUT_S = 1800.0
SERVICE_SECRETS: dict[Literal["read", "run"], str] = {
    "run": "TRAINWRIGHT_SERVICE_TOKEN",
    "read": "TRAINWRIGHT_SERVICE_READ_TOKEN",
}
_PREFIX = "TRAINWRIGHT_"


@dataclass(frozen=True)
class Settings:
    """The variables that are set. Each property is one variable's value, or its default.

    `repr` omits the values, so that logs show no secret.
    """

    variables: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """The settings in an environment; by default this process's."""
        found = os.environ if environment is None else environment
        return cls({name: value for name, value in found.items() if name.startswith(_PREFIX)})

    def replaced(self, variables: Mapping[str, str]) -> Settings:
        """These settings with some variables replaced; an empty value unsets one."""
        return Settings({**self.variables, **variables})

    def environment(self) -> dict[str, str]:
        """The environment of a child process with these settings."""
        others = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIX)}
        return others | {name: value for name, value in self.variables.items() if value}

    def _get(self, name: str) -> str:
        return self.variables.get(_PREFIX + name, "")

    @property
    def home(self) -> Path:
        """The folder of the embedded stack, the ledger and the calibrations. Raises BadInput."""
        given = self._get("HOME")
        folder = Path(given or Path.home() / ".trainwright").expanduser().absolute()
        parts = (folder, *folder.parents)
        if any(os.path.exists(one) and not os.path.isdir(one) for one in parts):
            raise BadInput(f"{_PREFIX}HOME: got {given!r}; allowed: a folder, not a file")
        return folder

    @property
    def store(self) -> str:
        """The URI of the store."""
        return self._get("STORE") or "s3://trainwright"

    @property
    def s3_endpoint(self) -> str | None:
        """The S3 server; None: the embedded one."""
        return self._get("S3_ENDPOINT") or None

    @property
    def s3_region(self) -> str:
        """The S3 server's region."""
        return self._get("S3_REGION") or "us-east-1"

    @property
    def ledger_url(self) -> str:
        """The SQLAlchemy URL of the ledger. It may contain a password.

        Raises BadInput if it names a file in a folder that does not exist: only the default
        ledger's folder, TRAINWRIGHT_HOME, is created.
        """
        given = self._get("LEDGER")
        file = re.fullmatch(r"sqlite(?:\+\w+)?:///(?!file:)([^?]+).*", given)
        if file and not (folder := Path(file[1]).parent).is_dir():
            raise BadInput(f"TRAINWRIGHT_LEDGER: there is no folder {folder}")
        return given or f"sqlite:///{self.home / 'ledger.sqlite'}"

    @property
    def jobs(self) -> Path:
        """The folder of job files that become scheduled DAGs."""
        return Path(self._get("JOBS") or dags_folder() / "jobs")

    @property
    def pools(self) -> Path:
        """The folder of the service's named pool files."""
        return Path(self._get("POOLS") or dags_folder() / "pools")

    def s3_credentials(self) -> tuple[str, str] | None:
        """Access key and secret key; None: the embedded server's own."""
        access, secret = self._get("S3_ACCESS_KEY"), self._get("S3_SECRET_KEY")
        return (access, secret) if access and secret else None

    def s3_variables(self) -> dict[str, str]:
        """The variables that a process needs to reach the S3 server."""
        prefix = f"{_PREFIX}S3_"
        return {name: value for name, value in self.variables.items() if name.startswith(prefix)}

    def ssh_login(self) -> dict[str, str | int]:
        """The login to hosts: the fields of a pool file's `ssh` that are set."""
        given = self._set("SSH_", "user", "port", "identity", "known_hosts")
        return {
            name: int(text) if name == "port" and text.isdecimal() else text
            for name, text in given.items()
        }

    def slurm_options(self) -> dict[str, str]:
        """Options of jobs in Slurm: the fields of a pool file's `slurm` that are set."""
        return self._set("SLURM_", "account", "partition", "qos", "reservation")

    @property
    def slurm_config(self) -> str | None:
        """The path of the cluster's slurm.conf; None: Slurm's own."""
        return self._get("SLURM_CONFIG") or None

    def kubernetes_login(self) -> dict[str, str]:
        """The login to a cluster that is set: `api`, `token`, `ca`, `namespace`."""
        return self._set("KUBERNETES_", "api", "token", "ca", "namespace")

    def _set(self, prefix: str, *fields: str) -> dict[str, str]:
        """The variables that are set, by their names without the prefix."""
        given = {field: self._get(f"{prefix}{field.upper()}") for field in fields}
        return {field: text for field, text in given.items() if text}

    @property
    def validate_timeout_s(self) -> float:
        """How long checking data may take, in seconds. Raises BadInput."""
        return self._positive("VALIDATE_TIMEOUT_S", VALIDATE_TIMEOUT_S, 7 * 86_400)

    def extract_limits(self) -> SandboxLimits:
        """The limits on tracing a model. Raises BadInput."""
        timeout_s = self._positive("EXTRACT_TIMEOUT_S", EXTRACT_TIMEOUT_S, 86_400)
        memory_gib = self._positive("EXTRACT_MEMORY_GIB", EXTRACT_MEMORY_GIB, 2**20)
        return SandboxLimits(timeout_s, int(2**30 * memory_gib))

    def predict_limits(self) -> SandboxLimits:
        """The limits on a stored model that predicts a chunk of rows. Raises BadInput."""
        timeout_s = self._positive("PREDICT_TIMEOUT_S", PREDICT_TIMEOUT_S, 86_400)
        memory_gib = self._positive("PREDICT_MEMORY_GIB", EXTRACT_MEMORY_GIB, 2**20)
        return SandboxLimits(timeout_s, int(2**30 * memory_gib))

    def export_limits(self) -> SandboxLimits:
        """The limits on exporting a stored model. Raises BadInput."""
        timeout_s = self._positive("EXPORT_TIMEOUT_S", EXPORT_TIMEOUT_S, 86_400)
        memory_gib = self._positive("EXPORT_MEMORY_GIB", EXTRACT_MEMORY_GIB, 2**20)
        return SandboxLimits(timeout_s, int(2**30 * memory_gib))

    def service_tokens(self) -> dict[Literal["read", "run"], str]:
        """The service's tokens that are set, by role."""
        return {
            role: self.variables[name]
            for role, name in SERVICE_SECRETS.items()
            if self.variables.get(name)
        }

    def _positive(self, name: str, default: float, most: float) -> float:
        text = self._get(name)
        try:
            value = float(text) if text else default
        except ValueError:
            value = 0.0
        if not 0 < value <= most:
            raise BadInput(
                f"{_PREFIX}{name}: got {text!r}; allowed: a number above 0, at most {most:,.0f}"
            )
        return value


def dags_folder() -> Path:
    """The folder of the installed package `trainwright.dags`. Raises BadInput if it is missing."""
    spec = importlib.util.find_spec("trainwright.dags")
    if spec is None or spec.origin is None:
        raise BadInput("trainwright.dags: not installed; install trainwright with its DAGs")
    return Path(spec.origin).parent
