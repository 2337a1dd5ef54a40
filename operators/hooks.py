"""Airflow connections to the object store, the ledger and the hosts, and their settings.

`provider` has their forms, `cluster_hooks` the connections to clusters.

A connection replaces all of its variables (`trainwright.tasks.settings`): a field that is empty
in the form unsets its variable, so that one server never gets another server's keys.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Any

from airflow.sdk import BaseHook, Connection
from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.sdk.log import mask_secret

from trainwright.operators.cluster_hooks import KubernetesHook, SlurmHook
from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.settings import Settings

SSH_TIMEOUT_S = 20
_CONFIGURED = {
    "home": "TRAINWRIGHT_HOME",
    "store": "TRAINWRIGHT_STORE",
    "jobs": "TRAINWRIGHT_JOBS",
    "pools": "TRAINWRIGHT_POOLS",
}


class StoreHook(BaseHook):
    """The object store: any S3 server, or a folder."""

    conn_name_attr = "store_conn_id"
    default_conn_name = "trainwright_store_default"
    conn_type = "trainwright_store"
    hook_name = "Trainwright object store"

    def __init__(self, store_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.store_conn_id = store_conn_id

    @staticmethod
    def variables(connection: Connection, extra: Mapping[str, Any]) -> dict[str, str]:
        """The connection's settings. If its Store is empty, the configured store applies.

        Raises BadInput if the endpoint or a key is missing.
        """
        given = {
            "TRAINWRIGHT_S3_ENDPOINT": connection.host,
            "TRAINWRIGHT_S3_ACCESS_KEY": connection.login,
            "TRAINWRIGHT_S3_SECRET_KEY": connection.password,
            "TRAINWRIGHT_S3_REGION": extra.get("region"),
        }
        store = extra.get("store") or configured().store
        if str(store).startswith("s3://") and not (
            connection.host and connection.login and connection.password
        ):
            raise BadInput(
                f"connection {connection.conn_id}: the store {store} needs an endpoint, an access "
                "key and a secret key; fill them in"
            )
        return {name: str(value or "") for name, value in given.items()} | {
            "TRAINWRIGHT_STORE": str(store)
        }

    def get_conn(self) -> Any:
        """The store (a `trainwright.tasks.storage.objects.ObjectStore`)."""
        from trainwright.tasks.storage.connect import open_store

        settings = settings_of({"store_conn_id": self.store_conn_id})
        return open_store(settings.store, settings)

    def test_connection(self) -> tuple[bool, str]:
        """Whether the store answers; for the Test button of the form."""
        try:
            next(iter(self.get_conn().folders("runs/")), None)
        except TrainwrightError as error:
            return False, str(error)
        return True, "the store answers"


class LedgerHook(BaseHook):
    """The ledger of leases: an SQL database."""

    conn_name_attr = "ledger_conn_id"
    default_conn_name = "trainwright_ledger_default"
    conn_type = "trainwright_ledger"
    hook_name = "Trainwright pool ledger"

    def __init__(self, ledger_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ledger_conn_id = ledger_conn_id

    @staticmethod
    def variables(connection: Connection, extra: Mapping[str, Any]) -> dict[str, str]:
        """The connection's settings. Raises BadInput if the database is missing."""
        from sqlalchemy.engine import URL

        if not connection.schema:
            raise BadInput(
                f"connection {connection.conn_id}: Database is empty; "
                "allowed: a database's name, or a file for SQLite"
            )
        url = URL.create(
            str(extra.get("driver") or "postgresql+psycopg"),
            connection.login or None,
            connection.password or None,
            connection.host or None,
            connection.port or None,
            connection.schema,
        )
        return {"TRAINWRIGHT_LEDGER": url.render_as_string(hide_password=False)}

    def get_conn(self) -> Any:
        """The ledger (a `trainwright.tasks.leases.ledger.Ledger`)."""
        from trainwright.tasks.leases.ledger import Ledger

        connection = self.get_connection(self.ledger_conn_id)
        return Ledger(self.variables(connection, connection.extra_dejson)["TRAINWRIGHT_LEDGER"])

    def test_connection(self) -> tuple[bool, str]:
        """Whether the database answers; for the Test button of the form."""
        try:
            held = self.get_conn().held()
        except TrainwrightError as error:
            return False, str(error)
        return True, f"the ledger answers; {len(held)} lease(s)"


class HostHook(BaseHook):
    """Login to a pool's hosts by ssh key. The form's Test button tries the host named here."""

    conn_name_attr = "ssh_conn_id"
    default_conn_name = "trainwright_ssh_default"
    conn_type = "trainwright_ssh"
    hook_name = "Trainwright hosts (ssh)"

    def __init__(self, ssh_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ssh_conn_id = ssh_conn_id

    @staticmethod
    def variables(connection: Connection, extra: Mapping[str, Any]) -> dict[str, str]:
        """The connection's settings."""
        given = {"USER": connection.login, "PORT": connection.port}
        given |= {"IDENTITY": extra.get("identity"), "KNOWN_HOSTS": extra.get("known_hosts")}
        return {f"TRAINWRIGHT_SSH_{name}": str(value or "") for name, value in given.items()}

    def get_conn(self) -> list[str]:
        """The ssh command for the host: without prompts, and only to known host keys.

        Raises BadInput if the host's address is not valid.
        """
        from trainwright.tasks.ssh import ADDRESS, ssh_command

        connection = self.get_connection(self.ssh_conn_id)
        if not ADDRESS.fullmatch(connection.host or ""):
            raise BadInput(
                f"connection {connection.conn_id}: got host {connection.host!r}; "
                "allowed: a name or address"
            )
        settings = settings_of({"ssh_conn_id": self.ssh_conn_id})
        return ssh_command(str(connection.host), settings)

    def test_connection(self) -> tuple[bool, str]:
        """Whether the login works; for the Test button of the form."""
        try:
            done = subprocess.run(
                [*self.get_conn(), "true"],
                capture_output=True,
                text=True,
                timeout=SSH_TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired, TrainwrightError) as error:
            return False, str(error)
        lines = done.stderr.strip().splitlines() or ["the login works"]
        return done.returncode == 0, lines[-1]


def configured() -> Settings:
    """The environment's settings; Airflow's [trainwright] section fills in what it lacks."""
    options = {
        name: str(value)
        for option, name in _CONFIGURED.items()
        if (value := conf.get("trainwright", option, fallback=""))
    }
    return Settings.from_environment({**options, **os.environ})


_HOOKS: dict[str, Any] = {
    one.conn_name_attr: one for one in (StoreHook, LedgerHook, HostHook, SlurmHook, KubernetesHook)
}
CONNECTION_FIELDS = tuple(_HOOKS)
"""The operators' inputs that name a connection."""


def connection_ids(asked: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """The connections to use, by field: those given, else the configured ones. May be empty."""
    found = {
        field: (asked or {}).get(field) or conf.get("trainwright", field, fallback="")
        for field in CONNECTION_FIELDS
    }
    return {field: str(name) for field, name in found.items() if name}


def settings_of(ids: Mapping[str, str]) -> Settings:
    """The settings with these connections applied.

    Raises BadInput if one is missing or lacks a field. It waits for Airflow's answers: a trigger
    calls it in a thread, not in the event loop.
    """
    settings = configured()
    for field, name in ids.items():
        try:
            connection = BaseHook.get_connection(name)
        except AirflowNotFoundException:
            raise BadInput(
                f"{field}: got {name!r}; Airflow has no such connection; allowed: one of its "
                "connections (Admin, Connections), or none"
            ) from None
        values = _HOOKS[field].variables(connection, connection.extra_dejson)
        if "TRAINWRIGHT_LEDGER" in values:
            mask_secret(values["TRAINWRIGHT_LEDGER"])  # the URL contains the encoded password
        settings = settings.replaced(values)
    return settings
