"""The options with which a host is asked for: one job of one node. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainwright.tasks.spec.host_spec import Host
from trainwright.tasks.spec.pool import Device
from trainwright.tasks.spec.slurm_spec import Slurm


def job_options(host: Host, devices: Sequence[Device], wanted: Slurm) -> list[str]:
    """Options of srun and sbatch for a host, of which these devices are used."""
    of_host = [one for one in devices if one.type in ("cpu", "emulated")]
    gpus = len(devices) - len(of_host)
    cores = math.ceil(sum(one.cores or 1.0 for one in of_host))
    options = {
        "cpus-per-task": str(cores + gpus * (wanted.cpus_per_gpu or 1)),
        "partition": wanted.partition,
        "constraint": wanted.constraint,
        "nodelist": wanted.node,
        "account": wanted.account,
        "qos": wanted.qos,
        "reservation": wanted.reservation,
    }
    if gpus:
        options["gres"] = f"{wanted.gres or 'gpu'}:{gpus}"
    if wanted.time_limit is not None:
        options["time"] = str(math.ceil(wanted.time_limit / 60))
    if host.memory is not None:
        options["mem"] = f"{int(host.memory) >> 20}M"
    return [f"--{name}={value}" for name, value in options.items() if value is not None]
