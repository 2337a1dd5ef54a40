"""Airflow connections to clusters: Slurm, Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow.sdk import BaseHook, Connection

from trainwright.tasks.errors import BadInput, TrainwrightError
from trainwright.tasks.settings import Settings


class SlurmHook(BaseHook):
    """Options of jobs in Slurm, and its configuration. Jobs belong to the worker's own user."""

    conn_name_attr = "slurm_conn_id"
    default_conn_name = "trainwright_slurm_default"
    conn_type = "trainwright_slurm"
    hook_name = "Trainwright Slurm cluster"

    def __init__(self, slurm_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.slurm_conn_id = slurm_conn_id

    @staticmethod
    def variables(connection: Connection, extra: Mapping[str, Any]) -> dict[str, str]:
        """The connection's settings. Raises BadInput if an option is wrong."""
        from trainwright.tasks.spec.documents import validated
        from trainwright.tasks.spec.slurm_spec import Slurm

        names = ("account", "partition", "qos", "reservation")
        given = {name: str(extra.get(name) or "") for name in names}
        filled = {name: text for name, text in given.items() if text}
        validated(Slurm, filled, f"connection {connection.conn_id}")
        values = {**given, "config": str(extra.get("config") or "")}
        return {f"TRAINWRIGHT_SLURM_{name.upper()}": text for name, text in values.items()}

    def get_conn(self) -> list[str]:
        """The names of the cluster's partitions. Raises BadInput, ServiceUnreachable."""
        from trainwright.tasks.slurm.slurm_commands import said

        settings = self._settings()
        listed = said(settings, "sinfo", "--noheader", "--format=%P")
        found = [line.strip().rstrip("*") for line in listed.splitlines()]
        asked = settings.slurm_options().get("partition", "")
        for name in asked.split(",") if asked else ():
            if name not in found:
                raise BadInput(
                    f"connection {self.slurm_conn_id}: partition: got {name!r}; "
                    f"allowed: {', '.join(found)}"
                )
        return found

    def _settings(self) -> Settings:
        connection = self.get_connection(self.slurm_conn_id)
        return Settings(self.variables(connection, connection.extra_dejson))

    def test_connection(self) -> tuple[bool, str]:
        """Whether Slurm answers on this machine; for the Test button of the form."""
        try:
            found = self.get_conn()
        except TrainwrightError as error:
            return False, str(error)
        return True, f"Slurm answers; partitions: {', '.join(found)}"


class KubernetesHook(BaseHook):
    """The API server of a Kubernetes cluster, and the token of an account that may make Jobs."""

    conn_name_attr = "kubernetes_conn_id"
    default_conn_name = "trainwright_kubernetes_default"
    conn_type = "trainwright_kubernetes"
    hook_name = "Trainwright Kubernetes cluster"

    def __init__(self, kubernetes_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kubernetes_conn_id = kubernetes_conn_id

    @staticmethod
    def variables(connection: Connection, extra: Mapping[str, Any]) -> dict[str, str]:
        """The connection's settings. Raises BadInput if the API server or the token is missing."""
        from trainwright.tasks.train.hosts.kubernetes.cluster_login import ClusterLogin

        given: dict[str, Any] = {"API": connection.host, "TOKEN": connection.password}
        given |= {"CA": extra.get("ca"), "NAMESPACE": extra.get("namespace")}
        values = {f"TRAINWRIGHT_KUBERNETES_{name}": str(given[name] or "") for name in given}
        where = f"connection {connection.conn_id}"
        if ClusterLogin.of(Settings(values), where) is None:
            raise BadInput(f"{where}: it has no API server and no token; fill them in")
        return values

    def get_conn(self) -> Any:
        """The cluster (a `ClusterApi` of `trainwright.tasks.train.hosts.kubernetes`)."""
        from trainwright.tasks.train.hosts.kubernetes.cluster_api import ClusterApi
        from trainwright.tasks.train.hosts.kubernetes.cluster_login import ClusterLogin

        connection = self.get_connection(self.kubernetes_conn_id)
        settings = Settings(self.variables(connection, connection.extra_dejson))
        namespace = settings.kubernetes_login().get("namespace", "trainwright")
        return ClusterApi(namespace, login=ClusterLogin.of(settings))

    def test_connection(self) -> tuple[bool, str]:
        """Whether the API server answers and admits the token; for the form's Test button."""
        try:
            api = self.get_conn()
            api.pods_of("trainwright")
        except TrainwrightError as error:
            return False, str(error)
        return True, f"the API server answers; pods of namespace {api.namespace} can be read"
