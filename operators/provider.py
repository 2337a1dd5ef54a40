"""The provider's metadata: connection forms, settings, links, decorators, triggers."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

# Every process of Airflow imports this module, so it does not import the chain. A test compares.
_STEPS = (
    "validate",
    "recommend",
    "extract",
    "estimate",
    "allocate",
    "search_lr",
    "train",
    "store",
    "analyze",
    "export",
)
_TEXT = {"type": ["string", "null"]}


def _field(label: str, description: str, **schema: Any) -> dict[str, Any]:
    return {"label": label, "description": description, "schema": {**_TEXT, **schema}}


def _connection(
    kind: str, hook: str, name: str, fields: dict[str, Any], **form: Any
) -> dict[str, Any]:
    return {
        "connection-type": kind,
        "hook-class-name": f"trainwright.operators.{hook}",
        "hook-name": name,
        "conn-fields": fields,
        "ui-field-behaviour": {key.replace("_", "-"): value for key, value in form.items()},
    }


def _option(
    description: str, example: str | None = None, default: str | None = ""
) -> dict[str, Any]:
    return {
        "description": description,
        "version_added": "0.1.0",
        "type": "string",
        "example": example,
        "default": default,
    }


_CONNECTIONS = [
    _connection(
        "trainwright_store",
        "hooks.StoreHook",
        "Trainwright object store",
        {
            "store": _field(
                "Store",
                "the store of runs: s3://bucket/prefix or file:///folder; empty: as configured",
            ),
            "region": _field("Region", "the S3 server's region", default="us-east-1"),
        },
        hidden_fields=["schema", "port", "extra"],
        relabeling={"host": "Endpoint", "login": "Access key", "password": "Secret key"},
        placeholders={"host": "https://s3.example.com", "store": "s3://trainwright"},
    ),
    _connection(
        "trainwright_ledger",
        "hooks.LedgerHook",
        "Trainwright pool ledger",
        {
            "driver": _field(
                "Driver",
                "SQLAlchemy's name of the database and driver",
                default="postgresql+psycopg",
            )
        },
        hidden_fields=["extra"],
        relabeling={"schema": "Database"},
        placeholders={"port": "5432", "schema": "trainwright"},
    ),
    _connection(
        "trainwright_ssh",
        "hooks.HostHook",
        "Trainwright hosts (ssh)",
        {
            "identity": _field("Identity file", "path of the private key on the workers"),
            "known_hosts": _field(
                "Known hosts", "path of a known_hosts file; empty: the user's own"
            ),
        },
        hidden_fields=["schema", "password", "extra"],
        relabeling={"login": "User"},
        placeholders={"host": "10.0.0.11", "port": "22"},
    ),
    _connection(
        "trainwright_slurm",
        "cluster_hooks.SlurmHook",
        "Trainwright Slurm cluster",
        {
            "account": _field("Account", "account to which jobs are charged"),
            "partition": _field("Partition", "partition, or several with commas between them"),
            "qos": _field("QOS", "quality of service"),
            "reservation": _field("Reservation", "reservation in which jobs run"),
            "config": _field(
                "Configuration", "path of slurm.conf on the workers; empty: where Slurm looks"
            ),
        },
        hidden_fields=["host", "port", "schema", "login", "password", "extra"],
        relabeling={},
        placeholders={"partition": "gpu", "config": "/etc/slurm/slurm.conf"},
    ),
    _connection(
        "trainwright_kubernetes",
        "cluster_hooks.KubernetesHook",
        "Trainwright Kubernetes cluster",
        {
            "ca": _field(
                "CA file",
                "path on the workers of the certificates that sign the server's; empty: the "
                "machine's own",
            ),
            "namespace": _field(
                "Namespace", "of the Jobs, for pool files that name none; empty: trainwright"
            ),
        },
        hidden_fields=["port", "schema", "login", "extra"],
        relabeling={"host": "API server", "password": "Token"},
        placeholders={"host": "https://10.0.0.1:6443", "namespace": "trainwright"},
    ),
]
_CONFIG = {
    "trainwright": {
        "description": "Trainwright's store, folders and connections. An environment variable "
        "(such as TRAINWRIGHT_STORE) overrides the option of the same name; a connection overrides "
        "both.",
        "options": {
            "home": _option(
                "Folder of the embedded stack, the ledger and the calibrations.", "~/.trainwright"
            ),
            "store": _option(
                "The store of runs: s3://bucket/prefix or file:///folder.", "s3://trainwright"
            ),
            "jobs": _option(
                "Folder of job files that become DAGs; empty: the shipped ones.", "/opt/jobs"
            ),
            "pools": _option(
                "Folder of named pool files; empty: the shipped ones.",
                "/opt/pools",
            ),
            "store_conn_id": _option(
                "Connection to the object store for operators that name none.",
                "trainwright_store_default",
            ),
            "ssh_conn_id": _option(
                "Connection to the hosts of pools for operators that name none.",
                "trainwright_ssh_default",
            ),
            "slurm_conn_id": _option(
                "Connection to a Slurm cluster for operators that name none.",
                "trainwright_slurm_default",
            ),
            "kubernetes_conn_id": _option(
                "Connection to a Kubernetes cluster for operators that name none.",
                "trainwright_kubernetes_default",
            ),
            "ledger_conn_id": _option(
                "Connection to the ledger for operators that name none.",
                "trainwright_ledger_default",
            ),
            "tensorboard_url": _option(
                "A TensorBoard that shows the store's runs; empty: the service starts one.",
                None,
            ),
        },
    }
}


def get_provider_info() -> dict[str, Any]:
    """The provider's metadata (entry point `apache_airflow_provider`)."""
    return {
        "package-name": "trainwright",
        "name": "trainwright",
        "description": "Size, train, store and analyse models on mixed CPUs and GPUs.",
        "connection-types": _CONNECTIONS,
        "config": _CONFIG,
        "extra-links": [
            f"trainwright.operators.links.{name}"
            for name in (
                "RunFolderLink",
                "PlanLink",
                "ReportLink",
                "TensorBoardLink",
                "RejectionLink",
            )
        ],
        "task-decorators": [
            {
                "name": f"trainwright_{step}",
                "class-name": f"trainwright.operators.decorators.{step}_task",
            }
            for step in (*_STEPS, *(one.name for one in entry_points(group="trainwright.steps")))
        ],
        "triggers": [
            {
                "integration-name": "trainwright",
                "python-modules": ["trainwright.operators.triggers"],
            }
        ],
    }
