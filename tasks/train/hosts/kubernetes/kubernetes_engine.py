"""Hosts that a Kubernetes cluster gives, through its own queue. Untested on a cluster."""

from __future__ import annotations

import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from trainwright.tasks.errors import BadInput, ServiceUnreachable
from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.documents import validated
from trainwright.tasks.spec.kubernetes_spec import Kubernetes
from trainwright.tasks.train.hosts.agent import SILENCE_S
from trainwright.tasks.train.hosts.host_engine import HostRequest, HostStanding
from trainwright.tasks.train.hosts.kubernetes import manifests
from trainwright.tasks.train.hosts.kubernetes.cluster_login import ClusterLogin
from trainwright.tasks.train.hosts.kubernetes.orders import RelayFolder, RelayOrder
from trainwright.tasks.train.hosts.kubernetes.pod_state import OUT_OF_MEMORY

_HOSTS_ROOM = "trainwright.tasks.train.hosts.kubernetes"
_DELETED_WITHIN_S, _LOOK_S = 10.0, 0.1


class KubernetesEngine:
    """An `HostEngine` that asks a cluster for one Job per host."""

    def __init__(self, cluster: Kubernetes, settings: Settings) -> None:
        """Raises BadInput if the settings' login is wrong."""
        if (login := ClusterLogin.of(settings)) is not None:
            login.tls()
        given = settings.kubernetes_login()
        if "namespace" in given and "namespace" not in cluster.model_fields_set:
            changed = {**cluster.model_dump(), "namespace": given["namespace"]}
            cluster = validated(Kubernetes, changed, "TRAINWRIGHT_KUBERNETES_NAMESPACE")
        self._cluster = cluster
        # the relay's process has the token in its environment, and in no file or command line
        self.variables = {
            f"TRAINWRIGHT_KUBERNETES_{name.upper()}": given.get(name, "")
            for name in ("api", "token", "ca")
        }
        self._folder = tempfile.TemporaryDirectory(prefix="trainwright-kubernetes-")
        self._newest: dict[str, RelayFolder] = {}
        self.silence_s = SILENCE_S

    def command(self, asked: HostRequest, words: Sequence[str]) -> list[str]:
        """As `HostEngine`: a relay, which asks for the host when it starts."""
        name = f"trainwright-{asked.host.name[:40].rstrip('-')}-{secrets.token_hex(4)}"
        inside = [asked.python, "-P", "-m", f"{_HOSTS_ROOM}.dial_back", manifests.SECRET_FOLDER]
        job = manifests.job(name, asked, self._cluster, [*inside, *words])
        folder = self._newest[asked.host.name] = RelayFolder(Path(self._folder.name) / name)
        folder.give(RelayOrder(name=name, cluster=self._cluster, job=job))
        return [sys.executable, "-P", "-m", f"{_HOSTS_ROOM}.relay", str(folder.path)]

    def standing(self, asked: HostRequest) -> HostStanding:
        """As `HostEngine`: granted when its pod has connected."""
        return self._newest[asked.host.name].standing()

    def why_ended(self, stderr: str, code: int | None) -> str:
        """As `HostEngine`."""
        lines = [line for line in stderr.strip().splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"the relay of its pod exited with {code}"

    def takes_back(self, stderr: str) -> bool:
        """As `HostEngine`: the agent says it, by its pod's SIGTERM."""
        return False

    def out_of_memory(self, why: str) -> bool:
        """As `HostEngine`: a pod that exceeds its memory ends as a whole."""
        return OUT_OF_MEMORY in why

    def error(self, asked: HostRequest, why: str) -> BadInput | ServiceUnreachable:
        """As `HostEngine`: bad input if the cluster refuses what the pool file asks for."""
        folder = self._newest.get(asked.host.name)
        if folder is not None and folder.refused:
            return BadInput(f"host {asked.host.name}: {why}")
        return ServiceUnreachable(f"host {asked.host.name}: {why}", service="kubernetes")

    def _started(self) -> list[RelayFolder]:
        """The folders of relays that have run, all of which have a guard."""
        return [RelayFolder(path) for path in Path(self._folder.name).iterdir()]

    def close(self) -> None:
        """As `HostEngine`: waits until the Jobs are deleted, which their guards do."""
        until = time.monotonic() + _DELETED_WITHIN_S
        while not all(one.ended for one in self._started()) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        self._folder.cleanup()
