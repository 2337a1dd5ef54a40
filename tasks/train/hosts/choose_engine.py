"""Chooses the engine of a pool."""

from __future__ import annotations

from trainwright.tasks.settings import Settings
from trainwright.tasks.spec.pool import Pool
from trainwright.tasks.train.hosts.host_engine import HostEngine
from trainwright.tasks.train.hosts.kubernetes.kubernetes_engine import KubernetesEngine
from trainwright.tasks.train.hosts.slurm.slurm_engine import SlurmEngine
from trainwright.tasks.train.hosts.ssh_engine import SshEngine


def engine_of(pool: Pool, settings: Settings, label: str) -> HostEngine:
    """The engine that runs processes on the pool's hosts, for one launch of the job `label`."""
    if pool.kubernetes is not None:
        return KubernetesEngine(pool.kubernetes, settings)
    if pool.engine == "slurm":
        return SlurmEngine(pool, settings, label)
    return SshEngine(pool.ssh, settings)
